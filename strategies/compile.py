"""Compile: ``torch.compile`` turns the model's Python into fused kernels.

- ``model``: the whole model as one graph, where nothing breaks it.
- ``regions``: each part by itself, equal layers once; compiles in a fraction of the time, and what would be fused
  across layers is not. By Accelerate's ``compile_regions``.
- ``model_max_autotune``: the whole model, with CUDA graphs, and matrix products are timed to choose their kernels.
  CUDA only.
- ``cuda_graphs``: the whole model (mode ``reduce-overhead``), its kernels recorded and replayed as CUDA graphs:
  no launch costs, and the graphs' memory is kept between steps. CUDA only.

Saves: reading and writing what lies between element-wise operations, and launches of kernels; often some memory.
Costs: half a minute to many minutes before the first step, which a long training pays back and a short one does not;
rows of another length are compiled anew. Of class ``exact``: fused kernels round in another order.

Beyond the time of every trial, one that compiles is given three times what compiling is expected to take; where that
is not enough it has timed out "in compiling". Graphs that are made after the warm-up are counted, and told.

Needs Triton and a C compiler on CUDA (compute capability 7.0), a C++ compiler on a CPU. Inductor's cache stays where
the user has it by default, since the launch that follows then finds what the trials have compiled.

A trace runs without it: what a compiled step keeps for its backward pass is about what the plain one keeps, less what
the compiler finds cheaper to compute again, and it has fewer temporaries. Two things it misses, and
:meth:`Compile.untraced_bytes` adds:

- A whole model that transformers compiles is given a causal mask, for while it is traced nobody can see that each row
  is one sequence. Attention then takes PyTorch's memory-efficient kernel in place of flash attention, and where layers
  are computed again in the backward pass, Inductor writes the mask out for every head (``sdpa_constraint`` of
  ``torch/_inductor/lowering.py`` spares that to the forward pass alone). With ``regions`` there is no mask. cuDNN's
  attention, which cards of 9.x and 10.x take, leaves the mask as it is: there what is added is too much.
- Inductor times some kernels when they are first called, unless its cache has them, and meanwhile holds a buffer as
  large as the device's L2 (``InductorBenchmarker.benchmark_gpu``).

Sources: Ansel et al., "PyTorch 2" (ASPLOS 2024); ``accelerate.utils.TorchDynamoPlugin``, ``compile_regions``;
``Trainer._build_accelerator_args``.

Not covered: other backends than Inductor; compiled optimizers; compiled autograd; sharded models, whose hooks a graph
does not see.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from autofit.contract.emission import Emission
from autofit.contract.layout import engine_of
from autofit.contract.technique import Choice, Held, Kind, Part, Prior, Status, Technique

if TYPE_CHECKING:
    from collections.abc import Mapping

    from autofit.contract.facts import Facts
    from autofit.contract.observation import Ran, Seen
    from autofit.contract.plan import Value
    from autofit.contract.recipe import Recipe

_MODES = {
    "regions": "default",
    "model": "default",
    "model_max_autotune": "max-autotune",
    "cuda_graphs": "reduce-overhead",
}
_LIGER = {"liger", "liger_fused_ce"}
_MIXED = {"bf16", "fp16"}
_DEVICE_GUARD_FAILS = (2, 15)
"""``InternalTorchDynamoError`` on ``_cuda_maybe_exchange_device`` of an ``autograd.Function``; Liger 0.8.5."""
_COPIES_FORWARD = (1, 15)
"""From this Accelerate on the copy that ``compile_regions`` makes has a forward pass of its own; before, a model whose
forward pass was put in its place, as autocast's is, goes on calling its own layers."""
_OLDEST = (7, 0)  # torch.utils._triton: older devices lack what Triton's code needs


