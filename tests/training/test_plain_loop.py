"""A plain loop with Accelerate under a plan: what it reads of its own numbers stays, and what can't is told."""

import collections
import dataclasses
import json
import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from accelerate.utils import GradientAccumulationPlugin, LoggerType
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import BatchEncoding

from autofit.contract.script import Script
from autofit.registry import recipe_of
from autofit.training.scripts.leave import Enough
from autofit.training.scripts.plain_loop import entry as loop_entry
from autofit.training.scripts.plain_loop import patches, some_rows
from autofit.training.scripts.plain_loop.autocast import autocast_of_gpus
from autofit.training.scripts.plain_loop.by_number.loop import _TAKES as TAKES
from autofit.training.scripts.plain_loop.loader import own_length
from autofit.training.scripts.plain_loop.losses import COMBINED, Judged, judged, sums_rows, takes_rows_together
from autofit.training.scripts.plain_loop.trackers import init_trackers
from autofit.training.timing import Clock, Effort
from autofit.training.world import World
from tests.support.synthetic import cpu_facts
from tests.support.tiny import PLAIN

PATCHED = """
import json
from autofit.training.scripts.plain_loop.loader import rebuilt
from autofit.training.scripts.plain_loop.patches import LoopPatches

told = []
LoopPatches(
    construct=lambda given: {**given, "gradient_accumulation_steps": 2},
    accumulation=2,
    loader=lambda own, _: rebuilt(own, rows=4),
    counts=told.append,
    quiet=False,
).install()
"""
SCRIPT = """
import torch
from accelerate import Accelerator, skip_first_batches
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
loader = DataLoader(TensorDataset(torch.arange(64.0).unsqueeze(1)), batch_size=2)
model = torch.nn.Linear(1, 1)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), loader)
steps = len(loader) // accelerator.gradient_accumulation_steps
seen, made = [], 0


def train(batches, asks=False):
    global made
    for number, (batch,) in enumerate(batches):
        seen.append(batch.flatten().tolist())
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum() * 0 + model.bias.sum())
            if accelerator.sync_gradients:
                made += 1
                grad = model.bias.grad.item()
            optimizer.step()
            optimizer.zero_grad()
        if asks and number == len(batches) - 1:
            pass
    return grad


"""


