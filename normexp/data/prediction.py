"""What a saved network needs to know of its data set, and classes for images of anybody's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from normexp.data.dataset import Data, Examples
from normexp.errors import UserError

KEPT = ("name", "task", "num_outputs", "input_shape", "mean", "std", "vocab_size", "class_names")


def describe_data(data: Data) -> dict[str, Any]:
    """Shapes, classes and moments of a data set, for `without_samples`."""
    return {"num_train": len(data.train), **{name: getattr(data, name) for name in KEPT}}


def without_samples(description: Mapping[str, Any]) -> Data:
    """The data set of `describe_data`, for networks that are only built and loaded."""
    known = {k: tuple(v) if isinstance(v, list) else v for k, v in description.items()}
    targets = torch.zeros(known.pop("num_train"), dtype=torch.bool)
    splits = dict.fromkeys(("train", "val", "test"), Examples(targets, targets))
    return Data(**known, **splits, bytes_per_token={})


@dataclass
class Prediction:
    """Callable with images, bytes or floats 0 to 1; returns the name of the class of each.

    Shapes: (N, C, H, W), or (C, H, W) for a single image. Raises UserError for other images.
    """

    network: nn.Module
    data: Data

    @torch.no_grad()
    def __call__(self, images: Any) -> list[str]:
        raw, shape = torch.as_tensor(images), self.data.input_shape
        raw = raw.unsqueeze(0) if raw.ndim == len(shape) else raw
        most = 1 if raw.is_floating_point() else 255
        if tuple(raw.shape[1:]) != shape or not bool(((raw >= 0) & (raw <= most)).all()):
            raise UserError(
                f"images are {tuple(raw.shape)} with values {raw.min():g} to {raw.max():g}; must "
                f"be (N, {str(shape)[1:]}, whole numbers 0 to 255 or floats 0 to 1"
            )
        first = next(self.network.parameters())
        inputs = self.data.model_inputs(raw * (255 / most), first.dtype).to(first.device)
        was_training = self.network.training
        self.network.eval()
        classes = [i for part in inputs.split(256) for i in self.network(part).argmax(1).tolist()]
        self.network.train(was_training)
        return [str((self.data.class_names or range(self.data.num_outputs))[i]) for i in classes]


def attach_prediction(network: nn.Module, data: Data) -> None:
    """Adds `network.predict(images)`, unless the network has a `predict` of its own."""
    if data.mean is not None and not hasattr(network, "predict"):
        object.__setattr__(network, "predict", Prediction(network, data))
