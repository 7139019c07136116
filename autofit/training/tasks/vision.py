"""Images: their classes, a class for each pixel, and the objects that are on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autofit.training.tasks.inputs import image_length, image_shape
from autofit.training.tasks.kind import Kind, Spec
from autofit.training.tasks.text import classes

if TYPE_CHECKING:
    import torch

OBJECTS = 10
"""On each image; COCO has 7 on average (arXiv 1405.0312)."""


def _of_each_pixel(spec: Spec, rows: int, generator: torch.Generator) -> torch.Tensor:
    import torch

    _, height, width = image_shape(spec)
    return torch.randint(0, int(spec.config.num_labels), (rows, height, width), generator=generator)


def _objects(spec: Spec, rows: int, generator: torch.Generator) -> list[dict[str, torch.Tensor]]:
    """Of each image the classes of its objects, and their boxes: centre, width and height, as shares of the image."""
    import torch

    made = []
    for _ in range(rows):
        sizes = 0.1 + 0.3 * torch.rand((OBJECTS, 2), generator=generator)
        centres = sizes / 2 + (1 - sizes) * torch.rand((OBJECTS, 2), generator=generator)
        classes_ = torch.randint(0, int(spec.config.num_labels), (OBJECTS,), generator=generator)
        made.append({"class_labels": classes_, "boxes": torch.cat([centres, sizes], 1)})
    return made


KINDS = (
    Kind(
        name="image-classification",
        new_head=True,
        auto="AutoModelForImageClassification",
        trained_on="classes of images",
        makers={"labels": classes},
        sample="image",
        length=image_length,
        tokens=0,
    ),
    Kind(
        name="semantic-segmentation",
        new_head=True,
        auto="AutoModelForSemanticSegmentation",
        trained_on="a class for each pixel",
        makers={"labels": _of_each_pixel},
        sample="image",
        length=image_length,
        tokens=0,
    ),
    Kind(
        name="object-detection",
        new_head=True,
        auto="AutoModelForObjectDetection",
        trained_on=f"{OBJECTS} objects on each image",
        packages={"scipy": "scipy", "PIL": "pillow"},  # which match what is found with what is there
        untraced="its loss compares every box of a micro-batch with every other: it grows with the square of the rows",
        makers={"labels": _objects},
        sample="image",
        length=image_length,
        tokens=0,
    ),
)
