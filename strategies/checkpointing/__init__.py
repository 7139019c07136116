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
from autofit.contract.technique import Choice, Kind, Part, Prior, Technique

from .kept import HostInputs, KeptOutputs, keep_products
from .recompute import recomputing, switch_off, switch_on
from .tracing import counting
from .watched import inside_others, watch_parts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

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
_ON = "switched on"
_IN_CACHE = "the adapter's prompt is a cache, which no layer that is recomputed is given: it would not be trained"
_ON_AGAIN = "its Trainer recomputes nothing while it generates, and then every layer again"
_SEEN_TO_WIN = {"cpu": {"full", "every_2"}, "cuda": {"full"}}
"""Values that were the fastest under a ceiling of a landscape recorded on such a device, and what every large model is
trained with; the others are tried on request."""


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

        if any(recomputing(model)):
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
            recipe.model_wraps.append(functools.partial(switch_on, checkpoint=inputs.checkpoint))
        elif value == "off" and script is not None and script.checkpointing == _ON:
            recipe.model_wraps.append(switch_off)
        elif value != "off" and recipe.facts.workload.launch_path == "loop" and not _by_script_alone(recipe.facts):
            recipe.model_wraps.append(functools.partial(switch_on, every=_EVERY.get(str(value), 1)))

    def traced_as(self, value: Value, part: Part) -> Value | None:
        return value if part == "micro_steps" else self.baseline

    def period(self, value: Value) -> int:
        return _EVERY.get(str(value), 1)

    def stand_in(self, value: Value, facts: Facts, recorder: TraceRecorder) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if value == "off" else counting(recorder)

    def watch(self, model: nn.Module, recipe: Recipe, hooks: Hooks) -> Read:
        """A model of a script's own has no layers that are known: what it has switched on shows what to watch."""
        return watch_parts(model, hooks) if _by_script_alone(recipe.facts) else self.observe

    def observe(self, ran: Ran) -> Seen:
        """Layers that ran, those that ran more than once in a micro-step, and what was kept and moved by hand."""
        forwards = ran.layer_forwards
        counted = ran.recipe.state.get(self.name)
        return {
            "layers": len(forwards) or None,
            "layers_inside": inside_others(ran.model),
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
