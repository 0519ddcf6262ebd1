"""From images, as bytes or floats, to the names of their classes, with a trained network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normexp.data.dataset import Data
from normexp.errors import UserError

MOST_AT_ONCE = 256  # images in a forward pass


@dataclass(frozen=True)
class Preprocessing:
    """What a network was trained with, kept beside its weights.

    Attributes:
        input_shape: (C, H, W) of an image.
        mean, std: per channel, in 0..1 units.
        class_names: of the outputs, in order.
    """

    input_shape: Sequence[int]
    mean: Sequence[float]
    std: Sequence[float]
    class_names: Sequence[str]

    @classmethod
    def of(cls, data: Data) -> Preprocessing | None:
        """That of a data set of images; None for texts."""
        if data.mean is None or data.std is None:
            return None
        names = data.class_names or tuple(map(str, range(data.num_outputs)))
        return cls(data.input_shape, data.mean, data.std, names)

    def inputs(self, images: Any) -> Tensor:
        """Images as the network takes them, float32 (N, C, H, W).

        Args:
            images: (N, C, H, W), or one image (C, H, W): whole numbers 0 to 255, or floats 0 to 1.

        Raises:
            UserError: another shape, or values outside of their range.
        """
        raw = torch.as_tensor(images)
        raw = raw.unsqueeze(0) if raw.ndim == len(self.input_shape) else raw
        most = 1 if raw.is_floating_point() else 255
        in_range = not raw.numel() or (raw.min() >= 0 and raw.max() <= most)
        if list(raw.shape[1:]) != list(self.input_shape) or not in_range:
            raise UserError(
                f"images are {tuple(raw.shape)}: must be (N, C, H, W) with C, H, W = "
                f"{', '.join(map(str, self.input_shape))}, of whole numbers 0 to 255 or floats 0 "
                "to 1, as they are before they are normalised"
            )
        mean, std = (torch.tensor(value).view(-1, 1, 1) for value in (self.mean, self.std))
        return (raw.float() / most - mean) / std


@dataclass
class Prediction:
    """Callable with images, see `Preprocessing.inputs`; returns the name of the class of each."""

    network: nn.Module
    preprocessing: Preprocessing

    @torch.no_grad()
    def __call__(self, images: Any) -> list[str]:
        parts = self.preprocessing.inputs(images).split(MOST_AT_ONCE)
        weight = next(self.network.parameters())
        was_training = self.network.training
        self.network.eval()
        classes = [i for part in parts for i in self.network(part.to(weight)).argmax(1).tolist()]
        self.network.train(was_training)
        return [self.preprocessing.class_names[index] for index in classes]


def attach_prediction(network: nn.Module, preprocessing: Preprocessing) -> None:
    """Adds `network.predict(images)`, unless the network has a `predict` of its own."""
    if not hasattr(network, "predict"):
        object.__setattr__(network, "predict", Prediction(network, preprocessing))
