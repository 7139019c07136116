"""Loops that a script writes itself: what is known of them before they train, or why no plan can be put into them."""

import pytest

from autofit.training.jobs import DescribeScriptJob
from tests.support.cases import slow_but

PARTS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4)
"""
STEP = """
for (rows,) in loader:
    loss = model(rows).mean()
    {backward}
    optimizer.step()
    optimizer.zero_grad()
open(__file__ + ".trained", "w").close()
"""
ACCELERATE = "from accelerate import Accelerator\naccelerator = Accelerator(gradient_accumulation_steps=2)\n"
PREPARED = f"{PARTS}{ACCELERATE}model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"


@pytest.fixture
def described(server, tmp_path):
    """``described(text)``: what a script of that text would train, or why it can't be tuned; it never ends."""

    def describe(text):
        path = tmp_path / "train.py"
        path.write_text(text)
        with server.ask(tmp_path, DescribeScriptJob(path=str(path), arguments=(), call=1)) as answer:
            assert not (tmp_path / "train.py.trained").exists(), "it has trained to its end"
            return answer

    return describe


OWN = STEP.format(backward="loss.backward()")


@pytest.mark.parametrize(
    "text",
    [
        f"# as a Trainer does, without an Accelerator\n{PARTS}{OWN}",
        f"class Trainer: pass\n{PARTS}{OWN}",
        f"from shutil import copy as Accelerator\n{PARTS}{OWN}",
        f"from accelerate import Accelerator\naccelerator = Accelerator()\n{PARTS}{OWN}",
    ],
    ids=["comment", "class", "another", "only its device"],
)
def test_a_loop_without_accelerate_is_left_at_its_first_step_whatever_it_names(described, text):
    found = described(text)
    assert "in a loop without Accelerate" in found["error"]
    assert "autofit tune my.nets:make" in found["hint"]


@pytest.mark.parametrize("before", ["from accelerate import Accelerator", "import accelerate as a\na.Accelerator"])
def test_what_is_fitted_before_an_accelerator_is_made_is_let_be(described, before):
    probe = (
        "probe = nn.Linear(4, 1)\nprobe(loader.dataset[0][0]).backward()\ntorch.optim.SGD(probe.parameters()).step()\n"
    )
    rest = PREPARED.removeprefix(PARTS) + STEP.format(backward="accelerator.backward(loss)")
    assert described(before + PARTS + probe + rest)["script"]["micro_batch"] == 4


def test_an_optimizer_that_is_not_prepared_is_refused(described):
    text = PREPARED.replace(
        "model, optimizer, loader = accelerator.prepare(model, optimizer", "model, loader = accelerator.prepare(model"
    )
    found = described(text + STEP.format(backward="accelerator.backward(loss)"))
    assert "an optimizer that it has not given to accelerator.prepare" in found["error"]


def test_gradients_that_are_taken_without_the_accelerator_are_refused(described):
    found = described(PREPARED + OWN)
    assert "takes its gradients without its Accelerator" in found["error"]
    assert "accelerator.backward(loss)" in found["hint"]


BOTH = "accelerator.backward(loss)\n    accelerator.backward(model(rows).mean())"


@pytest.mark.parametrize("accumulates", [True, False])
def test_several_backward_passes_of_a_batch_are_refused(described, accumulates):
    step = STEP.format(backward=BOTH)
    if accumulates:
        step = step.replace("    loss = model", "    accelerator.accumulate(model).__enter__()\n    loss = model")
    found = described(PREPARED + step)
    assert "several times for one batch" in found["error"]
    assert "call backward() once" in found["hint"]


def test_micro_batches_are_counted_between_steps_of_several_optimizers(described):
    loop = """
second = accelerator.prepare(torch.optim.SGD(model.parameters()))
for number, (rows,) in enumerate(loader, start=1):
    accelerator.backward(model(rows).mean() / 4)
    if number % 4 == 0:
        for one in (optimizer, second):
            one.step()
            one.zero_grad()
"""
    assert described(PREPARED + loop)["script"]["accumulation"] == 4


SEVERAL = """
other = accelerator.prepare(DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=2))
next(iter(other))
for (rows,), {rest} in {together}:
    with accelerator.accumulate(model):
        accelerator.backward(model(rows).mean())
        optimizer.step()
"""


