"""Plans that the guard has to pass, and defects that it has to refuse.

Honest plans train models of twelve architectures: 16-bit autocast, checkpointing, other attention and loss kernels,
8-bit optimizer state, other splits of the batch. Defects are patched into the process that trains the plan
(``tests/support/faulty.py``), in an exact and in a 16-bit plan. float16, which Accelerate leaves out on a CPU, is
switched on there as Accelerate does it on a GPU. ``tests/bench/guard_bench.py`` looks at all of them.
"""

import tempfile
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from autofit.contract.facts import Facts
from autofit.contract.outcome import Crashed
from autofit.contract.plan import Plan
from autofit.contract.technique import Kind
from autofit.system.forking.server import ForkServer
from autofit.training.guard.equivalence import Guards, judge, kind_of, references, rounding_of
from autofit.training.guard.loss_curve import Curve
from autofit.training.guard.tolerance import compare, ranks_apart
from autofit.training.runner import ProcessRunner
from autofit.training.timing import Effort
from tests.support.faulty import FAULT
from tests.support.tiny import PLAIN, describe, write_config

_SEEN = {"vocab_size": 1024, "max_position_embeddings": 64}
_SMALL = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, **_SEEN,
}  # fmt: skip
_GROUPED = {**_SMALL, "num_key_value_heads": 2}
_BLOOM = {"hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 1024}
ARCHITECTURES = {
    "llama": _GROUPED,
    "bert": _SMALL,
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 1024, "n_positions": 64},
    "qwen2": _GROUPED,
    "gemma2": {**_GROUPED, "head_dim": 16, "sliding_window": 16},
    "mixtral": {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_neox": _SMALL,
    "opt": {**_SMALL, "ffn_dim": 160, "word_embed_proj_dim": 64},
    "phi": _SMALL,
    "falcon": {**_SMALL, "new_decoder_architecture": False},
    "bloom": _BLOOM,
    "mamba": {**_SMALL, "state_size": 8},
}
BATCH, SEQ_LEN = 16, 32


def plan(micro_batch: int = 8, **values: str) -> Plan:
    """A plan of the bench's global batch."""
    return PLAIN.replaced(micro_batch=micro_batch, accumulation=BATCH // micro_batch, **values)


EXACT = plan(2, checkpointing="full")
BF16 = plan(precision="bf16")
FP16 = plan(precision="fp16")
HONEST = {
    "bf16": BF16,
    "bf16, rows one by one": plan(1, precision="bf16"),
    "exact kernels": plan(4, checkpointing="full", attention="eager", kernels="chunked_ce"),
    "8-bit": plan(optimizer="adamw_8bit"),
    "all": plan(
        precision="bf16", attention="eager", kernels="chunked_ce", checkpointing="full", optimizer="adamw_8bit"
    ),
    "fp16": FP16,
}
_SCALED = """
from accelerate import Accelerator
import torch
began = Accelerator.__init__
def begin(self, *args, **kwargs):
    began(self, *args, **kwargs)
    self.native_amp = self.state.mixed_precision == "fp16"
    self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE) if self.native_amp else None
Accelerator.__init__ = begin
"""
"""What Accelerate does for float16 on a device that has it."""
TOOLS = """
import json, torch
from accelerate import Accelerator
from autofit.contract.recipe import Recipe
job = json.loads((folder / "job.json").read_text("utf-8"))
accumulation = job["plan"]["accumulation"]
def spoil(change):
    build = Recipe.model
    def model(self, *args, **kwargs):
        made = build(self, *args, **kwargs)
        return change(made) if callable(change) and change.__name__ == "replaced" else (change(made), made)[1]
    Recipe.model = model
def layers(m):
    return max((one for one in m.modules() if isinstance(one, torch.nn.ModuleList)), key=len)
def matrix(m, layer=1):
    return max((p for p in layers(m)[layer].parameters()), key=lambda p: p.numel())
def inputs(change):
    def hook(module, args, kwargs):
        return args, change(dict(kwargs))
    return lambda m: m.register_forward_pre_hook(hook, with_kwargs=True)
def shifted(kwargs):
    return {**kwargs, "labels": kwargs["labels"].roll(1, -1)}
def half(kwargs):
    labels = kwargs["labels"].clone()
    labels[:, labels.shape[1] // 2:] = -100
    return {**kwargs, "labels": labels}
kept = {}
def repeated(kwargs):
    if kept.pop("last", None) is not None:
        return {**kwargs, "input_ids": kept["ids"], "labels": kept["ids"]}
    kept.update(last=1, ids=kwargs["input_ids"])
    return kwargs
calls = [0]
def dropped(self, loss, backward=Accelerator.backward, **kwargs):
    calls[0] += 1
    if calls[0] % accumulation:
        backward(self, loss, **kwargs)
def undivided(self, loss, backward=Accelerator.backward, **kwargs):
    backward(self, loss * accumulation, **kwargs)
def clipped_early(self, loss, backward=Accelerator.backward, **kwargs):
    backward(self, loss, **kwargs)
    torch.nn.utils.clip_grad_norm_([p for m in self._models for p in m.parameters()], 0.3)
def every_group(change):
    step = torch.optim.AdamW.step
    def stepped(self, *args, **kwargs):
        for group in self.param_groups:
            change(group)
        return step(self, *args, **kwargs)
    torch.optim.AdamW.step = stepped
def sees_all(attention=torch.nn.functional.scaled_dot_product_attention):
    def seeing(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **kwargs):
        return attention(query, key, value, dropout_p=dropout_p, **kwargs)
    torch.nn.functional.scaled_dot_product_attention = seeing
def lost(group):
    group["params"] = group["params"][: len(group["params"]) // 2]
"""
DEFECTS = {
    "the loss is not divided by the accumulation": "Accelerator.backward = undivided",
    "the gradients are halved": "spoil(lambda m: [p.register_hook(lambda g: g * 0.5) for p in m.parameters()])",
    "a micro-batch is dropped": "Accelerator.backward = dropped",
    "a micro-batch is trained on twice": "spoil(inputs(repeated))",
    "a layer is frozen": "spoil(lambda m: layers(m)[1].requires_grad_(False))",
    "a layer's gradients are zero": (
        "spoil(lambda m: [p.register_hook(lambda g: g * 0) for p in layers(m)[0].parameters()])"
    ),
    "a weight's gradient is zero": "spoil(lambda m: matrix(m).register_hook(lambda g: g * 0))",
    "a weight's gradient is halved": "spoil(lambda m: matrix(m).register_hook(lambda g: g * 0.5))",
    "a weight's gradient is doubled": "spoil(lambda m: matrix(m).register_hook(lambda g: g * 2))",
    "a weight's gradient has the other sign": "spoil(lambda m: matrix(m).register_hook(lambda g: -g))",
    "a layer's gradients are doubled": (
        "spoil(lambda m: [p.register_hook(lambda g: g * 2) for p in layers(m)[1].parameters()])"
    ),
    "nothing is clipped": "Accelerator.clip_grad_norm_ = lambda self, ps, n, **_: n",
    "clipped to half": (
        "clip = Accelerator.clip_grad_norm_; "
        "Accelerator.clip_grad_norm_ = lambda s, ps, n, **k: clip(s, ps, n / 2, **k)"
    ),
    "clipped in every micro-step": "Accelerator.backward = clipped_early",
    "the learning rate is 1.3 times as high": "every_group(lambda g: g.update(lr=1.3e-3))",
    "the momentum is forgotten": "every_group(lambda g: g.update(betas=(0.0, 0.999)))",
    "half of the weights are not in the optimizer": "every_group(lost)",
    "the optimizer does not step": "torch.optim.AdamW.step = lambda self, *a, **k: None",
    "gradients are never set to zero": (
        "torch.optim.Optimizer.zero_grad = torch.nn.Module.zero_grad = lambda self, *a, **k: None"
    ),
    "attention sees what comes later": "sees_all()",
    "labels are shifted by one": "spoil(inputs(shifted))",
    "half of the positions have no loss": "spoil(inputs(half))",
    "a layer is left out": "spoil(lambda m: layers(m).__delitem__(1))",
    "weights are bfloat16 without a float32 copy": "spoil(lambda m: m.to(torch.bfloat16))",
    "norms and biases are stuck at bfloat16": (
        "spoil(lambda m: [p.data.copy_(p.data.bfloat16()) for p in m.parameters()]); step = torch.optim.AdamW.step; "
        "torch.optim.AdamW.step = lambda s, *a, **k: (step(s, *a, **k), "
        "[p.data.copy_(p.data.bfloat16()) for g in s.param_groups for p in g['params']])[0]"
    ),
}
"""Each is run in the worker that trains the plan, before it begins."""
EXACT_DEFECTS = {
    "weights decay, and norms with them": "every_group(lambda g: g.update(weight_decay=0.1))",
}
"""Those that 16 bits hide."""
FP16_DEFECTS = {
    # tiny models underflow little without scaling; as much as with a thousand times the tokens in a batch
    "the loss is scaled down, and gradients underflow": _SCALED.replace("SCALE", "2.0**-10"),
    "clipped before the gradients are unscaled": (
        _SCALED.replace("SCALE", "65536.0") + "Accelerator.unscale_gradients = lambda self, *a: None"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan to look at.

    Attributes:
        script: Run in the worker that trains the plan, before its ranks begin.
        defect: What it does wrong; empty for an honest plan.
    """

    name: str
    architecture: str
    plan: Plan
    script: str = ""
    defect: str = ""
    launch_path: str = "trainer"
    steps: int = 3
    small_reference: bool = False
    processes: int = 1

    def words(self):
        return " ".join(filter(None, (self.architecture, self.name, self.defect)))


LACKING = {
    "gemma2": {"kernels": "none"},
    "mixtral": {"kernels": "none"},
    "mamba": {"attention": "default"},
    "bloom": {"attention": "default"},
}
"""What an architecture's plans do without: it caps its logits, or has one attention of its own."""
_ROUTERS = (
    "spoil(lambda m: [p.register_hook(lambda g: g * 0) for n, p in m.named_parameters() if n.endswith('gate.weight')])"
)
_UNTIED = "spoil(lambda m: setattr(m.lm_head, 'weight', torch.nn.Parameter(m.lm_head.weight.detach().clone())))"


def honest():
    """Plans that train as the baseline does."""
    for architecture in ARCHITECTURES:
        lacking = LACKING.get(architecture, {})
        for name, one in HONEST.items():
            loop = name in {"fp16", "all"}
            if name != "fp16" or architecture in {"llama", "gpt2", "bert", "opt"}:
                yield Case(
                    name=name,
                    architecture=architecture,
                    plan=one.replaced(**lacking),
                    steps=8 if name in {"bf16", "8-bit"} else 3,
                    launch_path="loop" if loop else "trainer",
                    script=_SCALED.replace("SCALE", "65536.0") if name == "fp16" else "",
                )
    yield Case(name="compiled", architecture="llama", plan=plan(compile="regions"))
    yield Case(name="compiled bf16", architecture="bert", plan=plan(compile="regions", precision="bf16"))
    for architecture in ("llama", "bert", "mixtral"):
        for name, one in {"bf16": BF16, "exact": EXACT}.items():
            yield Case(name=f"{name}, small reference", architecture=architecture, plan=one, small_reference=True)


def defects():
    """Plans that train something else."""
    for defect, script in DEFECTS.items():
        for name, one in {"exact": EXACT, "bf16": BF16}.items():
            shared = {"name": name, "plan": one, "script": TOOLS + script, "defect": defect}
            yield Case(architecture="llama", **shared)
            if "sees_all" not in script:  # BERT's attention does so anyway
                yield Case(architecture="bert", launch_path="loop", **shared)
    for architecture, defect, script in (
        *(("llama", defect, script) for defect, script in EXACT_DEFECTS.items()),
        ("mixtral", "the routers do not learn", _ROUTERS),
        ("gpt2", "head and embedding come apart", _UNTIED),
    ):
        for name, one in {"exact": EXACT, "bf16": BF16}.items():
            if name == "exact" or defect not in EXACT_DEFECTS:
                lacking = LACKING.get(architecture, {})
                shared = {"name": name, "plan": one.replaced(**lacking), "script": TOOLS + script, "defect": defect}
                yield Case(architecture=architecture, **shared)
    for defect, script in FP16_DEFECTS.items():
        yield Case(name="fp16", architecture="llama", plan=FP16, script=script, defect=defect, launch_path="loop")


@dataclass(slots=True, kw_only=True)
class Bench:
    """Trains cases through the guard's own processes; those that share a baseline train it once."""

    folder: Path
    server: ForkServer
    _curves: dict[tuple, Curve] = field(default_factory=dict)
    _facts: dict[tuple[str, str], Facts] = field(default_factory=dict)

    def look(self, case):
        """The guard's verdict, and every comparison that it made."""
        facts, honest = self._described(case), self.folder / case.architecture
        config = self._spoilt(case)
        reference = list(references(case.plan, facts))[case.small_reference]
        rounding = rounding_of(case.plan, facts)
        mine = self._train(facts, config, case.plan, case.steps, None)
        theirs, rounded = (self._baseline(case, facts, honest, reference, one) for one in (None, rounding))
        assert theirs.failed is rounded.failed is None, (case, theirs.failed, rounded.failed)
        found = judge(case.plan, facts, mine, reference, theirs, rounded=rounded)
        single = kind_of(case.plan, facts) == Kind.EXACT or not facts.model.has_experts
        ranks = () if mine.failed else (mine, *mine.others)
        compared = [each for one in ranks for each in compare(one, theirs, rounded, single=single)]
        return found, [*compared, *ranks_apart(mine)]

    def tried(self, case):
        """The outcome of a trial, which comes before the guard in a tune: one that a signal has killed is tried again.

        Of some sixty trials with gloo and context parallelism one was killed by an abort in glibc's malloc().
        """
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        runner = ProcessRunner(folder, self._described(case), self._spoilt(case), self.server)
        effort = Effort(fidelity="whole", min_steps=2, max_steps=3)
        run = partial(runner.run, 0, case.plan, effort, purpose="search", limit_seconds=300.0)
        first = run().outcome
        killed = isinstance(first, Crashed) and "killed by SIG" in first.reason
        return run().outcome if killed else first

    def _spoilt(self, case):
        """The model's folder, with what the case does wrong."""
        if not case.script:
            return self.folder / case.architecture
        values = {"model_type": case.architecture, **ARCHITECTURES[case.architecture]}
        config = write_config(Path(tempfile.mkdtemp(dir=self.folder)) / "model", values)
        (config / FAULT).write_text(case.script + "\nhonest(folder)\n", "utf-8")
        return config

    def _baseline(self, case, facts, config, reference, rounding):
        key = case.architecture, case.launch_path, reference, case.steps, rounding
        if key not in self._curves:
            self._curves[key] = self._train(facts, config, reference, case.steps, rounding)
        return self._curves[key]

    def _train(self, facts, config, plan, steps, rounding):
        guards = Guards(self.folder, facts, config, self.server)
        return guards._train(plan, steps, 300.0, rounding)

    def _described(self, case):
        key = case.architecture, case.launch_path
        if key not in self._facts:
            values = {"model_type": case.architecture, **ARCHITECTURES[case.architecture]}
            config = write_config(self.folder / case.architecture, values)
            sizes = {"seq_len": SEQ_LEN, "global_batch": BATCH, "launch_path": case.launch_path}
            facts = describe(self.server, config, **sizes)
            precisions = (*facts.hardware.precisions, "fp16")
            self._facts[key] = replace(facts, hardware=replace(facts.hardware, precisions=precisions))
        found = self._facts[key]
        return replace(found, workload=replace(found.workload, processes=case.processes))
