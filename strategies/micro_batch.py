"""Micro-batch: the rows that go through the model at once (``per_device_train_batch_size``).

Saves: activations, logits and temporaries grow in proportion to it; weights, gradients and optimizer state do
not. Costs: below some size the device is not kept busy, and above it nothing is gained; where that is differs by
model and device, which is why it is measured. Source: mosaicml/composer #1632, where a larger one is not always faster.

Choices are the divisors of a process's share of the global batch, so that equal micro-batches make up exactly
that: any integer that divides it, not only powers of two.

A Trainer evaluates 8 rows at once unless told otherwise, which may be more than it trains on. So
``per_device_eval_batch_size`` is written too: the micro-batch, or as many of its rows as make no more than 512 MiB of
logits in float32. Trials and traces of a Trainer evaluate one such batch. Of the winner more are written, as many as
its trace says stay below the training's own peak, once a run of it has evaluated them. ``prediction_loss_only`` is
not written. Without ``compute_metrics`` a Trainer drops the logits of each batch anyway; with it, ``True`` would
leave the metrics out without a word (``Trainer.evaluate`` and ``evaluation_loop``). With ``compute_metrics`` the
logits of all rows stay on the device until the end, or for ``eval_accumulation_steps`` batches: that is not measured.

A script evaluates as many rows at once as it says, its longest, beside the winner, which holds for that what
``compute_metrics`` would read of all rows; fewer are written only where they break the ceiling.

Not covered: a last, smaller micro-batch. Rows of different lengths fit by the longest, and are timed as
they are to be expected where a script or ``--lengths`` tells them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from autofit.contract.emission import Emission
from autofit.contract.layout import data_parallel_sizes
from autofit.contract.technique import Choice, Held, Kind, Part, Prior, Technique, divisors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from autofit.contract.facts import Facts
    from autofit.contract.observation import Ran, Seen
    from autofit.contract.plan import Value
    from autofit.contract.recipe import Recipe
    from autofit.contract.script import Script


_EVALUATED_LOGITS_BYTES = 512 * 2**20
_OTHER_ROWS = (
    "auto_find_batch_size", "split_batches", "accelerator_config.split_batches", "dataloader_config.split_batches",
)  # fmt: skip
"""Arguments of a Trainer and of an ``Accelerator`` by which a process trains on fewer rows at once."""


def evaluated_rows(rows: int, facts: Facts) -> int:
    """Rows that are evaluated at once where no more are known to fit: no more than the micro-batch, nor many logits."""
    logits_bytes = 4 * facts.workload.seq_len * facts.model.vocab_size
    return max(1, min(rows, _EVALUATED_LOGITS_BYTES // logits_bytes))


def _made(rows: int, share: int) -> str:
    return f"{share // rows} x {rows} rows make the {share} of a process"


def _at_once(rows: int) -> str:
    """Where the rows of a process depend on what else the plan has."""
    return f"{rows} row{'s' * (rows > 1)} at once"


class MicroBatch(Technique):
    """Rows that go through the model at once."""

    name = "micro_batch"
    baseline = 1

    def choices(self, facts: Facts) -> tuple[Choice, ...]:
        shares = [facts.workload.global_batch // ranks for ranks in data_parallel_sizes(facts)]
        found = {rows: share for share in shares for rows in divisors(share)}  # of the largest share last
        why, script = facts.depends_on_rows, facts.workload.script
        own = {rows: share if script is None else script.micro_batch for rows, share in found.items()}
        return tuple(
            Choice(rows, Kind.EXACT, "offered", _made(rows, share) if len(shares) == 1 else _at_once(rows))
            if why is None or rows == own[rows]
            else Choice(rows, Kind.METHOD, "offered", f"another training than {own[rows]} rows at once: {why}")
            for rows, share in sorted(found.items())
        )

    def baseline_for(self, facts: Facts) -> Value:
        """Where the loss of a row depends on the others fewer are another training.

        Then it is all rows of a process at once, or as many as the script takes itself.
        """
        if facts.depends_on_rows is None:
            return self.baseline
        script = facts.workload.script
        return max(int(one.value) for one in self.choices(facts)) if script is None else script.micro_batch

    def leanest(self, facts: Facts) -> Value:
        return self.baseline_for(facts)

    def changes(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> str | None:
        if facts.depends_on_rows is None or self.choice(value, facts).kind != Kind.METHOD:
            return _beside_own_split(int(value), facts)
        return f"{value} rows at once are another training than the whole batch: {facts.depends_on_rows}"

    def suggest(self, value: Value, facts: Facts) -> str:
        work = facts.workload
        rows = int(value)
        if rows < 1:
            return "a micro-batch has at least one row"
        step = rows * work.processes
        below, above = work.global_batch // step * step, math.ceil(work.global_batch / step) * step
        met = " or ".join(str(batch) for batch in dict.fromkeys((below, above)) if batch)
        known = ", ".join(str(choice.value) for choice in self.choices(facts))
        return (
            f"{rows} rows on {work.processes} process(es) can't make a global batch of {work.global_batch}; "
            f"they can make {met}, and {work.global_batch} can be made of {known or 'none'}"
        )

    def apply(self, value: Value, recipe: Recipe) -> None:
        recipe.micro_batch = int(value)

    def held(self, facts: Facts) -> Held | None:
        script = facts.workload.script
        if script is not None and script.own_split is not None:
            return Held(script.micro_batch, script.own_split, firm=True)
        if script is None or script.depends_on_rows is None:
            return None
        return Held(script.micro_batch, f"{script.depends_on_rows}, so another micro-batch is another training")

    def own(self, facts: Facts) -> Value:
        script = facts.workload.script
        return self.baseline_for(facts) if script is None else script.micro_batch

    def emit(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> Emission:
        rows = int(value)
        arguments = {"per_device_train_batch_size": rows}
        script, told = facts.workload.script, facts.workload.evaluated_rows
        if script is None:
            arguments["per_device_eval_batch_size"] = told or evaluated_rows(rows, facts)
        elif 0 < told < script.evaluated_rows:  # else what it evaluates at once is its own
            arguments["per_device_eval_batch_size"] = told
        return Emission(training_args=arguments, decides=_OTHER_ROWS)

    def traced_as(self, value: Value, part: Part) -> Value | None:
        """Two rows stand for any number above one; one alone is contiguous however it is turned, and copied less."""
        return min(int(value), 2) if part != "optimizer" else self.baseline

    def observe(self, ran: Ran) -> Seen:
        joined = ran.recipe.joined_rows
        return {"rows": ran.rows} | ({} if joined is None else {"joined": joined})

    def in_effect(self, value: Value, seen: Seen, facts: Facts) -> str | None:
        wanted = seen.get("joined", value)
        if seen.get("rows") != wanted:
            return f"{seen.get('rows')} rows went through the model at once, not {wanted}"
        return None

    def prior(self, value: Value, facts: Facts) -> Prior:
        """Step time is close to ``t0 + t1 x rows``: per sample it falls towards ``t1`` as the rows grow.

        How fast depends on how many tokens fill the device; a few thousand do on a data-centre GPU, a few
        hundred on a CPU. Memory is linear in the rows with an unknown share that does not depend on them.
        """
        rows = int(value)
        fill_tokens = 1024 if facts.hardware.device == "cuda" else 64
        per_sample = math.log(
            (1 + fill_tokens / (rows * facts.workload.seq_len)) / (1 + fill_tokens / facts.workload.seq_len)
        )
        return Prior(
            time=(per_sample, 0.1 + 0.1 * abs(per_sample)),
            memory=(0.5 * math.log(rows), 0.1 + 0.25 * math.log(rows)),
        )


def _beside_own_split(rows: int, facts: Facts) -> str | None:
    """What another micro-batch than a script's own changes in its training.

    An epoch may leave out other rows. Where nobody divides the loss by the number of its terms, rows of different
    lengths weigh otherwise, and so do those of an epoch's last step where these are fewer.
    """
    script = facts.workload.script
    if script is None or script.rows == 0 or rows == script.micro_batch:
        return None
    ends = _epochs_end(rows, script, facts.workload.processes)
    if ends is not None or (script.trainer and not (script.undivided or script.averages)):
        return ends
    said = []
    untold = script.rows is None and script.factory is None  # a factory's batches have no end
    of_tokens = any(name.endswith("labels") and len(shape) > 1 for name, shape in script.batch.items())
    if script.weighs:
        said.append(
            f"Rows weigh otherwise than in the script's own micro-batches of {script.micro_batch}: its loss is a mean "
            "that counts one row for more than another, as where it divides by the tokens of each."
        )
    elif of_tokens and (untold or script.mean_length < script.longest):
        said.append(
            f"Rows of different lengths weigh otherwise than in the script's own micro-batches of {script.micro_batch} "
            "where its loss is a mean over the tokens of each."
        )
    if untold:
        said.append(
            "The data set tells no number of rows: where an epoch's last optimizer step takes fewer than others, it "
            f"weighs them otherwise than the script's own micro-batches of {script.micro_batch} do."
        )
    elif over := _over(rows, script, facts):
        said.append(
            f"An epoch's last optimizer step, of {over} rows, weighs them otherwise than the script's own "
            f"micro-batches of {script.micro_batch} do."
        )
    return " ".join(said) or None


_DROPS = "dataloader_drop_last"


def _over(rows: int, script: Script, facts: Facts) -> int:
    """Rows of an epoch's last optimizer step, where these are no whole one."""
    count = script.rows or 0
    dropped = count % (rows * facts.workload.processes) if script.own.get(_DROPS) else 0
    return (count - dropped) % facts.workload.global_batch


def _epochs_end(rows: int, script: Script, processes: int) -> str | None:
    """Which rows an epoch leaves out, or takes again, that it does not under a script's own micro-batch."""
    if script.rows is None:
        return None
    count, together, own = script.rows, rows * processes, script.micro_batch * processes
    if script.own.get(_DROPS):
        if count % together == count % own:
            return None
        return (
            f"An epoch leaves out {count % together} rows that make no whole micro-batch, and {count % own} by "
            "the script's own: its steps, and what the script plans by their number, may be others."
        )
    if processes == 1 or -count % together == -count % own:
        return None
    return (
        f"An epoch's last optimizer step takes {-count % together} of its first rows again, so that each process has "
        f"as many, and {-count % own} by the script's own."
    )