def run(tmp_path, rest, patched=True):
    """What a script prints, with a plan of 4 x 2 in the place of its own 2 x 4, or without."""
    script = tmp_path / "script.py"
    text = (PATCHED if patched else "import json\ntold = []\n") + SCRIPT + textwrap.dedent(rest)
    script.write_text(text + "\nprint(json.dumps([steps, made, seen, told, gave]))\n")
    done = subprocess.run([sys.executable, script], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_plans_micro_steps_stand_over_those_that_the_environment_says(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    given = {"gradient_accumulation_steps": 1}
    patches._take_from_environment(given)
    assert given == {"gradient_accumulation_steps": 4}, "as an Accelerator would take it"
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" not in os.environ
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8")
    patches._take_from_environment(given)
    assert given == {"gradient_accumulation_steps": 4}, "those are the plan's"


def test_what_a_script_says_of_an_epochs_last_micro_batches_stays():
    recipe = recipe_of(PLAIN, cpu_facts())
    plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
    changed = patches.constructed({"gradient_accumulation_plugin": plugin}, recipe, accumulation=2)
    assert "gradient_accumulation_steps" not in changed
    found = changed["gradient_accumulation_plugin"]
    assert (found.num_steps, found.sync_with_dataloader, plugin.num_steps) == (2, False, 4)


@pytest.mark.slow
def test_a_script_computes_with_its_own_numbers(tmp_path):
    own, planned = (run(tmp_path, "gave = train(loader)", patched) for patched in (False, True))
    assert (own[0], own[1]) == (planned[0], planned[1]) == (8, 8), "as many steps as it has computed"
    assert [row for one in planned[2] for row in one] == [row for one in own[2] for row in one]
    assert {len(one) for one in planned[2]} == {4}
    assert planned[4] == own[4] == pytest.approx(1.0), "divided by the plan's micro-steps"
    assert planned[3] == []


@pytest.mark.slow
def test_a_script_reads_the_rows_of_its_own_loader(tmp_path):
    """As where its learning rate grows with them."""
    own, planned = (
        run(tmp_path, "train(loader)\ngave = loader.total_batch_size", patched) for patched in (False, True)
    )
    assert own[4] == planned[4] == 2


@pytest.mark.slow
def test_a_script_that_sets_the_accumulation_reads_what_it_has_set(tmp_path):
    found = run(tmp_path, "accelerator.gradient_accumulation_steps = 8\ngave = accelerator.gradient_accumulation_steps")
    assert found[4] == 8


@pytest.mark.slow
@pytest.mark.parametrize("place", ["loader = Data", "seen, made"], ids=["before prepare", "behind it"])
def test_a_script_that_sets_its_own_accumulation_trains_with_the_plans(tmp_path, place):
    """As Accelerate's examples do that look for the batch which fits."""
    sets = SCRIPT.replace(", gradient_accumulation_steps=4", "").replace(
        place, f"accelerator.gradient_accumulation_steps = 4\n{place}"
    )
    found = json.loads(lines_of(tmp_path, sets + "train(loader)\nprint(json.dumps([made, seen]))", "4", "2")[-1])
    assert (found[0], {len(one) for one in found[1]}) == (8, {4})


@pytest.mark.slow
def test_a_script_that_changes_its_accumulation_while_it_trains_is_refused(tmp_path):
    rest = "train(loader)\naccelerator.gradient_accumulation_steps = 8\ntrain(loader)"
    with pytest.raises(AssertionError, match="asks for 16 rows a step on each device; it was tuned with 8"):
        lines_of(tmp_path, SCRIPT + rest, "4", "2")


FOLD = """
again = torch.nn.Linear(1, 1)
with_loader = DataLoader(TensorDataset(torch.arange(64.0).unsqueeze(1)), batch_size=2)
"""


@pytest.mark.slow
def test_a_model_that_is_prepared_after_a_training_is_trained_with_the_plan_too(tmp_path):
    """As in a cross-validation."""
    rest = """
    train(loader)
    model, optimizer, loader = accelerator.prepare(again, torch.optim.SGD(again.parameters(), lr=0.0), with_loader)
    train(loader)
    print(json.dumps([made, seen]))
    """
    made, seen = json.loads(lines_of(tmp_path, SCRIPT + FOLD + textwrap.dedent(rest), "4", "2")[-1])
    assert (made, {len(one) for one in seen}) == (16, {4})


@pytest.mark.slow
@pytest.mark.parametrize("again", ["", "accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)"])
def test_a_second_training_with_other_rows_keeps_its_own(tmp_path, again):
    """What the first one has trained would be lost if the script were stopped there."""
    rest = f"""
    train(loader)
    {again}
    other = DataLoader(with_loader.dataset, batch_size=8)
    model, optimizer, loader = accelerator.prepare(again, torch.optim.SGD(again.parameters(), lr=0.0), other)
    gave = train(loader)
    steps = accelerator.gradient_accumulation_steps
    model, optimizer, loader = accelerator.prepare(model, optimizer, with_loader)
    train(loader)
    print(json.dumps([made, [len(one) for one in seen], gave, steps]))
    """
    *said, last = lines_of(tmp_path, SCRIPT + FOLD + textwrap.dedent(rest), "4", "2")
    made, rows, gave, steps = json.loads(last)
    assert (made, rows) == (8 + 2 + 8, [4] * 16 + [8] * 8 + [4] * 16)
    assert (gave, steps) == (pytest.approx(1.0), 4)
    assert any("asks for 32 rows a step, not 8: its batches stay its own" in one for one in said)


@pytest.mark.slow
def test_a_training_on_another_loader_takes_the_scripts_own_batches(tmp_path):
    """What it has trained before would be lost if it were stopped there; the plan's number would be other rows."""
    rest = """
    other = accelerator.prepare(with_loader)
    gave = [train(one) for one in (loader, other, loader)]
    print(json.dumps([made, [len(one) for one in seen], gave]))
    """
    *said, last = lines_of(tmp_path, SCRIPT + FOLD + textwrap.dedent(rest), "8", "1")
    assert json.loads(last) == [24, [8] * 8 + [2] * 32 + [8] * 8, [1.0, 1.0, 1.0]]
    assert len([one for one in said if "trains on another loader, too" in one]) == 1


@pytest.mark.slow
def test_a_loader_that_is_prepared_anew_for_each_epoch_is_the_plans(tmp_path):
    """Also beside others: those that were prepared at one place before the script trained come in the same order."""
    rest = """
    for epoch in range(3):
        *_, again, kept = [accelerator.prepare(DataLoader(loader.dataset, batch_size=2)) for _ in range(2)]
        for batch in kept:
            seen.append(batch[0].flatten().tolist())
        train(again)
    print(json.dumps([made, [len(one) for one in seen]]))
    """
    text = SCRIPT.replace("optimizer, loader = accel", "optimizer = accel").replace("lr=0.0), loader)", "lr=0.0))")
    *said, last = lines_of(tmp_path, text + textwrap.dedent(rest), "8", "1")
    assert json.loads(last) == [24, ([2] * 32 + [8] * 8) * 3]
    assert not any("loader" in one for one in said)


def test_a_measured_loop_ends_where_it_trains_on_another_loader(monkeypatch):
    monkeypatch.setattr(loop_entry, "counted", lambda _: None)
    _, loop = measured(World(size=1))
    loop.begun.update({1})
    with pytest.raises(Enough):
        loop.before_backward(None, None)


@pytest.mark.slow
@pytest.mark.parametrize("skip", ["accelerator.skip_first_batches", "skip_first_batches"])
def test_a_resumed_epoch_skips_as_many_rows(tmp_path, skip):
    rest = f"""
    rest = {skip}(loader, 8)
    gave = len(rest)
    train(rest)
    """
    own, planned = (run(tmp_path, rest, patched) for patched in (False, True))
    assert own[2][0][0] == planned[2][0][0] == 16.0
    assert (own[1], own[4]) == (planned[1], planned[4]) == (6, 24)


@pytest.mark.slow
def test_a_resumed_epoch_may_begin_in_the_middle_of_a_micro_batch(tmp_path):
    """Scripts count the micro-batches of the last step of an epoch as a whole step's, and so skip some more."""
    rest = "rest = accelerator.skip_first_batches(loader, 3)\ngave = len(rest)\ntrain(rest)"
    own, planned = (run(tmp_path, rest, patched) for patched in (False, True))
    assert [row for one in planned[2] for row in one] == [row for one in own[2] for row in one] == [*range(6, 64)]
    assert (own[1], own[4]) == (planned[1], planned[4]) == (8, 29)


@pytest.mark.slow
def test_a_stream_that_resumes_in_the_middle_of_a_micro_batch_is_refused(tmp_path):
    rest = """
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(64))

    loader = accelerator.prepare(DataLoader(Stream(), batch_size=2))
    try:
        accelerator.skip_first_batches(loader, 3)
    except Exception as error:
        gave = str(error)
    """
    assert "skips 3 micro-batches of 2 rows, which are no whole number of the plan's, of 4" in run(tmp_path, rest)[4]


@pytest.mark.slow
def test_what_was_saved_under_another_split_goes_on_with_a_whole_step(tmp_path):
    """Three micro-steps of the script's own may have been an optimizer step; of the plan's there is one half made."""
    rest = f"""
    accelerator.step = 3
    accelerator.save_state("{tmp_path}/state")
    accelerator.load_state("{tmp_path}/state")
    gave = train(loader)
    """
    _, made, _, _, gave = run(tmp_path, rest)
    assert (made, gave) == (8, pytest.approx(1.0))


@pytest.mark.slow
def test_a_loop_that_asks_for_its_loaders_length_is_told_of(tmp_path):
    assert run(tmp_path, "gave = train(loader, asks=True)")[3] == [0] * 16


@pytest.mark.slow
def test_a_measured_loop_is_told_of_what_it_would_save(tmp_path):
    rest = f"""
    LoopPatches(goes_on=told.append).install()
    accelerator.save_state("{tmp_path}/state")
    accelerator.save([], "{tmp_path}/file")
    gave = sorted(one.name for one in __import__("pathlib").Path("{tmp_path}").iterdir())
    """
    assert run(tmp_path, rest)[3:] == [[True, True], ["script.py"]]


@pytest.mark.slow
def test_a_measured_loop_deletes_nothing_that_was_there(tmp_path):
    """Old checkpoints make room for new ones, which are not written."""
    old, file = tmp_path / "checkpoint-10", tmp_path / "best.pt"
    old.mkdir()
    for one in (file, old / "weights", old):
        one.exists() or one.write_text("kept")
        os.utime(one, (1, 1))
    rest = f"""
    import os, shutil, tempfile

    LoopPatches(goes_on=told.append).install()
    outside = accelerator.prepare(DataLoader(TensorDataset(torch.arange(2.0))))
    for _ in outside:
        shutil.rmtree("{old}")
        os.remove("{file}")
        __import__("pathlib").Path("{file}").unlink()
        with tempfile.TemporaryDirectory() as own:
            open(own + "/made", "w").close()
        seen.append(os.path.exists(own))
    gave = [sorted(os.listdir("{tmp_path}")), os.listdir("{old}")]
    shutil.rmtree("{old}")
    """
    found = run(tmp_path, rest)
    assert found[2] == [False]
    assert found[3].count(True) == 3
    assert found[4] == [["best.pt", "checkpoint-10", "script.py"], ["weights"]]
    assert not old.exists(), "outside of its loop a script deletes what it wants"


PLANNED = """
import sys

from autofit.contract.script import Script
from autofit.registry import recipe_of
from autofit.training.scripts.plain_loop.entry import train_loop_with
from tests.support.synthetic import cuda_facts
from tests.support.tiny import PLAIN

script = Script(path=sys.argv[1], sha256="", trainer="", micro_batch=2, accumulation=4)
facts = cuda_facts(global_batch=8, launch_path="loop", script=script)
plan = PLAIN.replaced(micro_batch=int(sys.argv[2]), accumulation=int(sys.argv[3]), precision=sys.argv[4])
train_loop_with(recipe_of(plan, facts), script, sys.argv[1], (), print)
"""


def lines_of(tmp_path, text, micro_batch="2", accumulation="4", precision="fp32"):
    """The lines that a script prints by a plan, which has 2 x 4 of its own."""
    path = tmp_path / "script.py"
    path.write_text("import json\n" + text)
    command = [sys.executable, "-c", PLANNED, path, micro_batch, accumulation, precision]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(("value", "flag"), [("tf32", "tf32"), ("fp32", "ieee")])
def test_a_loop_multiplies_in_tf32_where_the_plan_says_so(tmp_path, value, flag):
    reads = "matmul = torch.backends.cuda.matmul\nprint(matmul.fp32_precision, matmul.allow_tf32)"
    assert lines_of(tmp_path, SCRIPT + reads, precision=value)[-1].split() == [flag, str(value == "tf32")]


def test_a_measured_loop_is_left_where_it_saves(monkeypatch):
    """What it writes beside that, such as the number of its step, would be over its own."""
    monkeypatch.setattr(loop_entry, "counted", lambda _: None)
    clock, loop = measured(World())
    loop.goes_on(True)
    clock.timed.append(4)
    loop.goes_on(False)
    with pytest.raises(Enough) as left:
        loop.goes_on(True)
    assert left.value.found == "evidence"


def measured(world):
    """A clock of four steps, two of them timed, and a loop that it listens to."""
    clock = SimpleNamespace(timed=[2, 3], done=4, effort=SimpleNamespace(warm_up=2), world=world)
    clock.waits = SimpleNamespace(asked=lambda: None)
    clock.step_end = lambda: False
    observer = SimpleNamespace(with_later_state=lambda first, *_: first)
    tokens, script = SimpleNamespace(tell=lambda: None), SimpleNamespace(loader=0, own_split=None)
    return clock, loop_entry._Measured(clock, script, tokens, observer=observer, seen=["evidence"])


@pytest.mark.parametrize(
    ("split", "mean", "rows", "noted"),
    [(None, 8, 40, 0), (TAKES.format("cache[step]", 7, "t.py"), 8, 12, 0), (TAKES.format("x[i]", 1, "t.py"), 4, 12, 1)],
)
def test_an_epoch_of_a_measured_loop_is_as_long_as_what_the_script_has_cached(split, mean, rows, noted):
    """As diffusers' scripts do with ``--cache_latents`` of a dozen images; elsewhere a trial takes what it wants."""
    own = Script(path="t.py", sha256="", trainer="", micro_batch=4, accumulation=1, own_split=split)
    own = dataclasses.replace(own, longest=8, mean_length=mean, longest_places=(3,), places=(*range(12),), rows=12)
    recipe = recipe_of(PLAIN.replaced(micro_batch=4, accumulation=1), cpu_facts())
    clock = Clock(recipe, Effort(max_steps=7), SimpleNamespace(), 1, on_cuda=False)
    loop = loop_entry._Measured(clock, own, SimpleNamespace(take=lambda _: None))
    given = loop.loader(DataLoader(range(12), batch_size=4), 0)
    assert sum(len(batch) for batch in given) == rows
    assert len(clock.notes) == noted


def test_processes_leave_a_measured_loop_together_where_one_of_them_saves(monkeypatch):
    """The others would wait for the gradients of one that has left."""
    monkeypatch.setattr(loop_entry, "counted", lambda _: None)
    monkeypatch.setattr(World, "agrees", lambda _, yes: asked.append(yes) or any(asked))
    asked = []
    clock, loop = measured(World(size=2))
    loop.accelerator = SimpleNamespace(optimizer_step_was_skipped=False)
    loop.synced = True
    loop.ends(0)
    clock.timed.append(4)
    loop.goes_on(True)
    loop.synced = True
    with pytest.raises(Enough):
        loop.ends(0)
    assert asked == [False, True]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_a_loop_reads_its_own_loaders_length_on_each_process(ranks, even, drop_last):
    for rows in range(1, 15):
        own = DataLoader(range(rows), batch_size=2, drop_last=drop_last)
        for rank in range(ranks):
            accelerator = SimpleNamespace(num_processes=ranks, process_index=rank, even_batches=even)
            shard = BatchSamplerShard(own.batch_sampler, ranks, rank, even_batches=even)
            assert own_length(own, accelerator) == len(shard)


def test_an_autocast_of_a_gpu_that_is_not_here_is_the_processors(monkeypatch):
    monkeypatch.setattr(torch.autocast, "__init__", torch.autocast.__init__)
    autocast_of_gpus()
    with torch.autocast("cuda"):
        assert (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")) == (True, torch.float16)
    with torch.autocast("cpu"):
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16


ROWS, CLASSES = 4, 6


@pytest.mark.parametrize(
    ("loss", "sums"),
    [
        (lambda of: functional.cross_entropy(of.x, of.y, reduction="sum"), True),
        (lambda of: -2 * functional.nll_loss(of.x, of.y, reduction="sum"), True),
        (lambda of: functional.binary_cross_entropy(of.x.sigmoid(), of.x.detach().sigmoid(), reduction="sum"), True),
        (lambda of: functional.mse_loss(of.x, of.x.detach() + 1, reduction="sum") - 0.5 * of.x.exp().sum(), True),
        (lambda of: functional.cross_entropy(of.x, of.y, reduction="none").sum().float(), True),
        (lambda of: functional.cross_entropy(of.x, of.y), False),
        (lambda of: functional.cross_entropy(of.x, of.y, reduction="sum") / len(of.x), False),
        (lambda of: functional.kl_div(of.x, of.x.detach(), reduction="batchmean"), False),
        (lambda of: functional.cross_entropy(of.x, of.y) + 0.1 * of.x.exp().sum(), False),
        (lambda of: functional.cross_entropy(of.x, of.y) + (of.weights**2).sum(), False),
        (lambda of: of.x.mean(0).sum(), False),
        (lambda _: torch.tensor(1.0), False),
    ],
)
def test_a_loss_that_grows_with_its_rows_is_told_from_a_mean(loss, sums):
    weights = torch.ones(3, CLASSES, requires_grad=True)
    of = SimpleNamespace(x=torch.randn(ROWS, 3) @ weights, y=torch.arange(ROWS), weights=weights)
    assert bool(sums_rows(loss(of), SimpleNamespace(batch_size=ROWS))) == sums


@pytest.mark.parametrize(
    ("loss", "together"),
    [
        (lambda of: functional.mse_loss(of.x, of.x.detach() + 1).sqrt(), True),
        (lambda of: 0.1 * functional.cross_entropy(of.x, of.y).exp() + of.x.mean(), True),
        (lambda of: functional.cross_entropy(of.x, of.y) ** 2, True),
        (lambda of: (of.x.exp() * of.x).sum() / of.x.exp().sum(), True),
        (lambda of: of.x.norm() / len(of.x) ** 0.5, True),
        (lambda of: functional.cross_entropy(of.x, of.y) / 2 + of.x.square().sqrt().mean(), False),
        (lambda of: functional.cross_entropy(of.x, of.y, reduction="sum") / torch.tensor(4.0), False),
        (lambda of: of.x.mean() * of.scale.exp() - of.scale, False),
        (lambda of: of.x.mean() + of.weights.square().sum().sqrt() + of.weights.norm(), False),
        (lambda _: torch.tensor(1.0), False),
    ],
)
def test_a_loss_that_is_no_mean_of_its_rows_own_is_told_by_what_it_is_made_of(loss, together):
    """Where the rows' own are much alike, so are the root of their mean and the mean of their roots."""
    weights, scale = torch.ones(3, CLASSES, requires_grad=True), torch.ones((), requires_grad=True)
    of = SimpleNamespace(x=torch.randn(ROWS, 3) @ weights, y=torch.arange(ROWS), weights=weights, scale=scale)
    assert takes_rows_together(loss(of), ROWS) == together


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    x: torch.Tensor


class Named(dict):
    def __init__(self, x):
        super().__init__(x=x)


class Pair(NamedTuple):
    x: torch.Tensor
    y: list[torch.Tensor]


X = torch.arange(8).view(4, 2)


@pytest.mark.parametrize(
    "batch",
    [
        Slots(X),
        SimpleNamespace(x=X, rows=4, name="own"),
        collections.defaultdict(list, x=X),
        Named(X),
        BatchEncoding({"x": X}),
        Pair(X, [X]),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_rows_of_a_batch_of_any_class_are_of_that_class(batch):
    taken = some_rows.rows_at(batch, 4, [1, 3])
    assert type(taken) is type(batch)
    for one, whole in ((taken, X[[1, 3]]), (batch, X)):
        assert torch.equal(one["x"] if isinstance(one, collections.abc.Mapping) else one.x, whole)


@pytest.mark.parametrize("batch", [0.5, torch.nn.Linear(2, 1), torch.float32, SimpleNamespace(x=X, share=0.5)])
def test_what_is_no_row_of_a_batch_tells_nothing(batch):
    with pytest.raises(some_rows._NotRows):
        some_rows.rows_at(batch, 4, [1, 3])


PART = (3.0, 1.0, 2.5)
"""The loss of each of three parts of a micro-batch alone."""
TOKENS = (5, 2, 3)


def of_parts(loss):
    return [loss(list(places)) for places in COMBINED]


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (lambda of: sum(PART[one] for one in of) / len(of), Judged.MEAN),
        (lambda of: 1 / 3 * sum(PART[one] for one in of) / len(of) + 2.0, Judged.MEAN),
        (lambda _: 0.7, Judged.MEAN),
        (lambda of: sum(PART[one] * TOKENS[one] for one in of) / sum(TOKENS[one] for one in of), Judged.WEIGHTED),
        (lambda of: sum(PART[one] for one in of) / 64, Judged.SUM),
        (lambda of: sum(PART[one] for one in of) + 2.0, Judged.SUM),
        (lambda of: sum(PART[one] for one in of) / len(of) ** 0.5, Judged.TOGETHER),
        (lambda of: sum(PART[one] for one in of) / len(of) + sum(PART[one] for one in of), Judged.TOGETHER),
        (lambda of: math.log(2 * len(of)), Judged.TOGETHER),
        (lambda of: sorted(PART[one] for one in of)[len(of) // 2] * sum(PART[one] for one in of), Judged.TOGETHER),
        (lambda of: sum(PART[one] / len(of) ** one for one in of), Judged.TOGETHER),
        (lambda of: PART[1] if 1 in of else 0.0, None),
        (lambda of: math.nan if len(of) == 1 else 1.0, None),
        (lambda _: 0.0, None),
    ],
)
def test_how_a_loss_is_made_of_its_rows_is_told_by_parts_of_them(loss, found):
    assert judged(of_parts(loss), 1e-5) is found


def test_a_loss_that_is_another_one_each_time_tells_nothing():
    counted = iter(range(1, 9))
    assert judged(of_parts(lambda _: 1 / next(counted)), 1e-5) is None


def test_an_idle_tracker_takes_whatever_a_script_does_with_one():
    accelerator = SimpleNamespace(log_with=[LoggerType.TENSORBOARD])
    init_trackers(accelerator, "run", config={})
    (tracker,) = accelerator.trackers
    assert tracker.name == "tensorboard"
    with tracker.tracker.start_run() as run:
        run.config["rows"] = 8
        assert [*run.log({"rows": run.config["rows"]})] == []
    assert Path("out", run.id) == Path("out") / str(run.id)
    assert not hasattr(run, "__array__")
