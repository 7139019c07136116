"""What is remembered of an operator is what PyTorch's own mode says of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp import fully_shard  # noqa: F401 - it makes operators
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autofit.costmodel.tracing.emulation.fake_mode import FakeMode, resize_native, signature

CALLS: dict[str, Callable[[], Any]] = {
    "product": lambda: torch.empty(3, 4) @ torch.empty(5, 4).t(),
    "product of a transposed": lambda: torch.empty(5, 4).t().transpose(0, 1) @ torch.empty(4, 7),
    "views": lambda: torch.empty(6, 4)[2:4].unsqueeze(1).expand(2, 3, 4),
    "several": lambda: torch.empty(6, 4).split(2),
    "mixed dtypes": lambda: torch.empty(4, dtype=torch.bfloat16) + torch.empty(4),
    "lists": lambda: torch.cat([torch.empty(2, 3), torch.empty(4, 3)]),
    "a fused kernel": lambda: F.scaled_dot_product_attention(*(torch.empty(1, 2, 8, 16) for _ in range(3))),
    "a norm": lambda: torch.native_layer_norm(torch.empty(3, 8), [8], torch.empty(8), None, 1e-5),
    "channels last": lambda: F.conv2d(
        torch.empty(2, 3, 8, 8).contiguous(memory_format=torch.channels_last), torch.empty(4, 3, 3, 3)
    ),
    "in place": lambda: torch.empty(4).add_(1),
    "nothing": lambda: torch.empty(0, 4).sum(0),
}


def told(result: Any) -> list[Any]:
    return [
        (one.shape, one.stride(), one.storage_offset(), one.dtype, one.device, one.untyped_storage().nbytes())
        if isinstance(one, torch.Tensor)
        else one
        for one in tree_leaves(result)
    ]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", CALLS)
def test_it_answers_as_pytorch_does(name: str) -> None:
    with FakeTensorMode():
        expected = told(CALLS[name]())
    with FakeMode():
        assert [told(CALLS[name]()) for _ in range(3)] == [expected] * 3


def test_a_view_shares_the_storage_of_the_tensor_that_was_given() -> None:
    with FakeMode():
        for _ in range(2):
            given = torch.empty(6, 4)
            seen = given[2:].t()
            assert seen.untyped_storage()._cdata == given.untyped_storage()._cdata


def test_nobody_asks_a_tensor_for_its_device_by_way_of_a_mode() -> None:
    asked = []

    class Asked(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(func)
            return func(*args, **(kwargs or {}))

    for mode, asks in ((FakeTensorMode(), True), (FakeMode(), False)):
        asked.clear()
        with mode, Asked():
            F.linear(torch.empty(3, 4), torch.empty(5, 4)).sum()
        assert (torch.ops.prim.device.default in asked) is asks


def test_a_native_storage_is_emptied_and_filled_again() -> None:
    with FakeMode():
        given = torch.empty(4, 6) * 3
        storage, twice = given.untyped_storage(), given * 2
        for size in (0, 96, 0, 96):
            resize_native(storage, size) if storage.device.type != "meta" else storage.resize_(size)
            assert storage.nbytes() == given.untyped_storage().nbytes() == size
        assert told(given * 2) == told(twice)
        assert told(given.view(24).cumsum(0)) == told(twice.view(24).cumsum(0))


def test_what_pytorch_makes_of_a_native_tensor_lies_in_its_storage() -> None:
    with FakeMode():
        given, other = torch.empty(4, 2), torch.empty(2, 4)
        storage = given.untyped_storage()
        seen = torch.view_as_complex(given)  # whose signature tells nothing
        assert (seen.shape, seen.dtype) == ((4,), torch.complex64)
        assert seen.untyped_storage()._cdata == storage._cdata
        assert torch.add(given, given, out=given) is given
        assert torch.ops.aten.t_.default(given) is given
        assert given.shape == given.add(other).shape == (2, 4)
        assert given.untyped_storage()._cdata == storage._cdata
        assert storage.device == given.device == torch.device("cpu")


def test_operators_are_told_apart_by_all_that_matters() -> None:
    add, view = torch.ops.aten.add.Tensor, torch.ops.aten.view.default
    with FakeMode():
        one, other = torch.empty(4, 6), torch.empty(6, 4).t()
        assert isinstance(one, FakeTensor)
        assert signature(add, (one, 1), {}) != signature(add, (one, 1.0), {})
        assert signature(add, (one, one), {}) != signature(add, (one, other), {})
        assert signature(view, (one, [24]), {}) != signature(view, (one, (24,)), {})
        assert signature(add, (one, one), {"alpha": 2}) != signature(add, (one, one), {})
        assert signature(add, (one, torch.empty(4, 6, dtype=torch.complex64)), {}) is None
    assert signature(add, (torch.ones(2), 1), {}) is None


def test_what_is_made_again_has_all_that_pytorch_gives_it() -> None:
    before = torch.is_warn_always_enabled()
    with FakeMode() as mode:
        made = [torch.empty(4, 6) * 3 for _ in range(2)]  # by PyTorch, then anew
        assert all(vars(one) == vars(made[0]) for one in made)
        assert all(one.fake_mode is mode for one in made)
    torch.set_warn_always(True)  # another test may have heard it before
    try:
        with pytest.raises((RuntimeError, ValueError)) if not mode._allow_unsafe_data_ptr_access else pytest.warns():
            made[1].data_ptr()
    finally:
        torch.set_warn_always(before)


def test_what_is_known_is_made_without_the_dispatcher() -> None:
    multiply = torch.ops.aten.mul.Tensor
    with FakeMode() as mode:
        given = torch.empty(5, 3)
        first, unknown = mode.run(multiply, (given, 7), {})
        second, known = mode.run(multiply, (given, 7), {})
    assert unknown is None
    assert known == signature(multiply, (given, 7), {})
    assert told(first) == told(second)


def test_pytorch_s_own_memory_of_operators_is_not_asked() -> None:
    before = FakeTensorMode.cache_info()
    with FakeMode():
        torch.empty(3, 5, 7).sum(1)
    assert FakeTensorMode.cache_info() == before


def test_what_an_operator_gives_back_is_the_tensor_that_it_was_given() -> None:
    gather = torch.ops.fsdp.all_gather_copy_in.default
    for _ in range(2):  # by PyTorch, then anew
        with FakeMode():
            share, whole = torch.empty(6), torch.empty(24)
            mine, all_of_it = gather([share], whole, [6], 6, 2)
            assert all_of_it is whole
            assert mine.untyped_storage()._cdata == whole.untyped_storage()._cdata
            assert (mine.shape, mine.storage_offset()) == ((6,), 12)
