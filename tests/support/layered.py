"""Tapes written by hand: of any events, and of models of any number of layers."""

from dataclasses import dataclass

import numpy as np

from autofit.costmodel.seconds.operator_time import COLUMNS
from autofit.costmodel.seconds.roofline import KINDS
from autofit.costmodel.tracing.timeline import CATEGORIES, Tape, ordered


class Writer:
    """Writes a tape; blocks are numbers, in the order in which they are made."""

    def __init__(self):
        self.events, self.sizes, self.per_row, self.categories, self.ops = [], [], [], [], []
        self.names, self.segments, self.starts, self.work, self.work_per_row = {}, [], [], [], []

    def mark(self, name, flops=0.0, flops_per_row=0.0):
        self.segments.append(name)
        self.starts.append(len(self.events))
        for rows, value in ((self.work, flops), (self.work_per_row, flops_per_row)):
            rows.append(np.zeros((len(KINDS), 3)))
            rows[-1][0, 0] = value

    def new(self, size=0, per_row=0, category="temporaries", op="op"):
        block = len(self.sizes)
        self.events.append(block)
        self.sizes.append(size)
        self.per_row.append(per_row)
        self.categories.append(CATEGORIES.index(category))
        self.ops.append(self.names.setdefault(op, len(self.names)))
        return block

    def drop(self, *blocks):
        self.events += [~block for block in blocks]

    def tape(self):
        starts = np.array(self.starts, dtype=np.int64)
        return Tape(
            events=ordered(np.array(self.events, dtype=np.int64), starts),
            sizes=np.array(self.sizes, dtype=np.float64),
            per_row=np.array(self.per_row, dtype=np.float64),
            most=np.full(len(self.sizes), np.inf),
            categories=np.array(self.categories, dtype=np.int64),
            ops=np.array(self.ops, dtype=np.int64),
            streams=np.zeros(len(self.ops), dtype=np.int64),
            names=tuple(self.names),
            segments=tuple(self.segments),
            starts=starts,
            work=np.array(self.work),
            work_per_row=np.array(self.work_per_row),
            kinds=KINDS,
            operators=np.zeros((1, len(COLUMNS))),
            operators_per_row=np.zeros((1, len(COLUMNS))),
            calls=np.array([[place, 0, 1, 0] for place in range(len(self.segments))], dtype=np.float64),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layered:
    """A model of equal layers. Sizes are pairs: bytes of no rows, and bytes of a row.

    Attributes:
        kept: Activations of a layer, freed in its own backward pass.
        passing: Temporaries of a layer's forward pass.
        hidden: What a layer hands to the next one.
        until: Who frees it: the ``next_forward``, the ``next_backward``, its ``own_backward``, or the ``head`` all.
        copies: Autocast's copies of a layer's weights, freed at the end of the micro-step.
        gradients: Of a layer; they stay.
        added: The second micro-step's gradients are added (``in_place``) or put in the first one's place.
        back: What a layer's backward pass hands to the layer below.
        shared: Made before the first layer, freed by the last that uses it: ``F2`` or ``B0``.
        rest: Whether other layers follow.
        batch: What is there before a micro-step and freed after it.
    """

    kept: tuple = ((0, 3), (8, 5))
    passing: tuple = ((0, 7),)
    hidden: tuple = (0, 11)
    until: str = "next_backward"
    copies: tuple = (17,)
    gradients: tuple = (33, 5)
    added: str = "in_place"
    back: tuple = (0, 13)
    shared: tuple = ((0, 19, "F2"), (4, 2, "B0"))
    rest: bool = False
    logits: tuple = (0, 50)
    batch: tuple = (0, 2)
    forward_flops: tuple = (1.0, 10.0)
    backward_flops: tuple = (2.0, 20.0)

    def tape(self, periods):
        """The tape of two micro-steps of a model with so many layers."""
        writer = Writer()
        gradients = {}
        for micro in range(2):
            self._micro_step(writer, micro, periods, gradients)
        return writer.tape()

    def _micro_step(self, w, micro, periods, gradients):  # noqa: C901, PLR0912, PLR0915 - a story told once, in order
        def name(kind, layer):
            return f"{micro}:{kind}{0 if layer == 0 else 2 if layer == periods - 1 else 1}"

        w.mark(f"{micro}:pre")
        batch = w.new(*self.batch, "batch", "batch")
        shared = [(w.new(zero, row, op="shared"), until) for zero, row, until in self.shared]
        hidden = [w.new(*self.hidden, op="hidden")]
        kept, copies, grads = [], [], []
        for layer in range(periods):
            w.mark(name("F", layer), *self.forward_flops)
            copies += [w.new(size, 0, "copies", "copy") for size in self.copies]
            kept.append([w.new(zero, row, "activations", "keep") for zero, row in self.kept])
            for zero, row in self.passing:
                w.drop(w.new(zero, row, op="pass"))
            hidden.append(w.new(*self.hidden, op="hidden"))
            if self.until == "next_forward":
                w.drop(hidden[-2])
            if layer == periods - 1:
                w.drop(*(block for block, until in shared if until == "F2"))
        rest = None
        if self.rest:
            w.mark(f"{micro}:rest")
            rest = w.new(0, 23, op="rest")
        w.mark(f"{micro}:head", 5.0, 50.0)
        if self.until == "head":
            w.drop(*hidden)
        elif self.until == "next_forward":
            w.drop(hidden[-1])
        logits = w.new(*self.logits, "logits", "logits")
        w.mark(f"{micro}:headB")
        back = w.new(*self.back, op="back")
        w.drop(logits)
        if self.until == "next_backward":
            w.drop(hidden[-1])
        if rest is not None:
            w.mark(f"{micro}:restB")
            w.drop(rest)
        for layer in reversed(range(periods)):
            w.mark(name("B", layer), *self.backward_flops)
            made = [w.new(size, 0, "gradients", "grad") for size in self.gradients]
            if micro == 0:
                gradients[layer] = made
            elif self.added == "in_place":
                w.drop(*made)
            else:
                w.drop(*gradients[layer])
                grads += made
            below = w.new(*self.back, op="back")
            w.drop(back, *kept[layer])
            back = below
            if self.until == "next_backward":
                w.drop(hidden[layer])
            elif self.until == "own_backward":
                w.drop(hidden[layer + 1])
            if layer == 0:
                w.drop(*(block for block, until in shared if until == "B0"))
        w.mark(f"{micro}:preB")
        w.drop(back)
        if self.until == "own_backward":
            w.drop(hidden[0])
        w.mark(f"{micro}:step")
        w.drop(*copies, batch)