@pytest.mark.slow
def test_a_loop_whose_gradients_accumulate_over_an_epochs_end_keeps_its_split(described):
    plugin = "from accelerate.utils import GradientAccumulationPlugin as P\n"
    for carries in (True, False):
        given = f"gradient_accumulation_plugin=P(num_steps=2, sync_with_dataloader={not carries})"
        parts = PREPARED.replace("gradient_accumulation_steps=2", given)
        step = "accelerator.backward(model(rows).mean())\n        optimizer.step()\n        optimizer.zero_grad()\n"
        loop = f"for (rows,) in loader:\n    with accelerator.accumulate(model):\n        {step}"
        found = described(f"{plugin}{parts}{loop}")["script"]
        assert found["accumulation"] == 2
        assert bool(found["own_split"]) is carries, found["own_split"]


def test_a_loop_that_says_itself_how_its_model_is_spread_is_refused(described):
    accelerate = (
        "from accelerate import Accelerator\nfrom accelerate.utils import FullyShardedDataParallelPlugin as F\n"
    )
    found = described(f"{PARTS}{accelerate}Accelerator(fsdp_plugin=F(fsdp_version=2))\n{OWN}")
    assert found["error"] == "the script gives its Accelerator fsdp_plugin, which a plan says"
    shared = "from accelerate.utils import DataLoaderConfiguration as D\n"
    parts = PREPARED.replace("Accelerator(", "Accelerator(dataloader_config=D(split_batches=True), ")
    step = STEP.format(backward="accelerator.backward(loss)")
    assert described(f"{shared}{parts}{step}")["script"]["own"]["split_batches"] is True


@pytest.mark.slow
def test_a_loop_over_several_loaders_keeps_its_split(described):
    """Of two loaders, a plan changes the micro-batch of one: rows would be mixed otherwise."""
    mixed = described(PREPARED + SEVERAL.format(rest="_", together="zip(loader, other)"))["script"]
    assert "several loaders" in mixed["own_split"]
    alone = described(PREPARED + SEVERAL.format(rest="_", together="((one, 0) for one in loader)"))["script"]
    assert alone["own_split"] is None


@pytest.mark.slow
def test_a_loop_that_evaluates_after_its_first_step_is_left_there(described):
    """Of a model as large as the user's, on a CPU, an evaluation would take hours."""
    loop = """
for (rows,) in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(rows).mean())
        optimizer.step()
    with torch.no_grad():
        model(rows)
        open(__file__ + ".trained", "w").close()
"""
    assert described(PREPARED + loop)["script"]["accumulation"] == 2


TURNS = """
other = nn.Linear(4, 1)
other, second = accelerator.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
order = iter([0, 1] * 8)
for (rows,) in loader:
    {first}
    with {around}:
        turn = next(order) if {turns} else 0
        accelerator.backward((model, other)[turn](rows).mean())
        for one in [(optimizer, second)[turn]] if {turns} else [optimizer, second]:
            one.step()
            one.zero_grad()
"""


@pytest.mark.parametrize("turns", [True, False])
def test_a_loop_that_steps_its_optimizers_by_turns_keeps_its_split(described, turns):
    """Under more micro-steps only the one whose turn the last of them is would ever step, as of a GAN's two."""
    text = TURNS.format(turns=turns, first="", around="accelerator.accumulate(model, other)")
    found = described(PREPARED + text)["script"]
    assert ("steps one of its optimizers with this batch" in (found["own_split"] or "")) == turns
    assert found["by_turns"] == turns


@pytest.mark.parametrize("turns", [True, False])
@pytest.mark.parametrize(
    ("first", "around"),
    [("", "torch.enable_grad()"), ("model.zero_grad()", "accelerator.accumulate(model, other)")],
)
def test_optimizers_that_step_by_turns_are_told_where_the_split_is_held_for_another_reason(
    described, first, around, turns
):
    found = described(PREPARED + TURNS.format(turns=turns, first=first, around=around))["script"]
    assert found["own_split"]
    assert "steps one of its optimizers" not in found["own_split"]
    assert found["by_turns"] == turns


