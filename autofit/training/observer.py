"""What really happened: evidence of each technique, read off the live model and optimizer.

A knob that a library ignored must not be measured as if it had been used. The same observer watches a trial and a
launch; what each technique sees of itself goes to its ``in_effect``.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from autofit.contract.observation import Hooks, Ran, dtype_name
from autofit.contract.outcome import Evidence
from autofit.registry import techniques

if TYPE_CHECKING:
    from torch import nn

    from autofit.contract.recipe import Recipe


class Observer:
    """Watches a model through forward hooks, which cost some microseconds a micro-step.

    A compiler takes hooks into the graph. There they look once, while the graph is made, and leave nothing in it.

    Args:
        model: The unwrapped model; wrappers keep its modules, and so the hooks.
        recipe: What is to be run; tells which classes are layers.
    """

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.model = model
        self.recipe = recipe
        self.rows: int | None = None
        self.loader: Any = None
        self.seq_len: int | None = None
        self.padding_mask: bool | None = None
        self.micro_steps = 0
        self.answered = True  # a gradient of the last forward passes came, or none that could be waited for
        self.backward_passes: set[int] = set()  # those that this micro-step is known to be in
        self.forward = False
        self.running: nn.Module = model
        self.in_graph = False
        self.forwards_in_graph: int | None = None
        self.output: tuple[str | None, nn.Module | None] = (None, None)
        self.multiplied: set[nn.Module] = set()  # products inside of an adapter that it calls
        self.stepped = False
        self.hooks = Hooks(model)
        self.hooks.before(model, self._before_model())
        called = layer_products(model, recipe.facts.model.layer_classes, recipe.facts.model.read_directly)
        self.products = tuple(product for _, product in called)
        self.calls = [0] * len(self.products)
        self.calls_forward = [0] * len(self.products)
        self.awaited, self.came = [0] * len(self.products), [0] * len(self.products)  # gradients of their outputs
        self.hooks.after(model, self._after_model)
        for place, (outer, product) in enumerate(called):
            if outer is not product:
                self.hooks.after(product, self._after_multiplied)
            self.hooks.after(outer, self._after_product(place, product))
        self.readers = {one.name: one.watch(model, recipe, self.hooks) for one in techniques()}

    def _before_model(self) -> Any:
        import torch

        main = self.recipe.facts.model.main_input

        def saw(shape: Any) -> None:
            rows, tokens = shape[0], shape[-1]
            if isinstance(rows, int) and rows > (self.rows or 0):
                self.rows = rows
            if isinstance(tokens, int) and tokens > (self.seq_len or 0):
                self.seq_len = tokens

        def compiled(context: Any) -> None:
            self.in_graph = True
            ids = context.get_local("ids")
            if ids.python_type() is not type(None):
                saw(ids.as_fake().shape)
            self.padding_mask = context.get_local("mask").python_type() is not type(None)

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids = kwargs.get(main, args[0] if args else None)
            mask = kwargs.get("attention_mask")
            if torch.compiler.is_compiling():
                torch._dynamo.comptime.comptime(compiled)  # noqa: SLF001 - there is no other door to a graph's making
                return
            if isinstance(ids, torch.Tensor):
                saw(ids.shape)
            self.padding_mask = mask is not None
            self.running = module
            self._count()
            self.forward = True

        return hook

    def _count(self) -> None:
        """Count a micro-step at the first of its forward passes.

        A loss may take several before its backward pass, and some within that: each cached batch of its own.
        """
        import torch

        task = torch._C._current_graph_task_id()  # noqa: SLF001 - as torch.utils.checkpoint asks; -1 outside of one
        if self.answered and task not in self.backward_passes:
            self.micro_steps += 1
            self.backward_passes.clear()
        if task >= 0:
            self.backward_passes.add(task)
        self.answered = False

    def _came(self, _: Any) -> None:
        """A gradient came: what is next outside of this backward pass is another micro-step."""
        import torch

        self.answered = True
        self.backward_passes.add(torch._C._current_graph_task_id())  # noqa: SLF001 - as above

    def _after_model(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        import torch
        from torch.utils._pytree import tree_leaves

        if torch.compiler.is_compiling():
            return
        self.forward = False
        values = dict(output) if isinstance(output, Mapping) else output  # a class of mappings is no tree to PyTorch
        waited = [one for one in tree_leaves(values) if isinstance(one, torch.Tensor) and one.requires_grad]
        for one in waited:
            one.register_hook(self._came)  # type: ignore[no-untyped-call]
        self.answered = self.answered or not waited

    def _after_multiplied(self, product: nn.Module, _args: tuple[Any, ...], first: Any) -> None:
        """Tell what a product gave before an adapter around it has added to that."""
        import torch

        def compiled(context: Any) -> None:
            self.multiplied.add(product)
            self.output = dtype_name(context.get_local("first").as_fake()), None

        if torch.compiler.is_compiling():
            torch._dynamo.comptime.comptime(compiled)  # noqa: SLF001 - as above
            return
        self.multiplied.add(product)
        self.output = dtype_name(first), product

    def _after_product(self, place: int, product: nn.Module) -> Any:
        import torch

        def compiled(context: Any) -> None:
            if product not in self.multiplied:
                self.output = dtype_name(context.get_local("first").as_fake()), None
            self.forwards_in_graph = max(self.forwards_in_graph or 0, _forwards(context) or 0) or None

        def came(gradient: Any) -> None:
            self.came[place] += 1
            self._came(gradient)

        def hook(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if torch.compiler.is_compiling():
                torch._dynamo.comptime.comptime(compiled)  # noqa: SLF001 - as above
                return
            if product not in self.multiplied:
                self.output = dtype_name(first), product
            self.calls[place] += 1
            self.calls_forward[place] += self.forward
            if first.requires_grad:
                self.awaited[place] += 1
                first.register_hook(came)

        return hook

    def close(self) -> None:
        """Take the hooks off; a graph that was made with them is made anew without them, so there they stay."""
        if not compiled_graphs():
            self.hooks.close()

    def ran(self, optimizer: Any, accelerator: Any, accumulation: int | None) -> Ran:
        """What the techniques are shown."""
        # a layer may use a product more than once in a forward pass; what comes after that is recomputed. A layer that
        # the loss does not use never is
        unused = [awaited and not came for awaited, came in zip(self.awaited, self.came, strict=True)]
        found = zip(self.calls, self.calls_forward, unused, strict=True)
        calls = [round(calls / once) for calls, once, left_out in found if once and not left_out]
        return Ran(
            model=self.model,
            running=self.running,
            optimizer=unwrapped(optimizer),
            accelerator=accelerator,
            recipe=self.recipe,
            rows=self.rows,
            accumulation=accumulation,
            products=self.products,
            layer_forwards=tuple(calls),
            forwards_in_graph=self.forwards_in_graph,
            output=self.output,
            in_graph=self.in_graph,
            compiled_graphs=compiled_graphs(),
            loader=self.loader,
        )

    def evidence(self, optimizer: Any, accelerator: Any, accumulation: int | None) -> Evidence:
        """What was seen so far; to be called between two optimizer steps, after the second.

        Args:
            optimizer: The optimizer that steps, wrapped or not.
            accelerator: The accelerator that prepared it.
            accumulation: Micro-batches that were counted in one optimizer step, where they were.
        """
        ran = self.ran(optimizer, accelerator, accumulation)
        self.stepped = bool(ran.state_tensors())
        parameters = list(self.model.parameters())
        return Evidence(
            seq_len=self.seq_len,
            padding_mask=self.padding_mask,
            parameters=sum(parameter.numel() for parameter in parameters),
            trainable_parameters=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            compiled_graphs=ran.compiled_graphs,
            techniques=self._read(ran),
        )

    def with_later_state(self, seen: Evidence, optimizer: Any, accelerator: Any, accumulation: int | None) -> Evidence:
        """The evidence with a state that came after it was read: while a loss scale is too high, steps are skipped."""
        if self.stepped:
            return seen
        self.loader = None  # the training has ended, and its worker processes with it
        later = self._read(self.ran(optimizer, accelerator, accumulation))
        told = {name: {**seen.techniques.get(name, {}), **one} for name, one in later.items()}
        return dataclasses.replace(seen, techniques=told)

    def _read(self, ran: Ran) -> dict[str, dict[str, Any]]:
        """What each technique sees of itself, as it comes back from a file."""
        read = {name: dict(reader(ran)) for name, reader in self.readers.items()}
        plain: dict[str, dict[str, Any]] = json.loads(json.dumps(read, allow_nan=False))
        return plain


def layer_products(
    model: nn.Module, layer_classes: tuple[str, ...] = (), read_directly: tuple[str, ...] = ()
) -> list[tuple[nn.Module, nn.Module]]:
    """Of each layer the first module that multiplies by a matrix; of the model, where it has no layers.

    Args:
        model: The model.
        layer_classes: What its layers are called, where they do not tell it.
        read_directly: What paths look like of modules that are never called, see ``Model.read_directly``.

    Returns:
        What the layer calls, and the module inside of it that holds the matrix, mostly the same: an adapter's stands
        around one, and may multiply by its matrix without calling it.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    modules = list(model.modules())
    known = [module for module in modules if isinstance(module, GradientCheckpointingLayer)]
    named = [module for module in modules if type(module).__name__ in layer_classes]
    never = re.compile(rf"(.+\.)?({'|'.join(read_directly)})") if read_directly else None
    left = {one for name, one in model.named_modules() if never is not None and never.fullmatch(name)}
    products = (_first_product(layer, left=left) for layer in known or named or [model])
    found = list({id(product): (outer, product) for outer, product in filter(None, products)}.values())
    head = None if found else _first_product(model) or _first_product(model, dimensions=(3, 4, 5))  # convolutions alone
    return found if head is None else [head]


