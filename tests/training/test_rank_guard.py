"""The guard over several ranks: a sample of ``tests/bench/guard_bench.py --ranks``, by real ranks over gloo."""

from dataclasses import replace

import pytest

from autofit.contract.outcome import Measured, Unsupported
from tests.support.guard_cases import Bench
from tests.support.rank_cases import MODULES, ONE_OF_MANY, defects, honest
from tests.support.servers import running

pytestmark = pytest.mark.slow
REFUSED = {
    "a rank with another seed, and other rows": "cp2xfsdp1 bf16",
    ONE_OF_MANY: "ddp bf16, 8 ranks",
    "a rank does not step": "fsdp bf16",
    "a rank's gradients are doubled": "tp2xfsdp1 fp32",
    "a rank drops every second micro-batch": "ddp bf16",
    "no all-reduce": "ddp bf16",
    "one weight has no all-reduce": "ddp bf16",
    "an average taken twice": "ddp bf16",
    "gradients are summed and not averaged": "ddp fp32",
    "a layer's gradients are not reduced": "tp2xfsdp2 bf16",
    "an average over the shards taken twice": "cp2xfsdp2 bf16",
    "the replicas have no all-reduce": "hsdp:2x2 bf16",
    "an average over the replicas taken twice": "hsdp:2x2 fp32",
    "a row-wise product is not summed": "tp2xfsdp1 bf16",
    "a row-wise product is summed twice": "tp2xfsdp1 fp32",
    "a column-wise product's gradient is not summed": "tp2xfsdp1 bf16",
    "a rank's norms begin otherwise": "tp2xfsdp2 fp32",
    "each rank's loss is the mean of its tokens": "cp2xfsdp1 fp32",
    "the loss is a sum over the ranks": "cp2xfsdp1 bf16",
    "the last labels of a part are lost": "cp2xfsdp1 bf16",
    "positions begin anew on each rank": "cp2xfsdp1 fp32",
    "attention stays within a rank": "cp2xfsdp1 bf16",
    "attention's backward pass stays within a rank": "cp2xfsdp1 bf16",
}
IN_CI = {
    "no all-reduce", "a layer's gradients are not reduced", "the replicas have no all-reduce",
    "a row-wise product is not summed", "attention stays within a rank",
    "fsdp bf16", "tp2xfsdp1 fp32",
}  # fmt: skip
"""Defects, and honest plans: of each layout one; the others are run by hand."""


def some_by_hand(cases, word):
    """Parameters of which some are run in CI."""
    return [pytest.param(one, id=one.words(), marks=() if word(one) in IN_CI else pytest.mark.by_hand) for one in cases]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    with running(tmp_path_factory.mktemp("ranks"), MODULES) as started:
        yield Bench(folder=tmp_path_factory.mktemp("bench"), server=started)


@pytest.mark.parametrize("case", some_by_hand(honest(), lambda one: one.name))
def test_ranks_that_train_as_one_process_does_pass(bench, case):
    found, comparisons = bench.look(case)
    assert found.verdict == "same", found.words
    assert max(one.ratio for one in comparisons) < 0.7, "with room to spare"


@pytest.mark.parametrize(
    "case",
    some_by_hand([one for one in defects() if REFUSED.get(one.defect) == one.name], lambda one: one.defect),
)
def test_a_defect_of_a_rank_is_refused(bench, case):
    found, _ = bench.look(case)
    assert found.verdict == "other", found.words


def test_ranks_that_share_a_product_and_drop_out_other_activations_are_no_measurement(bench):
    """The guard drops nothing out."""
    case = next(one for one in defects() if one.defect == "a rank with another dropout mask")
    found = bench.tried(case)
    assert isinstance(found, Unsupported), found
    assert "drop out different activations" in found.reason


EVALUATED = """
from pathlib import Path
from autofit.training import loops
def evaluated(trainer, rows=None):
    import torch
    def metrics(given):
        Path("SHAPES").write_text(f"{given.predictions.shape[:2]} {given.label_ids.shape}")
        return {}
    trainer.compute_metrics = metrics
    trainer.evaluate(torch.utils.data.Subset(trainer.train_dataset, range(3)))
loops.evaluate_once = evaluated
"""


@pytest.mark.parametrize(
    ("name", "shapes"),
    [("cp2xfsdp1 fp32", "(5, 16) (5, 32)"), ("tp2xfsdp1 fp32", "(5, 32) (5, 32)"), ("fsdp fp32", "(3, 32) (3, 32)")],
)
def test_metrics_are_given_what_the_plan_says_of_an_evaluation(bench, tmp_path, name, shapes):
    """Three rows of 32 tokens; where a Trainer puts rows together again, `changes` need not say it any more."""
    script = EVALUATED.replace("SHAPES", str(tmp_path / "shapes"))
    case = replace(next(one for one in honest() if one.name == name), script=script)
    assert isinstance(bench.tried(case), Measured)
    assert (tmp_path / "shapes").read_text() == shapes


def test_every_defect_is_injected():
    assert {one.defect for one in defects()} == {*REFUSED, "a rank with another dropout mask"}