TAKES = """
def one_by_one():
    batches = iter(loader)
    for _ in range(len(loader)):
        yield next(batches)


def again():
    while True:
        yield from loader


{loop}:
    rows = rows[0]
    with accelerator.accumulate(model):
        accelerator.backward(model(rows).mean())
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("loop", "why"),
    slow_but(
        {"next", "generators"},
        {
            "next": (
                "batches = iter(loader)\nfor _ in range(len(loader)):\n  for rows in [next(batches)]",
                "by next()",
            ),
            "generator": ("batches = again()\nwhile rows := next(batches)", "by next()"),
            "counting generator": ("for rows in one_by_one()", "by next()"),
            "ahead": ("while True:\n for rows in [one for one, _ in zip(loader, range(2))]", "several batches before"),
            "loop": ("next(iter(loader))\nfor _, rows in enumerate(loader)", None),
            "generators": ("from tqdm import tqdm\nfor rows in tqdm(again(), disable=False)", None),
        },
    ),
)
def test_a_loop_that_counts_its_batches_keeps_its_split(described, loop, why):
    """Under another split as many micro-batches as it counts would be other rows, and other steps."""
    split = described(PREPARED + TAKES.format(loop=loop))["script"]["own_split"]
    assert split is why or why in split


def test_batches_that_are_taken_ahead_have_a_backward_pass_each(described):
    """As Accelerate's example does that counts the tokens of a step before it trains on them."""
    loop = """
batches = iter(loader)
while True:
    for (rows,) in [next(batches) for _ in range(2)]:
        accelerator.backward(model(rows).mean())
    optimizer.step()
"""
    found = described(PREPARED + loop)["script"]
    assert (found["accumulation"], "accelerator.accumulate" in found["own_split"]) == (2, True)


STEPS = """
for (rows,) in loader:
    with accelerator.accumulate(model):
        {first}
        accelerator.backward(model(rows).mean())
        {then}
        optimizer.step()
        {last}
"""


@pytest.mark.parametrize(
    ("parts", "why"),
    slow_but(
        {"before", "clips", "schedule", "prepared"},
        {
            "model": ({"last": "model.zero_grad()"}, "otherwise than by its prepared optimizer"),
            "inner": ({"last": "optimizer.optimizer.zero_grad()"}, "otherwise than by its prepared optimizer"),
            "before": ({"first": "optimizer.zero_grad()"}, "before each backward pass"),
            "by hand": ({"first": "for one in model.parameters(): one.grad = None"}, "before each backward pass"),
            "clips": ({"then": "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"}, "as by clipping"),
            "weights alone": ({"then": "model.weight.grad.mul_(2)"}, "as by clipping"),
            "reads": ({"then": "assert model.weight.grad.abs().max() < 1e3"}, "works with the gradients"),
            "schedule": ({"last": "schedule.step()"}, "learning rate"),
            "rate": ({"last": "optimizer.param_groups[0]['lr'] /= 2"}, "learning rate"),
            "gathers": ({"then": "accelerator.gather(rows)", "last": "schedule.step()"}, "learning rate"),
            "averages": ({"last": "averages.step()"}, "counts each batch for LocalSGD"),
            "averages synchronized": ({"last": "if accelerator.sync_gradients: averages.step()"}, None),
            "synchronized": ({"last": "if accelerator.sync_gradients: schedule.step()"}, None),
            "prepared": ({"last": "accelerator.prepare(schedule).step()"}, None),
            "prepared optimizer": ({"last": "optimizer.zero_grad()"}, None),
        },
    ),
)
def test_a_loop_that_does_with_each_batch_what_belongs_to_a_step_keeps_its_split(described, parts, why):
    """Of an accumulation of 1 that is no matter; of the plan's it would be done to a part of a step's gradients."""
    before = "schedule = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 9)\nmodel.zero_grad()\n"
    before += "from accelerate.local_sgd import LocalSGD\naverages = LocalSGD(accelerator, model, 8)\n"
    loop = STEPS.format(**{"first": "pass", "then": "pass", "last": "pass", **parts})
    split = described(PREPARED.replace("_steps=2", "_steps=1") + before + loop)["script"]
    assert split["accumulation"] == 1
    assert split["own_split"] is why or why in split["own_split"]


PART = """
done = steps = 0
for epoch in range(8):
    {loop}:
        with accelerator.accumulate(model):
            accelerator.backward(model(rows[0]).mean())
            optimizer.step()
            if accelerator.sync_gradients:
                steps += 1
        done += 1
        if {leaves}:
            break
    for place, _ in enumerate(loader):
        if place > 2:
            break
"""


