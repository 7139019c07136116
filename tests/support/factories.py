"""Factories of plain torch modules: one as it should be, and each way in which one can be wrong."""

import torch
from torch import nn


class Net(nn.Module):
    """Convolutions and a head, with no config."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.GELU(), nn.Conv2d(32, 64, 3, stride=2), nn.GELU())
        self.head = nn.Linear(64, 10)

    def forward(self, images):
        return self.head(self.conv(images).mean((2, 3)))


def batch(rows):
    return {"images": torch.randn(rows, 3, 16, 16), "classes": torch.randint(0, 10, (rows,))}


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["images"]), batch["classes"])


def make():
    return Net(), batch, loss


def of_rows():
    rows = [(torch.randn(3, 16, 16), row % 10) for row in range(40)]
    return Net(), rows, lambda model, rows: nn.functional.cross_entropy(model(rows[0]), rows[1])


def with_norms():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    )
    return model, batch, loss


def looks_at_values():
    def masked(model, batch):
        return loss(model, batch) * (1.0 if batch["images"].sum().item() else 0.0)

    return Net(), batch, masked


def unused():
    weight = nn.Parameter(torch.ones(10))
    return Net(), batch, lambda _, batch: weight.sum() * batch["images"].mean()


def fails():
    return 1 / 0


def two():
    return Net(), batch


def no_model():
    return "resnet", batch, loss


def no_number():
    return Net(), batch, lambda model, batch: model(batch["images"])


def no_gradient():
    return Net(), batch, lambda *_: torch.zeros(())


def loss_fails():
    return Net(), batch, lambda model, batch: model(batch["pictures"])


def other_rows():
    return Net(), lambda _: batch(3), loss


def no_batch():
    return Net(), lambda _: None, loss


def no_rows():
    return Net(), [], loss


def no_weights():
    return nn.ReLU(), batch, lambda _, batch: (batch["images"] * torch.ones((), requires_grad=True)).mean()


nothing = None
