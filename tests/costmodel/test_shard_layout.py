"""What of each parameter lies in one rank, of weights that no number of ranks divides."""

import pytest
import torch
from torch import nn

from autofit.costmodel.tracing.shard_layout import Layout, local_bytes, local_shape


@pytest.mark.parametrize(("rows", "ranks", "share"), [(7, 5, 2), (8, 4, 2), (3, 8, 1), (1, 2, 1), (9, 1, 9)])
def test_every_share_is_as_large_as_the_first_rank_s(rows, ranks, share):
    """FSDP2 pads the others to it."""
    assert local_shape(torch.empty(rows, 3), Layout(shards=ranks)) == (share, 3)
    assert torch.chunk(torch.empty(rows, 3), ranks)[0].shape == (share, 3)


def test_weights_packed_in_integers_and_scalars_stay_whole():
    packed = nn.Parameter(torch.empty(8, 1, dtype=torch.uint8), requires_grad=False)
    assert local_shape(packed, Layout(shards=4)) == (8, 1)
    assert local_shape(torch.tensor(1.0), Layout(shards=4)) == ()


def test_what_lies_on_the_device_of_a_rank():
    model = nn.BatchNorm1d(6, dtype=torch.bfloat16)  # two parameters; buffers of 12, 12 and 8 bytes
    assert local_bytes(model, Layout(shards=4)) == [4, 4, 12, 12, 8]
    assert local_bytes(model, Layout(shards=4, upcast=True)) == [8, 8, 12, 12, 8], "float32 beside mixed precision"
    assert local_bytes(model, Layout(shards=4, on_host=True)) == [12, 12, 8], "shares wait on the host"
