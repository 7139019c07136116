"""The modules of a model, gone through as PyTorch does."""

import pytest
from torch import nn

from autofit.costmodel.tracing.emulation.named_modules import at_once


class Own(nn.Module):
    """A module that names what is in it otherwise."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(1, 1)

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        yield f"{prefix}.own", self.inside


def model():
    shared = nn.Sequential(nn.Linear(1, 2), nn.ReLU())
    made = nn.ModuleDict({"first": shared, "again": nn.Sequential(shared, nn.ModuleList([nn.Tanh(), Own()]))})
    made.missing = None
    made.register_module("nothing", None)
    made["last"] = nn.Sequential()
    return made


def both(walk):
    plain = walk()
    with at_once():
        return plain, walk()


@pytest.mark.parametrize("options", [{}, {"prefix": "model"}, {"remove_duplicate": False}], ids=str)
def test_the_same_modules_come_in_the_same_order(options):
    made = model()
    plain, found = both(lambda: list(made.named_modules(**options)))
    assert found == plain
    assert len(found) > 8
    plain, found = both(lambda: [name for name, _ in made.named_parameters()])
    assert found == plain
    assert "again.1.1.own" in dict(made.named_modules())


def test_what_was_seen_before_is_left_out():
    made = model()
    plain, found = both(lambda: [name for name, _ in made.named_modules(memo={made["first"]})])
    assert found == plain
    assert not [name for name in found if name.startswith("first")]


def test_a_module_that_is_put_in_meanwhile_is_gone_through():
    """As who replaces layers one by one does it."""

    def replacing():
        made, seen = model(), []
        for name, one in made.named_modules():
            seen.append((name, type(one).__name__))
            if name == "first":
                made["last"] = nn.Sequential(nn.Conv1d(1, 1, 1))
            if isinstance(one, nn.ReLU):
                made["first"][1] = nn.Identity()
        return seen

    plain, found = both(replacing)
    assert found == plain
    assert ("last.0", "Conv1d") in found
