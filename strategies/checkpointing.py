"""Activation checkpointing: keep less of the layers' activations, and compute the rest again in the backward pass.

- ``full``: of every layer only its input is kept. Saves: the activations inside the layers, most of what a long
  sequence needs. Costs: one more forward pass, about a third of the step where matrix products rule, less where
  they do not.
- ``every_2``, ``every_4``: every second or fourth layer is treated so, the others keep everything: a half or a
  quarter of what ``full`` saves and costs, for memory that would lie idle under it.
- ``selective``: the outputs of matrix products and of fused attention are kept too, and only what lies between them
  is computed again: norms, activation functions, rotations. Costs little arithmetic, but Python looks at every
  operator of a layer, which a small model feels. Attention is computed again where the config has dropout: a kernel
  that is left out draws no random numbers, and the dropout behind it would draw others than before.
- ``full_offload``: ``full``, and the layers' inputs wait in pinned host memory. Costs two copies over the bus.

All of class ``exact``, and non-reentrant (``use_reentrant=False``): that works with frozen inputs and adapters, and
stops the recomputation as soon as the backward pass has what it needs.

Sources: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174); ``torch.utils.checkpoint``
and its ``create_selective_checkpoint_contexts``; the operators that torchtitan's ``activation_checkpoint.py`` keeps,
all of them here and not every second product. transformers calls the arguments ``activation_checkpointing`` from 5.23
on and ``gradient_checkpointing`` before; they know ``every_n_layers``. They know ``offload`` too, but not how much was
moved, so ``full_offload`` is done here.

Not covered: products of batches of matrices (``bmm``: attention that is not fused) are not kept; a budget of memory
for the recomputation (``torch.compile``'s partitioner); models that share the weights of layers under ``selective``
with autocast, which PyTorch refuses.
"""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

from autofit.contract.emission import Emission
from autofit.contract.placement import KeptOnHost
from autofit.contract.technique import Choice, Kind, Part, Prior, Technique, replacing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch
    from torch import nn
    from torch.utils.checkpoint import CheckpointPolicy
    from transformers import PreTrainedModel

    from autofit.contract.facts import Facts
    from autofit.contract.observation import Hooks, Ran, Read, Seen
    from autofit.contract.plan import Value
    from autofit.contract.recipe import Recipe
    from autofit.contract.trace import TraceRecorder

NEW_NAME_SINCE = (5, 23)
_EVERY = {"every_2": 2, "every_4": 4}
_LEAST_LAYERS = {"every_2": 2, "every_4": 8}  # with fewer, the other values come as near
_ORDINALS = {2: "second", 4: "fourth"}
_SCRIPT = {
    "selective": "keep the outputs of matrix products: model = setup.model(...)",
    "full_offload": "keep the layers' inputs on the host: model = setup.model(...)",
}
_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::_scaled_mm", "aten::_grouped_mm"})
_ATTENTION = frozenset({
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward", "flex_attention",
})  # fmt: skip
_ON = "switched on"
_IN_CACHE = "the adapter's prompt is a cache, which no layer that is recomputed is given: it would not be trained"
_ON_AGAIN = "its Trainer recomputes nothing while it generates, and then every layer again"
_SEEN_TO_WIN = {"cpu": {"full", "every_2"}, "cuda": {"full"}}
"""Values that were the fastest under a ceiling of a landscape recorded on such a device, and what every large model is
trained with; the others are tried on request."""
_HOST_A_REGION, _HOST_A_SAVED_TENSOR, _HOST_A_SEEN_OPERATOR = 35.0, 2.5, 4.0
"""What the Python of a checkpointed region takes of the host, in operators: for the region itself, for each tensor that
autograd would save, and for each operator that a selective one looks at, there and back. Measured with tiny models on
a CPU core (tests/bench/host_bench.py): 26 to 44, 1.9 to 3.2 and 3.2 to 4.7."""