class Compile(Technique):
    """Whether the model is compiled, and in what parts."""

    name = "compile"
    baseline = "off"
    packages = {"triton": ""}

    def choices(self, facts: Facts) -> tuple[Choice, ...]:
        on_cuda = facts.hardware.device == "cuda"
        lacking = _lacking(facts)

        def choice(value: str, status: Status, reason: str, missing: str | None = None) -> Choice:
            missing = lacking or missing
            return Choice(value, Kind.EXACT, "withheld" if missing else status, missing or reason)

        usual: Status = "offered" if on_cuda else "on_request"
        slow = "" if on_cuda else "; compiling for a CPU takes minutes, and saves little of a step"
        no_layers = None if facts.model.layer_classes else f"{facts.model.architecture} names no layer to compile"
        no_cuda = None if on_cuda else "CUDA only"
        return (
            Choice("off", Kind.EXACT, "offered", "PyTorch runs one operation after the other"),
            choice("regions", usual, f"each layer is compiled, equal ones once{slow}", no_layers),
            choice("model", usual, f"the whole model is compiled{slow}"),
            choice(
                "model_max_autotune", "on_request", "products are timed to choose their kernels: takes long", no_cuda
            ),
            choice("cuda_graphs", "on_request", "kernels are replayed as CUDA graphs, whose memory stays", no_cuda),
        )

    def conflict(self, value: Value, others: Mapping[str, Value], facts: Facts) -> str | None:
        if value == "off":
            return None
        by_trainer = facts.workload.launch_path == "trainer" and "tf32" in facts.hardware.precisions
        if by_trainer and others.get("precision") == "fp32":
            return "Accelerate switches TF32 on for a compiled model, which is precision=tf32"
        engine = engine_of(others.get("parallel", "none"))
        if engine in {"fsdp", "deepspeed"}:
            return f"{others['parallel']} brings weights in by hooks that a compiled model passes by"
        wrapped = others.get("precision") in _MIXED or others.get("kernels") == "chunked_ce"
        if value == "regions" and wrapped and (0,) < facts.release("accelerate") < _COPIES_FORWARD:
            return "Accelerate before 1.15 compiles layers that a model with another forward pass does not call"
        if others.get("offload") == "activations":
            return "the hooks that move saved tensors to the host are none that a graph can hold"
        beside = _beside_liger(value, others, facts) if others.get("kernels") in _LIGER else None
        return beside or self.not_tried_split(value, others, {"off"})

    def apply(self, value: Value, recipe: Recipe) -> None:
        if value != self.baseline:
            recipe.slow_start = "compiling"

    def held(self, facts: Facts) -> Held | None:
        script = facts.workload.script
        if script is not None and script.compiled:
            return Held(self.baseline, "the script compiles its model itself", by_script=True)
        return None

    def emit(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> Emission:
        """The YAML says it all; a Trainer's arguments can't say regions, and say the rest once more."""
        mode = _MODES.get(str(value))
        whole = mode is not None and value != "regions"
        config = {
            "dynamo_backend": "INDUCTOR" if mode else "NO",
            "dynamo_mode": mode or "default",
            "dynamo_use_fullgraph": False,
            "dynamo_use_dynamic": False,
            "dynamo_use_regional_compilation": value == "regions",
        }
        return Emission(
            accelerate={"dynamo_config": config},
            training_args={
                "torch_compile": whole,
                "torch_compile_backend": "inductor" if whole else None,
                "torch_compile_mode": mode if whole else None,
            },
            decides=("dynamo_backend", "dynamo_plugin"),
        )

    def word(self, value: Value) -> str | None:
        return None if value == self.baseline else f"compile {value}"

    def traced_as(self, value: Value, part: Part) -> Value | None:
        return self.baseline

    def untraced_bytes(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> int:
        """The buffer for timing kernels; the mask of a whole model whose layers are computed again.

        The mask is of every row, head and pair of tokens, once. At most: some architectures need none, kernels may be
        timed where a step needs less than later, and a graph's fewer temporaries are not taken off.
        """
        if value == self.baseline or facts.hardware.device != "cuda":
            return 0
        timing = facts.hardware.l2_bytes
        recomputed = plan.get("checkpointing", "off") != "off"
        attention = plan.get("attention", "default")
        by_sdpa = attention == "sdpa" or (attention == "default" and facts.model.attention == "sdpa")
        if value == "regions" or not (recomputed and by_sdpa):
            return timing
        heads = facts.model.tensor_sizes.get("attention heads", 0)
        width = 4 if plan.get("precision") in {"fp32", "tf32"} else 2
        pairs = int(plan["micro_batch"]) * facts.workload.seq_len**2
        mask = pairs * (heads * width + width + 1)  # for every head; for all of them; as it is made, true or false
        return timing + mask

    def observe(self, ran: Ran) -> Seen:
        return {
            "compiled": _compiled(ran),
            "mode": _mode(ran.accelerator),
            "graphs": ran.compiled_graphs,
            "cuda_graphs": _cuda_graphs() if ran.on_cuda else None,
        }

    def in_effect(self, value: Value, seen: Seen, facts: Facts) -> str | None:
        mode = _MODES.get(str(value))
        wanted = "none" if mode is None else "regions" if value == "regions" else "model"
        if seen.get("compiled", "none") != wanted:
            return f"compiled: {seen.get('compiled', 'none')}, not {wanted}"
        if mode is None:
            return None
        if not seen.get("graphs"):
            return "no graph was made"
        if seen.get("mode") != mode:
            return f"it was compiled in the mode {seen.get('mode')}, not {mode}"
        if value == "cuda_graphs" and seen.get("cuda_graphs") is False:
            return "no CUDA graph was recorded"
        return None

    def changes(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> str | None:
        if value == "off":
            return None
        what = "Each layer" if value == "regions" else "The model"
        return (
            f"{what} is compiled: the same mathematics, rounded in another order; "
            "rows of another length are compiled anew, so pad them all to one."
        )

    def fused_share(self, value: Value, facts: Facts) -> float:
        """Two thirds: no fused kernel is traced.

        Measured (torch 2.11, bf16, regions), as a share of the seconds of casts, copies, norms and other element-wise
        operators: 0.61 of a Llama of 1.2B parameters in 4 rows of 2,048 tokens and 0.76 of GPT-2 in 16 rows of 1,024,
        on an H100; against what a trace says, of that Llama in 32 rows with recomputed layers, 0.70 on an H100 and
        0.61 on an H200.
        """
        return 0.0 if value == "off" or facts.hardware.device == "cpu" else 0.67

    def prior(self, value: Value, facts: Facts) -> Prior:
        """A tenth to a quarter less time is what is published for large models; small ones gain more.

        Measured on an H100 (torch 2.11, bf16, regions): a Llama of 1.2B parameters in 4 rows of 2,048 tokens 203 -> 151
        ms a step (-0.30), GPT-2 in 16 rows of 1,024 tokens 125 -> 77 ms (-0.48).

        A tiny model of two layers took half a minute to compile on one core of a CPU, its regions a third of that;
        the whole model is compiled layer by layer.
        """
        if value == "off":
            return Prior(time=(0.0, 0.01), memory=(0.0, 0.01))
        layers = facts.model.layers
        gain, deviation = (-0.4, 0.15) if facts.hardware.device == "cuda" else (-0.05, 0.2)
        whole = 20.0 + 2.0 * layers
        memory = (0.1, 0.2) if value == "cuda_graphs" else (-0.1, 0.15)
        seconds = {"regions": 20.0, "model": whole, "cuda_graphs": whole, "model_max_autotune": 4 * whole}[str(value)]
        return Prior(time=(gain, deviation), memory=memory, extra_seconds=seconds)


def _lacking(facts: Facts) -> str | None:
    """What is missing for any compiling, in words."""
    hardware = facts.hardware
    if hardware.device == "cpu":
        return None if "c++" in hardware.compilers else "no C++ compiler (g++) is installed"
    if hardware.capability and hardware.capability < _OLDEST:
        return f"{hardware.name} is too old for Triton"
    return facts.lacks_triton()


def _beside_liger(value: Value, others: Mapping[str, Value], facts: Facts) -> str | None:
    """Why Liger's kernels can't be in a graph."""
    if others["kernels"] == "liger" and facts.release("torch") >= _DEVICE_GUARD_FAILS:
        return "Dynamo of this PyTorch can't trace Liger's kernels: the device guard in them breaks its graph"
    if value == "regions":  # Liger's loss is in none
        return None
    mixed = others.get("precision") in _MIXED and others.get("adapter", "none") == "none"
    if mixed and (facts.hardware.capability or (8, 0)) >= (8, 0):
        # torch.addmm with out_dtype; as of Liger 0.8.5, with PyTorch 2.13
        return "Liger's loss adds 16-bit products to a float32 gradient, which Inductor can't compile"
    if engine_of(others.get("parallel", "none")) == "ddp":
        # AssertionError of gen_alias_from_base, with PyTorch 2.13
        return "DDP cuts a compiled graph where its buckets end, and Liger's loss can't be cut so"
    return None


def _compiled(ran: Ran) -> str:
    """What of the model runs as graphs of a compiler: ``none``, ``regions`` or ``model``."""
    if ran.in_graph:
        return "model"
    modules = ran.running.modules()
    parts = any(hasattr(one, "_orig_mod") or one._compiled_call_impl is not None for one in modules)  # noqa: SLF001
    return "regions" if parts and ran.compiled_graphs else "none"


def _mode(accelerator: Any) -> str | None:
    plugin = getattr(getattr(accelerator, "state", None), "dynamo_plugin", None)
    return None if plugin is None or plugin.backend.value == "NO" else plugin.mode


def _cuda_graphs() -> bool:
    """Whether Inductor keeps a tree of recorded CUDA graphs on the device."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False
    manager = trees.get_container(0).tree_manager
    return manager is not None and manager.new_graph_id().id > 0