@pytest.mark.parametrize(
    ("loop", "leaves", "why"),
    slow_but(
        {"zip", "count", "steps"},
        {
            "zip": ("for _, rows in zip(range(4), loader)", "False", "by zip()"),
            "islice": ("for rows in itertools.islice(loader, 4)", "False", "by islice()"),
            "zip of a generator": ("for _, rows in zip(range(4), again())", "False", "by zip()"),
            "enumerate": (
                "for place, rows in enumerate(tqdm(loader, disable=False))",
                "place == 3",
                "number of its batches",
            ),
            "count": ("for rows in loader", "done == 3", "number of its batches"),
            "steps": ("for rows in loader", "steps == 3", None),
            "steps beside a number": ("for place, rows in enumerate(loader)", "steps == 3", None),
        },
    ),
)
def test_a_loop_that_takes_a_part_of_its_batches_keeps_its_split(described, loop, leaves, why):
    """Of smaller micro-batches as many would be fewer rows, and fewer steps."""
    before = "import itertools\nfrom tqdm import tqdm\ndef again():\n    while True:\n        yield from loader\n"
    split = described(PREPARED + before + PART.format(loop=loop, leaves=leaves))["script"]["own_split"]
    assert split is why or why in split


@pytest.mark.parametrize(
    ("taken", "why"),
    [
        ("kept[place]", "as by kept[place]"),
        ("rows[0]", None),
        ("never_made[place] if kept is None else rows[0]", None),
    ],
)
def test_a_loop_that_takes_what_it_kept_of_each_batch_by_its_number_keeps_its_split(described, taken, why):
    """Latents that a script has cached are as many rows as its own micro-batches."""
    loop = f"""
kept = [rows * 2 for (rows,) in loader]
for place, rows in enumerate(loader):
    with accelerator.accumulate(model):
        accelerator.backward(model({taken}).mean())
        optimizer.step()
"""
    split = described(PREPARED + loop)["script"]["own_split"]
    assert split is why or why in split


def test_batches_that_are_kept_in_a_list_are_refused(described):
    """Where no batch is asked for there is nothing to time a step by."""
    loop = STEPS.format(first="pass", then="pass", last="pass").replace(" in loader", " in list(loader)")
    assert "takes all batches of its loader before" in described(PREPARED + loop)["error"]
    assert described(f"{PREPARED}for _ in loader:\n    pass\n{loop.replace('list(loader)', 'loader')}")["script"]


def test_batches_that_are_taken_in_a_thread_are_refused(described):
    """A batch that is taken ahead would begin and end steps that are timed, and tell that the epoch is over."""
    ahead = """
import queue, threading
taken = queue.Queue(1)
def take():
    for batch in loader:
        taken.put(batch)
    taken.put(None)
threading.Thread(target=take).start()
"""
    loop = STEPS.format(first="pass", then="pass", last="pass").replace(" in loader", " in iter(taken.get, None)")
    assert "in a thread of its own" in described(PREPARED + ahead + loop)["error"]


def test_batches_beside_those_of_a_loader_that_is_not_prepared_keep_the_split(described):
    several = SEVERAL.replace("accelerator.prepare(", "(").format(
        rest="_", together="((one, next(more)) for one in loader)"
    )
    split = described(PREPARED + several.replace("next(iter(other))", "more = iter(other)"))["script"]["own_split"]
    assert "several loaders" in split


@pytest.mark.parametrize(
    ("asked", "found"),
    slow_but(
        {"default", "cuda"},
        {
            "default": ("accelerator.device.type", {"cpu": "bfloat16", "cuda": "float16"}),
            "said": ("'cpu', dtype=torch.bfloat16", {"cpu": "bfloat16", "cuda": "bfloat16"}),
            "cuda": ("'cuda', torch.bfloat16", {"cuda": "bfloat16"}),
            "off": ("'cuda', enabled=False", {}),
        },
    ),
)
def test_the_autocast_that_a_loop_calls_its_model_in_is_told(described, asked, found):
    """Also that of a GPU, which is not there where a script is described."""
    loop = STEPS.format(first=f"torch.autocast({asked}).__enter__()", then="pass", last="pass")
    assert described(PREPARED + loop)["script"]["autocast"] == found


def test_the_autocast_of_a_loops_model_is_told(described):
    own = "model = nn.Sequential(model)\nmodel.forward = torch.autocast('cuda', torch.bfloat16)(model.forward)\n"
    loop = STEPS.format(first="pass", then="pass", last="pass")
    text = PREPARED.replace("from accelerate", f"{own}from accelerate", 1) + loop
    assert described(text)["script"]["autocast"] == {"cuda": "bfloat16"}


def test_the_autocast_of_an_accelerator_is_no_own_one(described):
    """It follows the plan."""
    loop = STEPS.format(first="accelerator.autocast().__enter__()", then="pass", last="pass")
    seen = described(PREPARED.replace("Accelerator(", "Accelerator(mixed_precision='bf16', ") + loop)["script"]
    assert (seen["autocast"], seen["own"]["bf16"]) == ({}, True)


