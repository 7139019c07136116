"""What is kept from trial to trial: made once, read afterwards, and never needed."""

import errno

import pytest
import torch

from autofit.system import files, tensor_cache
from autofit.system.tensor_cache import TensorCache


class Maker:
    """Makes tensors, and counts how often."""

    def __init__(self):
        self.times = 0

    def __call__(self):
        self.times += 1
        return {"packed": torch.arange(12, dtype=torch.uint8).reshape(3, 4), "scale": torch.tensor(0.25)}


def same(found):
    return torch.equal(found["packed"], Maker()()["packed"]) and found["scale"] == 0.25 and found["scale"].shape == ()


def test_what_was_made_once_is_read_afterwards(tmp_path):
    make = Maker()
    assert all(same(TensorCache(tmp_path / "kept").tensors("one", make)) for _ in range(3))
    assert make.times == 1
    assert same(TensorCache(tmp_path / "kept").tensors("another", make))
    assert make.times == 2
    assert sorted(file.name for file in (tmp_path / "kept").iterdir()) == ["another.safetensors", "one.safetensors"]


def test_nothing_is_kept_where_nobody_says_where():
    make = Maker()
    store = TensorCache()
    assert same(store.tensors("one", make))
    assert same(store.tensors("one", make))
    assert make.times == 2
    store.forget()


@pytest.mark.parametrize("damage", [b"", b"torn", b"\xff" * 64, None])
def test_what_can_not_be_read_is_made_anew(tmp_path, damage):
    make = Maker()
    store = TensorCache(tmp_path)
    store.tensors("one", make)
    file = tmp_path / "one.safetensors"
    file.write_bytes(file.read_bytes()[:-3] if damage is None else damage)
    assert same(store.tensors("one", make))
    assert make.times == 2
    assert same(store.tensors("one", make))
    assert make.times == 2


def test_a_place_that_can_not_be_written_costs_time_alone(tmp_path):
    (tmp_path / "file").write_text("no folder")
    make = Maker()
    store = TensorCache(tmp_path / "file" / "kept")
    assert same(store.tensors("one", make))
    assert same(store.tensors("one", make))
    assert make.times == 2


def test_a_full_disk_is_left_as_it_is(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)  # the file is there by then
    make = Maker()
    assert same(TensorCache(tmp_path).tensors("one", make))
    assert list(tmp_path.iterdir()) == []


def test_the_last_gibibyte_of_a_disk_is_not_for_this(tmp_path, monkeypatch):
    usage = type(tensor_cache.shutil.disk_usage(tmp_path))
    monkeypatch.setattr(tensor_cache.shutil, "disk_usage", lambda _: usage(2**40, 2**40 - 2**30, 2**30))
    assert same(TensorCache(tmp_path).tensors("one", Maker()))
    assert list(tmp_path.iterdir()) == []


def test_it_is_gone_when_the_tune_ends_and_when_the_next_begins(tmp_path):
    folder = tmp_path / "trials" / "kept"
    with TensorCache(folder) as store:
        store.tensors("one", Maker())
        assert len(list(folder.iterdir())) == 1
    assert not folder.exists()
    TensorCache(folder).tensors("one", Maker())  # as a tune that is killed leaves it
    with TensorCache(folder):
        assert not folder.exists()
