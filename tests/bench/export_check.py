"""Exported plans through Axolotl's, LLaMA-Factory's and TRL's own schemas.

Run by hand, with the Python of an environment that has the project (and autofit)::

    PYTHONPATH=. PYTHON tests/bench/export_check.py axolotl|llamafactory|sft

prints a line a plan, and ends with 1 where one is refused.
"""

from __future__ import annotations

import dataclasses
import sys
import traceback

import yaml

from autofit.output.exports.export import export
from tests.output.test_export import PLANS, answer


def axolotl(found):
    from axolotl.integrations.liger.args import LigerArgs
    from axolotl.utils.schemas.config import AxolotlInputConfig

    given = yaml.safe_load(found.text)
    known = {*AxolotlInputConfig.model_fields, *LigerArgs.model_fields, "plugins"}
    unknown = sorted(set(given) - known)
    assert not unknown, f"unknown: {unknown}"
    AxolotlInputConfig(**given)


def llamafactory(found):
    from llamafactory.hparams.data_args import DataArguments
    from llamafactory.hparams.finetuning_args import FinetuningArguments
    from llamafactory.hparams.generating_args import GeneratingArguments
    from llamafactory.hparams.model_args import ModelArguments
    from llamafactory.hparams.training_args import TrainingArguments
    from transformers import HfArgumentParser

    given = {**yaml.safe_load(found.text), "bf16": False, "tf32": False, "use_cpu": True, "pure_bf16": False}
    given.pop("deepspeed", None)  # whose package it asks for at once
    kinds = (ModelArguments, DataArguments, TrainingArguments, FinetuningArguments, GeneratingArguments)
    HfArgumentParser(kinds).parse_dict(given, allow_extra_keys=False)


def sft(found):
    from trl import SFTConfig

    given = {**found.settings, "bf16": False, "tf32": False, "use_cpu": True}
    args = SFTConfig(**given)
    for name, value in given.items():
        came = getattr(args, name)
        assert getattr(came, "value", came) == value or dataclasses.is_dataclass(came), (name, came, value)


def main(target):
    refused = 0
    for name in PLANS:
        try:
            found = export(answer(name), target, folder="out")
            {"axolotl": axolotl, "llamafactory": llamafactory, "sft": sft}[target](found)
        except Exception:  # noqa: BLE001 - whatever the project raises is what is to be seen
            refused += 1
            print(f"{name}: refused\n{traceback.format_exc(limit=-2)}")
        else:
            print(f"{name}: taken; {len(found.lacking)} lines on what it can't carry")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