LOSS = """
labels = (loader.dataset.tensors[0].sum(1) > 0).long()
from torch.nn import functional as F
steps = 0
{make}
for (rows,) in loader:
    steps += 1
    with accelerator.accumulate(model):
        loss = {loss}
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    {then}
"""
SLOPES = """
balance = [1.0]

def slope(rows):
    return torch.autograd.grad(model(rows).sum(), model.weight, create_graph=True)[0].square().mean() / len(rows) ** 2

def weight(rows):
    balance.extend([balance[-1] * (1.5 - slope(rows).item())])  # no text is read for that
    return balance[-1]
"""
SEEN = """
kept = [1.0]

def seen(given):
    kept.extend([given.mean().item()])
    return given.square().mean() * len(kept)
"""
SUM, TOGETHER, CHANGED = (
    "a sum over the rows", "takes the rows of a micro-batch together", "loss of the same rows is another one"
)  # fmt: skip
INSIDE = """
def inside(rows, model=model, forward=model.forward):
    return F.dropout(forward(rows), 0.5).square().sum() / 64
model.forward = inside
"""


@pytest.mark.parametrize(
    ("parts", "split", "depends"),
    slow_but(
        {"constant", "together", "mean", "counted"},
        {
            "constant": ({"loss": "model(rows).square().sum() / 64"}, SUM, None),
            "rows": ({"loss": "model(rows).square().mean() * len(rows) / 4"}, SUM, None),
            "printed": ({"loss": "model(rows).square().sum() / 64", "then": "accelerator.print(loss)"}, SUM, None),
            "inside": ({"make": INSIDE, "loss": "model(rows)"}, SUM, None),
            "noise": ({"loss": "(model(rows) - torch.randn(len(rows), 1)).square().sum() / 64"}, SUM, None),
            "together": ({"loss": "(model(rows) @ rows[:, :1].T).logsumexp(1).mean()"}, None, TOGETHER),
            "deviation": ({"loss": "model(rows).square().mean() - model(rows).std()"}, None, TOGETHER),
            "root": ({"loss": "(model(rows).square() * 1e-4 + 1).mean().sqrt()"}, None, TOGETHER),
            "mean": ({"loss": "3 * F.dropout(model(rows)).square().mean()"}, None, None),
            "noise in a mean": ({"loss": "(model(rows) - torch.randn(len(rows), 1)).square().mean()"}, None, None),
            "size": ({"loss": "model(rows).square().sum() / len(rows)"}, None, None),
            "fails": ({"loss": "model(rows).square().view(4, 1).sum() / 64"}, "fails where a batch has", None),
            "differentiated": ({"loss": "model(rows).square().mean() + slope(rows)"}, None, TOGETHER),
            "weighted by slopes": ({"loss": "model(rows).square().mean() * weight(rows)"}, CHANGED, None),
            "seen": ({"make": SEEN, "loss": "seen(model(rows))"}, CHANGED, None),
            "leaves": ({"loss": "model(rows).square().sum() / 64", "then": "break"}, "number of its", None),
        },
    ),
)  # fmt: skip
def test_how_a_loops_loss_is_made_of_its_rows_is_told(described, parts, split, depends):
    """Under another split the gradients of a sum are of another size, though the script divide it by a constant."""
    script = described(PREPARED + SLOPES + LOSS.format(**{"make": "", "then": "", **parts}))["script"]
    for found, wanted in ((script["own_split"], split), (script["depends_on_rows"], depends)):
        assert found is wanted or wanted in found


NUMBERED = """
import dataclasses

@dataclasses.dataclass
class Rows:
    x: torch.Tensor
    count: int

loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4, collate_fn=lambda rows: {gives})
"""


@pytest.mark.slow
@pytest.mark.parametrize("gives", ["Rows(torch.stack([one for one, in rows]), len(rows))", "[*rows, len(rows)]"])
def test_a_batch_that_tells_its_number_of_rows_is_asked_too(described, gives):
    taken = "rows.x" if gives.startswith("Rows") else "torch.stack([one for one, in rows[:-1]])"
    loss = f"model({taken}).square().sum() / 64"
    text = PREPARED.replace("from accelerate", NUMBERED.format(gives=gives) + "from accelerate", 1)
    loop = LOSS.format(make="", then="", loss=loss).replace("for (rows,)", "for rows").replace("labels =", "# ")
    assert SUM in described(text + loop)["script"]["own_split"]


