"""Models small enough to trace in tenths of a second, and the same runs on real tensors to compare with."""

import contextlib
import dataclasses
import warnings

import torch
from accelerate.state import AcceleratorState, GradientState
from bitsandbytes.optim import GlobalOptimManager

from autofit.contract.facts import Facts, Hardware, Model, Workload
from autofit.costmodel.memory import peak
from autofit.costmodel.tracing import fake_run, source, trace_job
from autofit.costmodel.tracing.layers import Marks
from autofit.costmodel.tracing.trace_request import traced_plan
from autofit.costmodel.tracing.trace_store import evaluated_rows
from autofit.machine.packages import installed
from autofit.registry import techniques
from tests.support import tiny
from tests.support.tiny import GIB, write_config

_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "max_position_embeddings": 4096,
}
_GROUPED = {**_SMALL, "num_key_value_heads": 2}
CONFIGS = {
    "llama": {"model_type": "llama", **_GROUPED, "num_hidden_layers": 9},
    "deep": {"model_type": "llama", **_GROUPED, "num_hidden_layers": 18},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 5, "n_head": 4, "vocab_size": 300, "n_positions": 512},
    "gemma2": {**_GROUPED, "model_type": "gemma2", "num_hidden_layers": 10, "head_dim": 16, "sliding_window": 32},
    "mixtral": {"model_type": "mixtral", **_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **_SMALL,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "num_hidden_layers": 6,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    },
}
PLAIN = tiny.PLAIN.replaced(accumulation=1)


def facts_of(config, *, device="cpu", seq_len=64, launch_path="trainer", global_batch=64):
    """Facts for a config, without reading them in a process."""
    values = CONFIGS[config] if isinstance(config, str) else config
    capped = values["model_type"] == "gemma2"  # its scores and its logits
    return Facts(
        model=Model(
            name=values["model_type"],
            architecture=f"{values['model_type']}ForCausalLM",
            model_type=values["model_type"],
            parameters=10**6,
            layers=values.get("num_hidden_layers") or values["n_layer"],
            hidden_size=values.get("hidden_size") or values["n_embd"],
            vocab_size=values["vocab_size"],
            max_positions=None,
            supports_checkpointing=True,
            attention="eager" if capped else "sdpa",
            attentions=("eager",) if capped else ("eager", "sdpa"),
            plain_head=not capped,
        ),
        hardware=Hardware(
            device=device,
            name="traced",
            total_bytes=64 * GIB,
            free_bytes=64 * GIB,
            host_total_bytes=64 * GIB,
            host_free_bytes=64 * GIB,
            precisions=("fp32", "tf32", "bf16", "fp16") if device == "cuda" else ("fp32", "bf16"),
            capability=(9, 0) if device == "cuda" else None,
        ),
        workload=Workload(
            seq_len=seq_len,
            global_batch=global_batch,
            limit_bytes=64 * GIB,
            host_limit_bytes=64 * GIB,
            launch_path=launch_path,
        ),
        packages=installed(),
    )


@contextlib.contextmanager
def like_a_process_of_its_own():
    """A trace is made in a process that is thrown away: put back what it leaves changed in this one."""
    precision, threads = torch.backends.fp32_precision, torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for one another crawl where others compute too
    GlobalOptimManager.get_instance().initialize()  # it remembers which parameter, by its place, wants 32 bits
    _forget_accelerators()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _forget_accelerators()
        torch.set_num_threads(threads)
        torch.backends.fp32_precision = precision


def _forget_accelerators():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Lab:
    """Traces of one model on one machine, each made once.

    Args:
        folder: An empty folder.
        config: A name in :data:`CONFIGS`, or a config.
        options: As for :func:`facts_of`.
    """

    def __init__(self, folder, config, **options):
        values = CONFIGS[config] if isinstance(config, str) else config
        self.folder = write_config(folder, values)
        self.facts = facts_of(values, **options)
        self._parts = {}

    def micro_steps(self, plan, **options):
        """One trace of the plan itself."""
        with like_a_process_of_its_own():
            return fake_run.micro_steps(plan, self.facts, config=self.folder, folder=self.folder, **options)

    def optimizer_steps(self, plan):
        """One trace of the plan itself."""
        with like_a_process_of_its_own():
            return fake_run.optimizer_steps(plan, self.facts, config=self.folder, folder=self.folder)

    def micro(self, plan, *, as_it_is=False):
        """The micro-steps that stand for the plan's."""
        return self._part("micro_steps", plan, trace_job.micro_part, as_it_is=as_it_is)

    def optimizer(self, plan, *, as_it_is=False):
        """The optimizer's step that stands for the plan's."""
        return self._part("optimizer", plan, trace_job.optimizer_part, as_it_is=as_it_is)

    def _part(self, part, plan, make, *, as_it_is):
        traced = plan if as_it_is else traced_plan(plan, part)
        if (part, traced) not in self._parts:
            with like_a_process_of_its_own():
                self._parts[part, traced] = make(traced, self.facts, self.folder, self.folder)
        return self._parts[part, traced]

    def need(self, plan):
        """What the plan needs, by its trace."""
        return peak.need(
            self.micro(plan),
            self.optimizer(plan),
            rows=plan["micro_batch"],
            accumulation=plan["accumulation"],
            waiting=self.facts.workload.launch_path == "trainer",
            evaluated_rows=evaluated_rows(plan, self.facts),
        )

    def real(self, plan):
        """The tape of two whole optimizer steps of the plan on real tensors."""
        with like_a_process_of_its_own(), source.prepared(plan, self.facts, self.folder) as recipe:
            model = recipe.model(None, config=self.folder, device="cpu")
            with fake_run._recording(recipe, fake=False) as recorder:
                marks = Marks(recipe, recorder, accumulation=plan["accumulation"], steps=2)
                source.train(recipe, model, marks, self.folder, fake=False)
            return recorder.tape()


def sharded_facts(processes, launch_path="trainer"):
    """The same for a Llama on several GPUs, whose layers FSDP may take for its units; 64 rows a process."""
    plain = facts_of("llama", device="cuda", launch_path=launch_path)
    return dataclasses.replace(
        plain,
        workload=dataclasses.replace(plain.workload, processes=processes, global_batch=64 * processes),
        model=dataclasses.replace(plain.model, layer_classes=("LlamaDecoderLayer",)),
    )


def every_choice(facts):
    """The values of each technique that are to be had, but those that only split the global batch."""
    return {
        one.name: [choice.value for choice in one.choices(facts) if choice.status != "withheld"]
        for one in techniques()
        if one.name not in {"micro_batch", "accumulation"}
    }