class Checkpointing(Technique):
    """Recompute the activations inside the layers."""

    name = "checkpointing"
    baseline = "off"
    recomputes = True

    def choices(self, facts: Facts) -> tuple[Choice, ...]:
        model = facts.model
        off = Choice("off", Kind.EXACT, "offered", "keep every activation")
        reasons = {
            "full": f"every one of the {model.layers} layers is recomputed",
            **{name: f"every {_ORDINALS[k]} of the {model.layers} layers is recomputed" for name, k in _EVERY.items()},
            "selective": "outputs of matrix products and attention are kept, what lies between them is recomputed",
            "full_offload": "every layer is recomputed, and its input waits in pinned host memory",
        }
        if not model.supports_checkpointing:
            refused = f"{model.architecture} does not support it"
            found = {value: Choice(value, Kind.EXACT, "withheld", refused) for value in reasons}
            if _by_script_alone(facts):
                found["full"] = Choice("full", Kind.EXACT, "offered", "the script has switched it on")
            return (off, *found.values())
        withheld = {
            value: f"the model has {model.layers} layer(s), and it takes {least} to be worth it"
            for value, least in _LEAST_LAYERS.items()
            if model.layers < least
        }
        if facts.workload.script is not None and facts.workload.script.generated:
            withheld |= dict.fromkeys({*reasons} - {"full"}, _ON_AGAIN)
        if _loses_prompt(facts):
            withheld = dict.fromkeys(reasons, _IN_CACHE)
        if facts.hardware.device == "cpu":
            withheld["full_offload"] = "the device's memory is the host's memory"

        def choice(value: str, reason: str) -> Choice:
            if value in withheld:
                return Choice(value, Kind.EXACT, "withheld", withheld[value])
            seen = value in _SEEN_TO_WIN[facts.hardware.device]
            return Choice(value, Kind.EXACT, "offered" if seen else "on_request", reason)

        return (off, *(choice(value, reason) for value, reason in reasons.items()))

    def conflict(self, value: Value, others: Mapping[str, Value], facts: Facts) -> str | None:
        return self.not_tried_split(value, others, {"off", "full"}, {"off", "full"})

    def own(self, facts: Facts) -> Value:
        script = facts.workload.script
        asked = script is not None and (script.own.get("activation_checkpointing") or script.checkpointing == _ON)
        return "full" if asked else super().own(facts)

    def in_script(self, model: nn.Module) -> str | None:
        """Whether the model recomputes already, as ``peft.prepare_model_for_kbit_training`` leaves it; or why it can't.

        Of an adapter that trains a cache (prefix tuning) transformers takes the cache away where it recomputes a layer.
        """
        from transformers import Cache

        if any(_recomputing(model)):
            return _ON
        given = getattr(model, "active_peft_config", None)
        if given is None or not given.is_prompt_learning:
            return None
        import torch

        prompt = cast("Any", model).get_prompt(1, torch.zeros(1, dtype=torch.long))
        return _IN_CACHE if isinstance(prompt, Cache) else None

    def emit(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> Emission:
        new = facts.release("transformers") >= NEW_NAME_SINCE
        name = "activation_checkpointing" if new else "gradient_checkpointing"
        settings: dict[str, Any] = {"use_reentrant": False}
        if value in _EVERY:
            settings["every_n_layers"] = _EVERY[str(value)]
        # without the argument a Trainer leaves what setup.model switched on
        by_argument = facts.model.supports_checkpointing and (value == "full" or value in _EVERY)
        script = (_SCRIPT[str(value)],) if value in _SCRIPT else ()
        return Emission(training_args={name: by_argument, f"{name}_kwargs": settings}, script=script)

    def apply(self, value: Value, recipe: Recipe) -> None:
        script = recipe.facts.workload.script
        if value == "selective":
            kept = recipe.state[self.name] = KeptOutputs()
            recipe.model_wraps.append(functools.partial(keep_products, kept=kept))
        elif value == "full_offload":
            inputs = recipe.state[self.name] = HostInputs()
            recipe.model_wraps.append(functools.partial(_switch_on, checkpoint=inputs.checkpoint))
        elif value == "off" and script is not None and script.checkpointing == _ON:
            recipe.model_wraps.append(_switch_off)
        elif value != "off" and recipe.facts.workload.launch_path == "loop" and not _by_script_alone(recipe.facts):
            recipe.model_wraps.append(functools.partial(_switch_on, every=_EVERY.get(str(value), 1)))

    def traced_as(self, value: Value, part: Part) -> Value | None:
        return value if part == "micro_steps" else self.baseline

    def period(self, value: Value) -> int:
        return _EVERY.get(str(value), 1)

    def stand_in(self, value: Value, facts: Facts, recorder: TraceRecorder) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if value == "off" else _counting(recorder)

    def watch(self, model: nn.Module, recipe: Recipe, hooks: Hooks) -> Read:
        """A model of a script's own has no layers that are known: what it has switched on shows what to watch."""
        return _watch_parts(model, hooks) if _by_script_alone(recipe.facts) else self.observe

    def observe(self, ran: Ran) -> Seen:
        """Layers that ran, those that ran more than once in a micro-step, and what was kept and moved by hand."""
        forwards = ran.layer_forwards
        counted = ran.recipe.state.get(self.name)
        return {
            "layers": len(forwards) or None,
            "layers_inside": _inside_others(ran.model),
            "layers_recomputed": sum(count > 1 for count in forwards) if forwards else None,
            "layer_forwards": max(forwards, default=ran.forwards_in_graph),
            "kept_outputs": counted.count if isinstance(counted, KeptOutputs) else 0,
            "moved_bytes": counted.moved_bytes if isinstance(counted, HostInputs) else 0,
        }

    def in_effect(self, value: Value, seen: Seen, facts: Facts) -> str | None:
        layers, again = seen.get("layers"), seen.get("layers_recomputed")
        if layers is None or again is None:
            return self._inside_a_graph(value, seen)
        kept, moved, every = seen.get("kept_outputs", 0), seen.get("moved_bytes", 0), self.period(value)
        own = not facts.model.supports_checkpointing  # Reformer's layers are reversible: they always run again
        wanted = own or again == 0 if value == "off" else _as_many(again, layers, every, seen.get("layers_inside", 0))
        if _by_script_alone(facts):
            wanted = (again == 0) == (value == "off")  # which of its parts it recomputes is the model's to say
        if not wanted:
            return f"{again} of {layers} layers ran forward more than once in a micro-step"
        if (kept > 0) != (value == "selective"):
            return f"{kept} outputs of matrix products were kept"
        if (moved > 0) != (value == "full_offload") and value in {"full", "full_offload"}:
            return f"{moved} bytes of the layers' inputs were copied to the host"
        return None

    @staticmethod
    def _inside_a_graph(value: Value, seen: Seen) -> str | None:
        """A compiled graph shows only how often one of its layers runs."""
        forwards = seen.get("layer_forwards")
        if forwards is not None and value in {"off", "full"} and (forwards > 1) != (value == "full"):
            return f"a layer ran forward {forwards} time(s) in a micro-step"
        return None

    def leanest(self, facts: Facts) -> Value:
        able = facts.model.supports_checkpointing and not _loses_prompt(facts)
        return "full" if able or _by_script_alone(facts) else self.baseline

    def spends_host(self, value: Value) -> bool:
        return value == "full_offload"

    def word(self, value: Value) -> str | None:
        return {"off": None, "full": "checkpointing"}.get(str(value), f"checkpointing {value}")

    def prior(self, value: Value, facts: Facts) -> Prior:
        """One forward more on top of a forward and a backward that costs two: 4/3 at most."""
        return {
            "off": Prior(time=(0.0, 0.01), memory=(0.0, 0.01)),
            "full": Prior(time=(0.25, 0.08), memory=(-0.5, 0.4)),
            "every_2": Prior(time=(0.125, 0.05), memory=(-0.25, 0.2)),
            "every_4": Prior(time=(0.06, 0.04), memory=(-0.12, 0.1)),
            "selective": Prior(time=(0.08, 0.08), memory=(-0.25, 0.2)),
            "full_offload": Prior(time=(0.35, 0.15), memory=(-0.55, 0.4)),
        }[str(value)]


def _as_many(again: int, layers: int, every: int, inside: int) -> bool:
    """Whether every so many layers were recomputed, and those that stand inside of them (Zamba2's) with them."""
    if every == 1:
        return again == layers
    return 0 < again < layers and abs(again * every - layers) < min(every, layers) + every * inside


def _inside_others(model: nn.Module) -> int:
    """Layers that stand inside of others: transformers counts both."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = {one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)}
    return len(layers & {part for one in layers for part in one.modules() if part is not one})


def _by_script_alone(facts: Facts) -> bool:
    """Whether a script has switched it on in a model that knows nothing of transformers, as diffusers' are."""
    script = facts.workload.script
    return script is not None and script.checkpointing == _ON and not facts.model.supports_checkpointing


def _loses_prompt(facts: Facts) -> bool:
    """Whether a script's adapter would not be trained, unless the script itself trains it so."""
    script = facts.workload.script
    if script is None or script.own.get("activation_checkpointing"):
        return False
    return script.checkpointing == _IN_CACHE


def _watch_parts(model: nn.Module, hooks: Hooks) -> Read:
    """Watch which parts of the modules that can recompute run, and which do so again in the backward pass."""
    import torch

    ran: tuple[set[nn.Module], set[nn.Module]] = set(), set()

    def before(part: nn.Module, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            ran[torch._C._current_graph_task_id() >= 0].add(part)  # noqa: SLF001 - as torch.utils.checkpoint asks

    able = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    children = [child for module in able for child in module.children()]
    lists = (torch.nn.ModuleList, torch.nn.ModuleDict)
    for part in {one for child in children for one in (child.children() if isinstance(child, lists) else [child])}:
        hooks.before(part, before)
    # none where a compiled graph holds them all
    return lambda _: {"layers": len(ran[0]) or None, "layers_recomputed": len(ran[1]) if ran[0] else None}


def _checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """PyTorch's, looked up when it is called: a trace puts another in its place."""
    import torch.utils.checkpoint

    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


def _switch_on(model: PreTrainedModel, every: int = 1, checkpoint: Callable[..., Any] = _checkpoint) -> PreTrainedModel:
    """Switch it on by hand, where no Trainer reads the argument or no argument says it."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    # a model's own code may not know the other argument
    enable({"use_reentrant": False}, **({"every_n_layers": every} if every > 1 else {}))
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            vars(module)["_gradient_checkpointing_func"] = checkpoint
    return model


def _switch_off(model: PreTrainedModel) -> PreTrainedModel:
    """Switch it off where a script has switched it on: no argument of a Trainer does."""
    for module in _recomputing(model):
        module.gradient_checkpointing = False
    return model


def _recomputing(model: nn.Module) -> Iterator[Any]:
    """The modules that recompute what is inside them."""
    return (module for module in model.modules() if getattr(module, "gradient_checkpointing", False))


class KeptOutputs:
    """Checkpoints a layer but for the outputs of matrix products and of attention.

    Attributes:
        names: Operators whose outputs are kept.
        count: Outputs that were kept so far.
    """

    def __init__(self) -> None:
        self.names = _PRODUCTS | _ATTENTION
        self.count = 0

    def policy(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """What PyTorch asks for every operator."""
        from torch.utils.checkpoint import CheckpointPolicy

        if op.name().partition(".")[0] not in self.names:
            return CheckpointPolicy.PREFER_RECOMPUTE
        self.count += not context.is_recompute  # which some versions of PyTorch ask for too
        return CheckpointPolicy.MUST_SAVE

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer."""
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        contexts = functools.partial(create_selective_checkpoint_contexts, self.policy)
        return _checkpoint(function, *args, context_fn=contexts, **kwargs)


def _counting(recorder: TraceRecorder) -> AbstractContextManager[None]:
    """Tell a trace what the Python of checkpointed regions takes of the host.

    PyTorch has no public place to look at it: where its own class is gone, nothing is told of what autograd saves.
    """
    import torch.utils.checkpoint as home

    hooks, policy = getattr(home, "_checkpoint_hook", None), KeptOutputs.policy

    def told_policy(self: KeptOutputs, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if not context.is_recompute:
            recorder.busies_host(_HOST_A_SEEN_OPERATOR)
        return policy(self, context, op, *args, **kwargs)

    if hooks is None:
        return replacing([(KeptOutputs, "policy", told_policy)])

    class Told(hooks):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            recorder.busies_host(_HOST_A_REGION)
            pack = self.pack_hook

            def told_pack(tensor: torch.Tensor) -> Any:
                recorder.busies_host(_HOST_A_SAVED_TENSOR)
                return pack(tensor)

            self.pack_hook: Callable[..., Any] = told_pack

    return replacing([(KeptOutputs, "policy", told_policy), (home, "_checkpoint_hook", Told)])


def keep_products(model: PreTrainedModel, kept: KeptOutputs) -> PreTrainedModel:
    """Recompute what lies between the matrix products of the layers."""
    settings = model.config.get_text_config().to_dict()
    dropout = any("drop" in name and isinstance(value, float) and value > 0 for name, value in settings.items())
    kept.names = _PRODUCTS if dropout else _PRODUCTS | _ATTENTION
    return _switch_on(model, checkpoint=kept.checkpoint)


class HostInputs(KeptOnHost):
    """Checkpoints a layer, with its inputs on the host until they are needed."""

    def stays(self, tensor: torch.Tensor) -> bool:
        """Of a layer's inputs those of floating point are its activations."""
        return not tensor.is_floating_point() or super().stays(tensor)

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer; what it saves inside is dropped before these hooks would see it."""
        with self.waiting():
            return _checkpoint(function, *args, **kwargs)