@pytest.mark.slow
def test_a_loss_that_weighs_its_rows_is_told(described):
    weighs = "(model(rows).square()[:, 0] * rows[:, 0].abs()).sum() / rows[:, 0].abs().sum()"
    text = (PREPARED + LOSS.format(make="", then="", loss=weighs)).replace("batch_size=4", "batch_size=6")
    assert described(text)["script"]["weighs"] is True


KEEPS = """
from torch.optim.swa_utils import AveragedModel
average, kept = AveragedModel(model), [one.detach().clone() for one in model.parameters()]

def average_by_hand():
    for one, now in zip(kept, model.parameters()):
        one.data.mul_(0.9).add_(now.data, alpha=0.1)
"""
REPLACED = """
kept = {name: one.clone() for name, one in model.state_dict().items()}

def replace():
    kept.update({name: kept[name] * 0.9 + one * 0.1 for name, one in model.state_dict().items()})
"""
WRITES = "changes its model's weights with each batch"
RATES = """
import itertools
numbers = itertools.count(1)

def rated():
    optimizer.param_groups[0]["lr"] = 1e-3 / next(numbers)
"""
SQUARED = "model(rows).square().mean()"
AVERAGED, BUFFER = "where it averages these", "changes its running with each micro-batch"
RUNNING = """
model.register_buffer("running", torch.zeros(4))

def running(rows, model=model, forward=model.forward):
    model.running.mul_(0.9).add_(rows.mean(0))
    return forward(rows)
model.forward = running
"""


@pytest.mark.parametrize(
    ("parts", "split", "depends"),
    slow_but(
        {"average", "clips weights", "synchronized"},
        {
            "average": ({"make": KEEPS, "then": "average.update_parameters(model)"}, AVERAGED, None),
            "by hand": ({"make": KEEPS, "then": "average_by_hand()"}, AVERAGED, None),
            "in its place": ({"make": REPLACED, "then": "replace()"}, AVERAGED, None),
            "clips weights": ({"then": "[one.data.clamp_(-1, 1) for one in model.parameters()]"}, WRITES, None),
            "says again what trains": ({"then": "model.requires_grad_(True)"}, None, None),
            "hook": ({"make": "model.weight.register_hook(lambda given: given.clamp(-1, 1))"}, "a hook", None),
            "synchronized": (
                {"make": KEEPS, "then": "accelerator.sync_gradients and average_by_hand()"}, None, None,
            ),
            "rate": ({"loss": f"rated() or {SQUARED}", "make": RATES}, "learning rate", None),
            "buffer": ({"make": RUNNING}, None, BUFFER),
        },
    ),
)  # fmt: skip
def test_what_a_loop_keeps_of_each_batch_is_told(described, parts, split, depends):
    """Averages of the weights would be taken as often as there are micro-batches of the plan's."""
    text = LOSS.format(**{"make": "", "then": "", "loss": SQUARED, **parts})
    script = described(PREPARED + text)["script"]
    for found, wanted in ((script["own_split"], split), (script["depends_on_rows"], depends)):
        assert found is wanted or wanted in found


NUMBER = """
schedule = accelerator.prepare(torch.optim.lr_scheduler.ConstantLR(optimizer.optimizer))
count = 0
for place, (rows,) in enumerate(loader):
    {before}
    with accelerator.accumulate(model):
        loss = model(rows).square().mean()
        {then}
        accelerator.backward(loss)
        optimizer.step()
        {last}
        optimizer.zero_grad()
    {after}
"""
BRANCH = """if len(rows) > 2:
            whole = loss * 2
            whole = whole + loss
        else:
            whole = loss
        loss = whole"""
OTHERWISE = "trains otherwise by the number of its batches"
RATE = "for group in optimizer.param_groups: group['lr']"
LOGGED = "told = {}; told['lr'] = optimizer.param_groups[0]['lr']"


