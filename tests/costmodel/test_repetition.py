"""The second micro-step that is written from the first against one that is run."""

import numpy as np
import pytest
import torch
from torch import nn

from autofit.costmodel.tracing.layers import Marks
from autofit.costmodel.tracing.recorder import Recorder
from autofit.costmodel.tracing.repetition import Repetition
from tests.support.cases import some_slow
from tests.support.traced import PLAIN, Lab


class Layers(nn.Module):
    """Two layers and a loss; ``between`` is called with what is between them."""

    def __init__(self, between=lambda value: value):
        super().__init__()
        self.below, self.above = nn.Linear(16, 32), nn.Linear(32, 8)
        self.between = between

    def forward(self, rows):
        return self.above(self.between(torch.relu(self.below(rows)))).pow(2).mean()


def two_micro_steps(model, *, written):
    """The tape of two micro-steps, and whether the second was written."""
    trained = [one for one in model.parameters() if one.requires_grad]
    rows, losses, done = torch.ones(4, 16), [], False
    recorder = Recorder(fake=False)
    with recorder:
        recorder.call(model.parameters(), "weights")
        recorder.mark("begin")
        repetition = Repetition(recorder, trained) if written else None
        for number in range(2):
            recorder.mark(f"{number}:pre")
            if number and repetition is not None:
                done = repetition.write(recorder.segments.index("0:pre"), recorder.segments.index("0:step"))
                if done:
                    recorder.mark("1:step")
                    break
            recorder.mark(f"{number}:F0")
            loss = model(rows)
            recorder.mark(f"{number}:headB")
            loss.backward()
            recorder.call((one.grad for one in trained), "gradients")
            if repetition is not None:
                repetition.loss = loss
            losses.append(loss.detach())
            recorder.mark(f"{number}:step")
    return recorder.tape(since=2), done


def arrays(tape):
    """What a tape says; the order in which its calls are listed says nothing."""
    found = tape.arrays()
    return {**found, "calls": found["calls"][np.lexsort(found["calls"].T[::-1])]}


def assert_alike(one, other):
    for name, values in arrays(one).items():
        np.testing.assert_array_equal(values, arrays(other)[name], err_msg=name)


def test_a_second_micro_step_is_written_as_it_would_be_run():
    run, _ = two_micro_steps(Layers(), written=False)
    tape, done = two_micro_steps(Layers(), written=True)
    assert done
    assert_alike(tape, run)
    adds = [name for name in tape.segments if name.startswith("1:")]
    assert adds == ["1:pre", "1:F0", "1:headB", "1:step"]
    first, second = (tape.live(1)[tape.part([f"{number}:headB"])[1] - 1] for number in range(2))
    assert second == first + 4  # the gradients are there once, the losses twice


def test_frozen_parameters_have_no_gradient_to_add():
    def model():
        made = Layers()
        made.below.requires_grad_(False)
        return made

    run, _ = two_micro_steps(model(), written=False)
    tape, done = two_micro_steps(model(), written=True)
    assert done
    assert_alike(tape, run)


class Keeps:
    """Keeps what it is given first, such as a model that makes a cache in its first step."""

    def __init__(self):
        self.kept = None

    def __call__(self, value):
        if self.kept is None:
            self.kept = value.detach() * 2
        return value + self.kept


def expanded():
    """A model whose gradient comes as a view, which autograd copies to keep it."""
    model = Layers()
    model.above.weight = nn.Parameter(torch.ones(1, 32))
    model.above.bias = None
    model.above.forward = lambda value: (model.above.weight.sum() * value).sum(-1)
    return model


@pytest.mark.parametrize("make", [lambda: Layers(Keeps()), expanded])
def test_a_second_micro_step_that_would_differ_is_run(make):
    run, _ = two_micro_steps(make(), written=False)
    tape, done = two_micro_steps(make(), written=True)
    assert not done
    assert_alike(tape, run)


@pytest.mark.parametrize(
    "case",
    some_slow(
        [
            ("llama", {"precision": "bf16"}),
            ("llama", {"adapter": "lora:r=16", "checkpointing": "full"}),
            ("llama", {"kernels": "chunked_ce", "offload": "activations"}),
            ("llama", {"adapter": "lora:r=16", "quantization": "nf4", "precision": "bf16"}),
            ("gpt2", {"precision": "bf16"}),
            ("gemma2", {}),
            ("mixtral", {"precision": "bf16"}),
            ("deepseek_v3", {"kernels": "chunked_ce"}),
        ],
        lambda case: case == ("llama", {"precision": "bf16"}),
        lambda case: "-".join([case[0], *case[1].values()]),
    ),
)
def test_the_second_micro_step_of_a_trace_is_written(tmp_path, monkeypatch, case):
    (config, changes), found = case, []
    lab = Lab(tmp_path, config, device="cuda")
    plan = PLAIN.replaced(micro_batch=2, **changes)
    lab.micro_steps(PLAIN.replaced(micro_batch=1))  # the first trace of a process has two numbers more
    write = Repetition.write
    monkeypatch.setattr(Repetition, "write", lambda *asked: found.append(write(*asked)) or found[-1])
    written = lab.micro_steps(plan)
    assert found == [True]
    monkeypatch.setattr(Marks, "repeat_first", lambda *_: None)
    run = lab.micro_steps(plan)
    assert found == [True]
    assert_alike(written.tape, run.tape)
    assert_alike(written.evaluation, run.evaluation)
