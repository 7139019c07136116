"""Offloading changes where tensors wait, and not what is computed."""

import pytest
import torch

from autofit.registry import technique

pytestmark = pytest.mark.values


def strategies():
    import importlib

    technique("offload")  # the door loads the package
    return importlib.import_module("autofit.strategies.offload")


def network(device):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512), torch.nn.GELU()
    ).to(device)


def test_activations_on_the_host_give_the_same_gradients():
    model, twin = network("cuda"), network("cuda")
    keeper = strategies().HostActivations()
    x = torch.randn(4096, 512, device="cuda")
    with keeper.hooks(model):
        loss = model(x).square().mean()
    loss.backward()
    twin(x).square().mean().backward()
    assert keeper.moved_bytes > 4096 * 512 * 4
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_state_on_the_host_steps_the_same():
    model, twin = network("cuda"), network("cuda")
    ours = strategies().keep_state_on_host(
        torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), chunk_bytes=1 << 20
    )
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-3, fused=True)
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(64, 512, device="cuda")
        for net, optimizer in ((model, ours), (twin, theirs)):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)
    states = [v for s in ours.state.values() for v in s.values() if v.numel() > 1]
    assert {v.device.type for v in states} == {"cpu"}
    assert all(v.is_pinned() for v in states)