@pytest.mark.parametrize(
    ("parts", "why"),
    slow_but(
        {"now and then", "rate", "clips", "logs"},
        {
            "now and then": ({"then": "loss += (place % 16 == 0) * model(rows).abs().mean()"}, OTHERWISE),
            "if": ({"then": "if place % 16 == 0: loss = loss + model(rows).abs().mean()"}, OTHERWISE),
            "count": ({"then": "loss = loss * (1 + count)", "after": "count += 1"}, OTHERWISE),
            "schedule": ({"last": "schedule.step(count / 16)", "after": "count = count + 1"}, OTHERWISE),
            "schedule now and then": ({"last": "if (place + 1) % 2 == 0: schedule.step()"}, OTHERWISE),
            "freezes": ({"before": "model.bias.requires_grad_(place > 8)"}, OTHERWISE),
            "target": ({"after": "if place % 5 == 4: model.load_state_dict(model.state_dict())"}, OTHERWISE),
            "rate": ({"after": "if place % 99 == 98: optimizer.param_groups[0]['lr'] *= 0.5"}, OTHERWISE),
            "rates at an end": ({"after": f"if place == len(loader) - 1:\n        {RATE} *= 0.5"}, OTHERWISE),
            "rates by a number": ({"before": f"rate = 1e-3 if place < 9 else 1e-4\n    {RATE} = rate"}, OTHERWISE),
            "rate of a step": ({"after": f"if accelerator.sync_gradients and place > 8:\n        {RATE} *= 0.5"}, None),
            "an accelerator's number": (
                {"after": "if accelerator.step % 64 == 0: optimizer.param_groups[0]['lr'] *= 0.5"}, OTHERWISE,
            ),
            "logs by that": ({"after": "if accelerator.step % 64 == 0: print(loss)"}, None),
            "clips": (
                {"last": "if (place + 1) % 2 == 0: accelerator.clip_grad_norm_(model.parameters(), 1.0)"}, OTHERWISE,
            ),
            "logs its rate": ({"after": f"if place % 5 == 0: {LOGGED}"}, None),
            "logs": ({"after": "count += loss.item()\n    if place % 5 == 0: mean = count; print(mean, place)"}, None),
            "adds to a branch": ({"then": BRANCH}, None),
            "sums its losses": ({"then": "loss += model(rows).abs().mean()", "last": "schedule.step()"}, None),
            "steps": ({"then": "loss *= 1 + count", "after": "if accelerator.sync_gradients: count += 1"}, None),
        },
    ),
)  # fmt: skip
def test_a_loop_that_trains_by_the_number_of_its_batches_keeps_its_split(described, parts, why):
    """As where it weighs a part of its loss by how many came, or trains otherwise with each sixteenth."""
    text = NUMBER.format(**{"before": "pass", "then": "pass", "last": "pass", "after": "pass", **parts})
    split = described(PREPARED + text)["script"]["own_split"]
    assert split is why or why in split


FOLLOWED = """
total, counts, losses, state = 0, 0, [], {{"count": 0}}

def decay():
    for group in optimizer.param_groups: group['lr'] *= 0.5

def rate_of(number):
    optimizer.param_groups[0]['lr'] = 1e-3 * 0.9 ** (number // 64)

def over():
    return total >= 40

def share():
    global counts
    counts += 1
    return min(1.0, counts / 16)

def noise():
    for one in model.parameters(): one.data.add_(0.01)

def evaluate():
    with torch.no_grad(): return model(rows).mean().item()

class Fit:
    def __init__(self):
        self.made, self.steps, self.sum, self.kept = 0, 0, 0.0, []

    def one(self, place, loss):
        self.made += 1
        self.sum += loss.item()
        self.kept.append(loss.item())
        if accelerator.sync_gradients: self.steps += 1
        if place % 64 == 63:
            print(self.sum / self.made, len(self.kept))
            self.kept = []

class Waits:
    def __init__(self):
        self.lowest, self.waited, self.came = 1e9, 0, 0

    def __call__(self, found):
        self.waited = 0 if found < self.lowest else self.waited + 1
        self.lowest = min(found, self.lowest)
        return self.waited > 64

    def batch(self):
        self.came += 1
        if self.came % 64 == 0: self.lower()

    def lower(self):
        decay()

def lowers():
    decay()

def lowers_now_and_then(number, method):
    if number % 64 == 63: method()

fit, mean, waits = Fit(), None, Waits()
for place, (rows,) in enumerate(loader):
    {before}
    with accelerator.accumulate(model):
        loss = model(rows).square().mean()
        {then}
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    {after}
"""
ADDS, LEAVES = "total += 1", "when to leave its loop"


