"""The emulated cards are those of the catalogue, and wrong input to the launcher is told in words."""

import subprocess
import sys

import pytest

from autofit.machine.gpu_catalogue import cards
from autofit.system.errors import InputError
from tests.hollow.build import WANTED
from tests.hollow.cards import describe


def test_every_card_that_cuda_13_runs_on_is_described():
    capable = [card for card in cards() if card.capability and card.capability >= (7, 0)]
    assert capable
    for card in capable:
        described = describe(card.name).split(":", 10)
        assert len(described) == 11
        assert int(described[0]) == card.memory_bytes
        assert described[1] == f"{card.capability[0]}.{card.capability[1]}"
        assert int(described[2]) == card.sms
        assert int(described[9]) == card.l2_bytes


def test_a_card_without_cuda_is_refused():
    with pytest.raises(InputError, match="can be emulated"):
        describe("GTX 1080")


def test_functions_have_an_owner():
    for name in ("cuMemAlloc_v2", "cudaMalloc", "__cudaRegisterFatBinary", "cublasLtMatmul", "ncclAllReduce"):
        assert WANTED.match(name)
    assert not WANTED.match("malloc")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no COMMAND"),
        (["--gpus", "0", "--", "true"], "invalid choice"),
        (["--dir", "/nowhere", "--", "true"], "python -m tests.hollow.setup /nowhere"),
    ],
)
def test_wrong_use_is_told(words, said):
    done = subprocess.run([sys.executable, "-m", "tests.hollow", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_card_may_be_given_another_size():
    described, other = describe("RTX 4090"), describe("RTX 4090", 2**33)
    assert other.split(":")[0] == str(2**33)
    assert other.split(":")[1:] == described.split(":")[1:]