def _first_product(
    layer: nn.Module, *, dimensions: tuple[int, ...] = (2,), left: Collection[nn.Module] = ()
) -> tuple[nn.Module, nn.Module] | None:
    """The first module inside a layer that multiplies by a matrix, but for some: it is recomputed with its layer.

    A class of the model's own, such as a router, may do more, and give another dtype: it is taken where there is none
    else.
    """
    outer: nn.Module | None = None
    own: tuple[nn.Module, nn.Module] | None = None
    for module in (one for one in layer.modules() if one not in left):
        weight = getattr(module, "weight", None)
        shape = getattr(weight, "ds_shape", getattr(weight, "shape", ()))  # ZeRO-3 leaves an empty tensor behind
        if len(shape) in dimensions and "Embed" not in type(module).__name__:
            around = outer = outer or module
            if not any(module.children()):
                if not type(module).__module__.startswith("transformers.models."):
                    return around, module
                outer, own = None, own or (around, module)
    return own


def compiled_graphs() -> int:
    """Graphs that ``torch.compile`` has made in this process so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def _forwards(context: Any) -> int | None:
    """Two inside a checkpoint, which is a graph inside the graph and runs again in the backward pass; else one."""
    tracing = getattr(context, "_ComptimeContext__tx", None)
    tracer = getattr(getattr(tracing, "output", None), "current_tracer", None)
    return None if tracer is None else 1 + (tracer.parent is not None)


def unwrapped(optimizer: Any) -> Any:
    """The innermost optimizer under Accelerate's and DeepSpeed's wrappers."""
    inner = getattr(optimizer, "optimizer", None)
    while inner is not None and inner is not optimizer:
        optimizer, inner = inner, getattr(inner, "optimizer", None)
    return optimizer