@pytest.mark.parametrize(
    ("parts", "why"),
    slow_but(
        {"function of a function", "a flag", "method that is no matter"},
        {
            "function": ({"after": "if place % 64 == 63: decay()"}, OTHERWISE),
            "number that a function is given": ({"after": "if place % 64 == 63: rate_of(place)"}, OTHERWISE),
            "number that a function takes": ({"after": "rate_of(number=place)"}, OTHERWISE),
            "function that counts": ({"then": "loss = loss * share()"}, OTHERWISE),
            "method that counts": ({"after": "fit.one(place, loss)\n    if fit.made > 40: decay()"}, OTHERWISE),
            "method that is no matter": (
                {"after": "fit.one(place, loss)\n    if fit.steps > 40: decay()\n    if fit.steps > 50: break"}, None,
            ),
            "function of a function": ({"after": "if place % 64 == 63: lowers()"}, OTHERWISE),
            "function that is given": ({"after": "lowers_now_and_then(place, waits.lower)"}, OTHERWISE),
            "method of a method": ({"after": "waits.batch()"}, OTHERWISE),
            "object that is called": ({"after": "if waits(loss.item()): break"}, LEAVES),
            "evaluation": ({"after": "if place % 64 == 63: print(evaluate())"}, None),
            "noise": ({"after": "if place % 64 == 63: noise()"}, OTHERWISE),
            "dictionary": ({"before": "state['count'] += 1", "then": "loss *= 1 + state['count']"}, OTHERWISE),
            "list": ({"after": "losses.append(loss.item())\n    if len(losses) % 64 == 63: decay()"}, OTHERWISE),
            "trigger": ({"before": ADDS, "after": "if total == 40: accelerator.set_trigger()"}, OTHERWISE),
            "a flag": ({"before": ADDS, "after": "stops = total >= 40\n    if stops: break"}, LEAVES),
            "a function's word": ({"before": ADDS, "after": "if over(): break"}, LEAVES),
            "an error": ({"before": ADDS, "after": "if total >= 40: raise SystemExit"}, LEAVES),
            "running mean": (
                {"after": "mean = loss if mean is None else 0.9 * mean + 0.1 * loss\n    if mean < 1e-6: break"},
                LEAVES,
            ),
            "a loss that is none": ({"after": "losses.append(1)\n    if not loss.isfinite(): break"}, None),
        },
    ),
)  # fmt: skip
def test_the_number_of_batches_is_followed_into_what_a_loop_computes_and_calls(described, parts, why):
    """Functions of the script's, also those that these call; a flag, a list or a progress bar that tells it."""
    split = split_of(described, parts)
    assert split is why or why in split


def split_of(described, parts, functions=""):
    """Why a loop with these parts keeps its split."""
    text = FOLLOWED.format(**{"before": "pass", "then": "pass", "after": "pass", **parts})
    return described(PREPARED + functions + text)["script"]["own_split"]


BY_LOSS = "goes by the loss of a micro-batch"


@pytest.mark.parametrize(
    ("parts", "why"),
    slow_but(
        {"ends", "an error"},
        {
            "ends": ({"after": "if loss < -1: break"}, BY_LOSS),
            "ends at a step": ({"after": "if accelerator.sync_gradients and loss.item() < -1: break"}, BY_LOSS),
            "leaves out": ({"then": "if loss > 1e6: continue"}, BY_LOSS),
            "lowest": ({"after": "mean = min(mean or 9, loss.item())\n    if mean < 0: break"}, BY_LOSS),
            "rate": ({"after": "if loss.detach().item() < -1: decay()"}, BY_LOSS),
            "function": ({"after": "if reached(loss): break"}, BY_LOSS),
            "logs": ({"after": "if loss < 0.1: print(loss)"}, None),
            "an error": ({"then": "if torch.isnan(loss) or loss != loss: raise ValueError(loss)"}, None),
            "no loss": ({"then": "if loss is None or isinstance(loss, int) or not loss.requires_grad: continue"}, None),
            "other losses": ({"after": "found = evaluate()\n    if found < -1: break"}, None),
        },
    ),
)  # fmt: skip
def test_a_loop_that_goes_by_a_loss_keeps_its_split(described, parts, why):
    """The loss of fewer rows is another number, and in the middle of a step what has come of it would be lost."""
    split = split_of(described, parts, "def reached(found):\n    return found.item() < -1\n")
    assert split is why or why in split


def test_a_loss_that_a_function_takes_the_gradients_of_is_followed(described):
    loop = """
def train(rows):
    with accelerator.accumulate(model):
        loss = model(rows).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


for (rows,) in loader:
    if train(rows) < -1e6:
        break
"""
    assert BY_LOSS in described(PREPARED + loop)["script"]["own_split"]


def test_the_number_of_batches_is_followed_into_a_function_of_another_file(described, tmp_path):
    (tmp_path / "rates.py").write_text(
        "def decay(optimizer, number):\n    optimizer.param_groups[0]['lr'] = 1e-3 * 0.9 ** (number // 64)\n"
    )
    text = FOLLOWED.format(before="pass", then="pass", after="if place % 64 == 63: rates.decay(optimizer, place)")
    assert OTHERWISE in described(f"import rates\n{PREPARED}{text}")["script"]["own_split"]
