"""What a model minimises, and the metrics of a task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from normexp.errors import UserError
from normexp.norms.base import wide_dtype
from normexp.training.batching.replicas import Batch, Measurements
from normexp.training.data.augment import IGNORED
from normexp.training.data.dataset import Data, Examples
from normexp.training.data.views import crop_centre
from normexp.words import name_some


@dataclass(eq=False)
class OfClasses:
    """The loss of targets that have a class each: a mean in which a target weighs as its class.

    Args:
        class_weights: float64 (num_classes,), on the device of the targets; None: all are 1.
    """

    class_weights: Tensor | None = field(default=None, kw_only=True)

    def total_weight(self, targets: Tensor) -> Tensor:
        """Returns the sum of the weights of targets (S, ...) of each replica, float64 (S,)."""
        assert self.class_weights is not None
        num_ignored = max(0, IGNORED + 1 - len(self.class_weights))  # values of masks, weight 0
        weights = functional.pad(self.class_weights, (0, num_ignored))
        return weights[targets.long()].flatten(1).sum(dim=1)


class Classification(OfClasses):
    """Cross-entropy in nats, and accuracy as the share of samples classified correctly.

    Attributes:
        metrics: names of what `summarise` returns.
    """

    metrics = ("loss", "accuracy")

    def num_targets(self, targets: Tensor) -> int | Tensor:
        """Returns how much `targets` (S, N, ...) count, of each replica: one number, or (S,)."""
        return targets[0].numel() if self.class_weights is None else self.total_weight(targets)

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        """Returns the loss summed over the batch's targets that count."""
        # output (N, num_classes), targets (N,)
        return cross_entropy(output, batch["targets"], self.class_weights, reduction="sum")

    def measure(self, output: Tensor, batch: Batch) -> Measurements:
        """Returns `loss`, and `per_sample`, what `scores` and `summarise` need of each sample."""
        return {
            "loss": self.loss(output, batch),
            "per_sample": output.argmax(dim=-1) == batch["targets"],
        }

    def scores(self, per_sample: Tensor) -> Tensor:
        """Returns what samples.npz keeps (S, N): here, whether each sample is right."""
        return per_sample

    def summarise(self, split: str, loss: Tensor, per_sample: Tensor) -> Measurements:
        """Returns metrics (S,) from the mean loss over targets (S,) and `per_sample` (S, N)."""
        del split
        # argmax of NaN is class 0
        accuracy = torch.where(loss.isfinite(), per_sample.double().mean(dim=1), torch.nan)
        return {"loss": loss, "accuracy": accuracy}

    def at_sizes(self, loss: Tensor, per_sample: Tensor) -> Measurements:
        """Returns metrics beyond those of `summarise`, where images are shown at other sizes."""
        del loss, per_sample
        return {}


@dataclass(eq=False)
class Segmentation(OfClasses):
    """Cross-entropy in nats per pixel, and IoU; pixels of the target `IGNORED` count nowhere.

    The IoU of a class is the number of pixels that are of it both in prediction and target, as a
    share of those that are in either. Metrics:

    - `iou`: the mean over images of an image's mean IoU over the classes in its prediction or its
      target. Images are drawn independently, so this one has an error by test sample. Wang et al.
      2023, "Revisiting Evaluation Metrics for Semantic Segmentation", arXiv:2310.19252.
    - `miou`: the IoU of a class over the pixels of all images, and its mean over the classes that
      occur. Everingham et al. 2010, "The Pascal Visual Object Classes (VOC) Challenge".
    - `pixel_accuracy`: the share of all pixels that are right.

    Shapes: output (N, num_classes, H, W), targets uint8 (N, H, W).
    """

    num_classes: int
    metrics = ("loss", "miou", "pixel_accuracy", "iou")

    def num_targets(self, targets: Tensor) -> int | Tensor:
        if self.class_weights is None:
            return (targets != IGNORED).flatten(1).sum(dim=1)
        return self.total_weight(targets)

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        # In rows: over maps, its sum on a GPU depends on the order in which blocks end.
        scores, targets = output.movedim(1, -1).flatten(0, -2), batch["targets"].flatten()
        options = {"reduction": "sum", "ignore_index": IGNORED}
        return cross_entropy(scores, targets.long(), self.class_weights, **options)

    def measure(self, output: Tensor, batch: Batch) -> Measurements:
        """Per sample: the pixels of each class, int64 (N, num_classes, 3).

        Those in prediction and target, in the prediction, and in the target.
        """
        counts = self.count(output.argmax(dim=1), batch["targets"])
        return {"loss": self.loss(output, batch), "per_sample": counts}

    def count(self, predicted: Tensor, targets: Tensor) -> Tensor:
        """Returns `per_sample` of the class that is predicted for each pixel (N, H, W)."""
        is_real, counts = targets != IGNORED, []
        for index in range(self.num_classes):
            is_predicted = (predicted == index) & is_real
            is_target = targets == index
            masks = (is_predicted & is_target, is_predicted, is_target)
            counts.append(torch.stack([mask.sum(dim=(1, 2)) for mask in masks], dim=1))
        return torch.stack(counts, dim=1)

    def scores(self, per_sample: Tensor) -> Tensor:
        """Each image's mean IoU, float64."""
        return mean_iou(per_sample)

    def summarise(self, split: str, loss: Tensor, per_sample: Tensor) -> Measurements:
        del split
        of_split = per_sample.sum(dim=1)  # (S, num_classes, 3)
        right, _, total = of_split.sum(dim=1).unbind(dim=-1)
        metrics = {
            "miou": mean_iou(of_split),
            "pixel_accuracy": right.double() / total,
            "iou": self.scores(per_sample).mean(dim=1),
        }
        known = {name: torch.where(loss.isfinite(), v, torch.nan) for name, v in metrics.items()}
        return {"loss": loss, **known}

    def at_sizes(self, loss: Tensor, per_sample: Tensor) -> Measurements:
        """`pixel_accuracy_empty`: of the images whose target has one class, if there are any.

        Where that is the background, pixels predicted as anything else are hallucinated.
        """
        is_empty = (per_sample[..., 2] > 0).sum(dim=-1, keepdim=True) == 1  # (S, N, 1)
        if not is_empty.any():
            return {}
        both, _, total = (per_sample * is_empty[..., None]).sum(dim=(1, 2)).unbind(dim=-1)
        share = both.double() / total
        return {"pixel_accuracy_empty": torch.where(loss.isfinite(), share, torch.nan)}


