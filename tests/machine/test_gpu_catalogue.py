"""Every card is a possible one, is found by the names people use, and nothing else is taken for it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autofit.machine import gpu_catalogue
from autofit.machine.gpu_catalogue import cards, find, matching
from autofit.system.errors import InputError
from autofit.system.units import GIB, MIB
from tests.support.cases import looped

ALL = cards()
BY_NAME = {card.name: card for card in ALL}
each_card = looped(card=BY_NAME)


@each_card
def test_memory_is_what_such_a_card_has(card):
    assert 3 * GIB <= card.nominal_bytes <= 288 * GIB
    if card.usable_bytes is not None:
        assert 0.9 <= card.usable_bytes / card.nominal_bytes < 1.0
        assert card.usable_bytes % MIB == 0
        assert "usable: " in card.source
    assert card.memory_bytes in {card.usable_bytes, card.nominal_bytes}


@each_card
def test_bandwidth_is_that_of_its_kind_of_memory(card):
    assert 90e9 <= card.bandwidth_bytes_per_second <= 8e12
    seconds = card.nominal_bytes / card.bandwidth_bytes_per_second
    assert 0.01 < seconds < 0.1, "no card reads its whole memory faster or slower than that"


@each_card
def test_rates_rise_as_precision_falls(card):
    known = [rate for rate in (card.fp32, card.tf32, card.fp16, card.fp8) if rate]
    assert known == sorted(known)
    assert known[0] > 1e12
    assert known[-1] < 1e16
    assert card.bf16 in {None, card.fp16}
    assert (card.tf32 or card.fp32) <= (card.fp16 or card.fp32)


@each_card
def test_flops_for_each_byte_are_those_of_a_gpu(card):
    assert 10 < card.rate("fp16") / card.bandwidth_bytes_per_second < 700


@each_card
def test_a_unit_is_there_from_its_generation_on(card):
    if card.capability is None:
        return
    assert (card.tf32 is not None) == (card.capability >= (8, 0))
    assert (card.bf16 is not None) == (card.capability >= (8, 0))
    assert (card.fp8 is not None) == (card.capability >= (8, 9))


@each_card
def test_precisions_are_those_that_a_probe_of_the_device_finds(card):
    own = card.precisions()
    assert own[0] == "fp32"
    assert ("bf16" in own) == (card.bf16 is not None)
    if card.fp16 is not None:
        assert "fp16" in own
    if card.capability is None or card.capability >= (8, 0):
        assert all(card.peak(precision) for precision in own)


@each_card
def test_a_rate_is_there_for_every_precision(card):
    for precision in ("fp32", "tf32", "fp16", "bf16", "fp8"):
        assert card.rate(precision) == (card.peak(precision) or card.fp32)


@each_card
def test_it_has_a_source(card):
    assert len(card.source) > 10


@each_card
def test_its_own_name_finds_it(card):
    assert find(card.name) == card
    assert find(card.name.upper()) == card


@each_card
def test_its_drivers_name_and_total_find_it(card):
    assert card.driver_names
    for name in card.driver_names:
        if (name, card.name) != ("NVIDIA RTX A2000", "RTX A2000 12 GB"):
            assert matching(name, card.memory_bytes) == card


def test_names_are_unique():
    keys = [gpu_catalogue._key(gpu_catalogue._tokens(card.name)) for card in ALL]
    assert len(set(keys)) == len(keys)


def test_names_with_a_driver_name_in_common_differ_in_size():
    for found in gpu_catalogue._by_driver_name().values():
        assert len({card.nominal_bytes for card in found}) == len(found)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("RTX 4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("geforce rtx 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("RTX 4090 24GB", "RTX 4090"),
        ("nvidia_rtx-4090", "RTX 4090"),
        ("4090 D", "RTX 4090 D"),
        ("3090ti", "RTX 3090 Ti"),
        ("RTX 3090 Ti", "RTX 3090 Ti"),
        ("3060", "RTX 3060 12 GB"),
        ("NVIDIA GeForce RTX 3060", "RTX 3060 12 GB"),
        ("3060 8gb", "RTX 3060 8 GB"),
        ("3080", "RTX 3080"),
        ("3080 12GB", "RTX 3080 12 GB"),
        ("4060ti 16gb", "RTX 4060 Ti 16 GB"),
        ("RTX 4060 Ti 8GB", "RTX 4060 Ti 8 GB"),
        ("4070 Ti Super", "RTX 4070 Ti SUPER"),
        ("2080ti", "RTX 2080 Ti"),
        ("GTX 1080 Ti", "GTX 1080 Ti"),
        ("1060 6GB", "GTX 1060 6 GB"),
        ("nvidia-h200", "H200 SXM 141 GB"),
        ("H200", "H200 SXM 141 GB"),
        ("h100", "H100 SXM 80 GB"),
        ("H100 80GB", "H100 SXM 80 GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM 80 GB"),
        ("h100 pcie", "H100 PCIe 80 GB"),
        ("H100 NVL", "H100 NVL 94 GB"),
        ("A100 80GB", "A100 SXM 80 GB"),
        ("a100-40gb", "A100 SXM 40 GB"),
        ("A100-SXM4-80GB", "A100 SXM 80 GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40 GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80 GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe 40 GB"),
        ("Tesla T4", "T4"),
        ("t4", "T4"),
        ("T4 16GB", "T4"),
        ("a10g", "A10G"),
        ("A10", "A10"),
        ("Nvidia A10 Tensor Core GPU", "A10"),
        ("L4", "L4"),
        ("L40S", "L40S"),
        ("NVIDIA L40S", "L40S"),
        ("V100 32GB", "V100 SXM2 32 GB"),
        ("Tesla V100-SXM2-16GB", "V100 SXM2 16 GB"),
        ("Tesla V100-PCIE-32GB", "V100 PCIe 32 GB"),
        ("p100", "P100 PCIe 16 GB"),
        ("A6000", "RTX A6000"),
        ("RTX A6000", "RTX A6000"),
        ("6000 Ada", "RTX 6000 Ada Generation"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada Generation"),
        ("Quadro RTX 6000", "Quadro RTX 6000"),
        ("RTX PRO 6000", "RTX PRO 6000 Blackwell Workstation"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell Server"),
        ("RTX PRO 6000 Max-Q", "RTX PRO 6000 Blackwell Max-Q"),
        ("5090", "RTX 5090"),
        ("NVIDIA GH200 480GB", "GH200 96 GB"),
        ("b200", "B200"),
        ("MI300X", "MI300X"),
        ("AMD Instinct MI300X", "MI300X"),
        ("titan rtx", "TITAN RTX"),
    ],
)
def test_a_person_finds_the_card_that_is_meant(name, wanted):
    assert find(name).name == wanted


@pytest.mark.parametrize(
    ("name", "variants"),
    [
        ("a100", ["A100 SXM 40 GB", "A100 PCIe 40 GB", "A100 SXM 80 GB", "A100 PCIe 80 GB"]),
        ("V100", ["V100 SXM2 16 GB", "V100 PCIe 32 GB"]),
        ("4060 Ti", ["RTX 4060 Ti 8 GB", "RTX 4060 Ti 16 GB"]),
        ("RTX 6000", ["Quadro RTX 6000", "RTX 6000 Ada Generation", "RTX PRO 6000 Blackwell Workstation"]),
        ("1060", ["GTX 1060 3 GB", "GTX 1060 6 GB"]),
    ],
)
def test_a_name_of_several_cards_is_asked_back(name, variants):
    with pytest.raises(InputError, match="several") as told:
        find(name)
    assert all(variant in told.value.hint for variant in variants)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("RTX 4080 Ti", "did you mean RTX 4080"),
        ("GTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", "laptop"),
        ("RTX 3080 Max-Q", "laptop"),
        ("RTX 3090 48GB", "did you mean RTX 3090"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.10gb", ""),
        ("", "write it"),
        ("gpu", "write it"),
        ("24GB", "memory"),
        ("x" * 10_000, "write it"),
    ],
)
def test_another_name_is_refused_with_a_hint(name, hint):
    with pytest.raises(InputError, match="no card") as told:
        find(name)
    assert hint in told.value.hint
    assert len(told.value.message) < 200


@given(st.text() | st.lists(st.sampled_from([*BY_NAME, " ", "GB", "16", "Ti", "rtx", "nvidia"])).map("".join))
@settings(max_examples=300, deadline=None)
def test_any_text_is_a_card_or_bad_input(name):
    try:
        found = find(name)
    except InputError:
        return
    assert found in ALL


@pytest.mark.parametrize(
    ("name", "total_mib", "wanted"),
    [
        ("NVIDIA GeForce RTX 4060 Ti", 7806, "RTX 4060 Ti 8 GB"),
        ("NVIDIA GeForce RTX 4060 Ti", 15940, "RTX 4060 Ti 16 GB"),
        ("GeForce RTX 2080 Ti", 11019, "RTX 2080 Ti"),
        ("NVIDIA H200", 143156, "H200 SXM 141 GB"),
        ("NVIDIA A40", 48688, "A40"),
        ("NVIDIA A100-SXM4-80GB", 81920, "A100 SXM 80 GB"),
        ("NVIDIA A100-SXM4-80GB", 40192, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.10gb", 9856, None),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", 7806, None),
        ("GRID A100D-80C", 81920, None),
        ("Intel(R) Xeon(R) Processor", 24064, None),
        ("AMD EPYC 9B14", 24576, None),
        ("", 0, None),
    ],
)
def test_a_device_is_matched_by_name_and_size(name, total_mib, wanted):
    found = matching(name, total_mib * MIB)
    assert (found and found.name) == wanted


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("RTX 3090", "bf16", 71.2),  # GA102 whitepaper, appendix A
        ("RTX 3090", "tf32", 35.6),
        ("RTX 4090", "fp16", 165.2),  # Ada whitepaper, appendix A
        ("RTX 4090", "fp8", 330.3),
        ("RTX 2080 Ti", "fp16", 53.8),  # Turing whitepaper, reference clocks
        ("TITAN RTX", "fp16", 130.5),
        ("RTX A6000", "bf16", 154.8),  # GA102 whitepaper, appendix C
        ("A40", "bf16", 149.7),  # A40 datasheet
        ("A40", "tf32", 74.8),
        ("L4", "bf16", 121),  # L4 datasheet, halved
        ("L40", "bf16", 181),
        ("T4", "fp16", 65),
        ("A100 80GB", "bf16", 312),
        ("H100", "bf16", 989.4),
        ("RTX 5090", "bf16", 209.5),
    ],
)
def test_peaks_are_those_of_the_papers(name, precision, tera):
    assert find(name).peak(precision) == pytest.approx(tera * 1e12, rel=5e-3)


@pytest.mark.parametrize(
    ("name", "rate"),
    [("T4", 15.75e9), ("P100-PCIE-16GB", 15.75e9), ("A100-80GB", 31.5e9), ("4090", 31.5e9), ("5090", 63e9)],
)
def test_the_bus_is_that_of_its_generation(name, rate):
    assert find(name).bus_bytes_per_second == rate