def mean_iou(counts: Tensor) -> Tensor:
    """Returns the mean IoU (...) over the classes that occur, of counts (..., num_classes, 3)."""
    both, predicted, targets = counts.double().unbind(dim=-1)
    union = predicted + targets - both
    return (both / union).nanmean(dim=-1)  # 0 / 0 for a class that does not occur


@dataclass(eq=False)
class LanguageModeling:
    """Cross-entropy in nats per token, and in bits per byte of UTF-8 text; as `Classification`.

    Args:
        bytes_per_token: of each split.
    """

    bytes_per_token: Mapping[str, float]
    metrics = ("loss", "bits_per_byte")

    def num_targets(self, targets: Tensor) -> int | Tensor:
        return targets[0].numel()

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        logits, targets = output.flatten(0, 1), batch["targets"].flatten()  # (N*T, V), (N*T,)
        return cross_entropy(logits, targets, reduction="sum")

    def measure(self, output: Tensor, batch: Batch) -> Measurements:
        """Each sample is a sequence's mean loss per token, in nats."""
        logits, targets = output.flatten(0, 1), batch["targets"].flatten()
        losses = cross_entropy(logits, targets, reduction="none")  # (N*T,)
        return {
            "loss": losses.sum(),
            "per_sample": losses.unflatten(0, output.shape[:2]).mean(dim=1),
        }

    def scores(self, per_sample: Tensor) -> Tensor:
        return per_sample

    def summarise(self, split: str, loss: Tensor, per_sample: Tensor) -> Measurements:
        del per_sample
        return {"loss": loss, "bits_per_byte": loss / math.log(2) / self.bytes_per_token[split]}

    def at_sizes(self, loss: Tensor, per_sample: Tensor) -> Measurements:
        """Has none: a text is no image."""
        del loss, per_sample
        return {}


Criterion = Classification | Segmentation | LanguageModeling


def criterion_of(data: Data, class_weights: Sequence[float] | None = None) -> Criterion:
    """Returns the criterion of a data set's task.

    Raises:
        UserError: weights for a text, in another number than the classes, or all zero.
    """
    weights = None
    if class_weights is not None:
        check_class_weights(class_weights, data)
        weights = torch.tensor(class_weights, dtype=torch.float64)
    if data.task == "classification":
        return Classification(class_weights=weights)
    if data.task == "segmentation":
        return Segmentation(data.num_outputs, class_weights=weights)
    assert data.bytes_per_token is not None, "checked as the data set was built"
    return LanguageModeling(data.bytes_per_token)


def check_class_weights(weights: Sequence[float], data: Data) -> None:
    typed = f"class_weights=[{','.join(f'{weight:g}' for weight in weights)}]"
    if data.task == "language_modeling":
        raise UserError(
            f"{typed}: data={data.name} is a text, whose tokens are no classes; drop it"
        )
    if len(weights) != data.num_outputs or not any(weights):
        names = data.class_names or map(str, range(data.num_outputs))
        raise UserError(
            f"{typed}: must have a number for each of the {data.num_outputs} classes of "
            f"data={data.name} ({name_some(names)}), and one above 0"
        )


def chance_of(data: Data) -> dict[str, float]:
    """Returns test metrics of always predicting the most frequent class; of segmentation alone.

    The loss is minus the logarithm of the share of that class.
    """
    criterion = criterion_of(data)
    if not isinstance(criterion, Segmentation) or not isinstance(data.test, Examples):
        return {}
    batch = {"inputs": data.test.inputs, "targets": data.test.targets}
    if data.crop is not None:
        crop_centre(batch, data.crop)
    targets = batch["targets"]
    most = int(targets[targets != IGNORED].bincount().argmax())
    counts = criterion.count(torch.full_like(targets, most), targets)
    metrics = criterion.summarise("test", torch.zeros(1), counts[None])
    metrics["loss"] = -metrics["pixel_accuracy"].log()
    return {name: value.item() for name, value in metrics.items()}


def cross_entropy(
    logits: Tensor, targets: Tensor, weights: Tensor | None = None, **options: Any
) -> Tensor:
    """In float32 at least: under vmap, autocast leaves the loss in bfloat16."""
    logits = logits.to(wide_dtype(logits))
    weights = None if weights is None else weights.to(logits)
    return functional.cross_entropy(logits, targets, weights, **options)
