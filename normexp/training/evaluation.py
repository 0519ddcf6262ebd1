"""Evaluation on splits, with one kind of statistics, or one size of images, at a time.

Metrics of all kinds but `running` have the kind as a suffix: `val/accuracy@precise`, see
statistics.py; and so have those of images at other sizes: `test/iou@tiles32`, see data/views.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from normexp.norms.base import wide_dtype
from normexp.training.batching.replicas import Batch, Measurements, Replicas
from normexp.training.data.dataset import Data
from normexp.training.data.views import View, crop_centre
from normexp.training.pictures import draw_predictions
from normexp.training.recipe import Recipe
from normexp.training.samples import gather, samples_per_forward, shuffled
from normexp.training.statistics import STATISTICS, Trained

logger = logging.getLogger(__name__)

NUM_SHOWN = 6  # images of predictions.png, or all if there are fewer
Columns = dict[str, list[float]]  # a value per replica, by metric


@dataclass(eq=False)
class Evaluator:
    """Computes metrics of replicas on the val and test split.

    Attributes:
        data: on the device of the replicas.
        samples: what samples.npz keeps of each test sample (S, N), by kind of evaluation.
        predictions: classes (S, NUM_SHOWN, H, W) in a few test images with masks.
    """

    replicas: Replicas
    data: Data
    recipe: Recipe
    samples: dict[str, Tensor] = field(default_factory=dict, init=False)
    predictions: Tensor | None = field(default=None, init=False)

    def running(self, split: str) -> Columns:
        """Returns the metrics of a split; the replicas must be in evaluation mode."""
        group = self.recipe.mixed_in_evaluation
        return self._score(self.replicas, "running", split, group, group)

    def with_other_statistics(self, splits: Sequence[str]) -> Columns:
        """Returns the metrics of the splits with every other kind of statistics of the recipe."""
        recipe, metrics = self.recipe, Columns()
        trained = Trained(
            self.replicas,
            self.data,
            norm_batch_size=recipe.sizes.norm,
            num_samples=recipe.settings.precise_samples,
            batch_sizes=recipe.evaluation_batch_sizes,
        )
        for name, statistic in STATISTICS.items():
            if name not in recipe.statistics:
                continue
            for variant in statistic.variants(trained):
                for split in splits:
                    metrics |= self._score(
                        variant.replicas, variant.kind, split, variant.group_size
                    )
        return metrics

    def with_view(self, view: View, split: str) -> Columns:
        """Returns the metrics of a split with images shown so.

        The replicas must be in evaluation mode.
        """
        group = self.recipe.mixed_in_evaluation
        return self._score(self.replicas, view.name, split, group, group, view)

    @torch.no_grad()
    def predict_some(self) -> None:
        """Fills `predictions`; the replicas must be in evaluation mode."""
        if self.data.task == "segmentation" and self.recipe.mixed_in_evaluation is None:
            batch = gather(self.replicas, self.data, "test", self._shown)
            self.predictions = self.replicas.measure(
                batch, lambda output, _: output.argmax(dim=1), shared=True
            )

    def picture_of(self, index: int) -> bytes:
        """Returns predictions.png of replica `index`; empty without masks."""
        if self.predictions is None:
            return b""
        batch = self.data.test.gather(self._shown)
        if self.data.crop is not None:
            crop_centre(batch, self.data.crop)
        parts = batch["inputs"], batch["targets"], self.predictions[index].byte()
        return draw_predictions(*(part.cpu().numpy() for part in parts))

    @property
    def _shown(self) -> Tensor:
        """Indices of test samples, spread evenly."""
        return torch.linspace(0, len(self.data.test) - 1, NUM_SHOWN).long().unique()

    @torch.no_grad()
    def _score(
        self,
        replicas: Replicas,
        kind: str,
        split: str,
        group_size: int | None = None,
        num_samples: int | None = None,
        view: View | None = None,
    ) -> Columns:
        """Returns the metrics of a split with the statistics that the norms use now.

        Args:
            kind: the name of these statistics, or of the view.
            group_size: samples that share statistics; None if samples do not.
            num_samples: per forward; None: as many as fit.
            view: how images are shown; None: as in training.
        """
        loss = torch.zeros((), dtype=torch.float64)  # (S,) from the first block on
        per_sample: list[Tensor] = []  # (S, block) each
        num_targets, count = 0, len(getattr(self.data, split))
        num_samples = num_samples or samples_per_forward(
            replicas, self.data, group_size or 1, shows_all=view is not None
        )
        # Samples that share statistics are in random order, and the last block is filled up to
        # whole groups with the first samples, which do not count again: the result must depend
        # neither on the order of the split nor on the number of replicas.
        order = torch.arange(count) if group_size is None else shuffled(self.data, split)
        for indices in order.split(num_samples):

            def measure(output: Tensor, block: Batch, num: int = len(indices)) -> Measurements:
                output, block = output[:num], {name: value[:num] for name, value in block.items()}
                return self.recipe.criterion.measure(output, block)

            missing = -len(indices) % min(group_size or 1, count)
            filled = torch.cat([indices, order[:missing]])
            batch = gather(replicas, self.data, split, filled, view)
            if view is None or view.stride is None:
                measured = replicas.measure(batch, measure, shared=True)
            else:
                scores = scores_of_tiles(replicas, batch, view)
                measured = tree_map(
                    lambda *values: torch.stack(values), *[measure(s, batch) for s in scores]
                )
            loss = loss + measured["loss"].double()
            per_sample.append(measured["per_sample"])
            targets = batch["targets"][None, : len(indices)]
            num_targets = num_targets + self.recipe.criterion.num_targets(targets)
        samples = torch.cat(per_sample, dim=1)
        if split == "test":
            scores = self.recipe.criterion.scores(samples)
            self.samples[kind] = scores.cpu()[:, order.argsort()]
        loss = loss / num_targets
        summary = self.recipe.criterion.summarise(split, loss, samples)
        if view is not None:
            summary |= self.recipe.criterion.at_sizes(loss, samples)
        suffix = suffix_of(kind)
        return {f"{split}/{name}{suffix}": value.tolist() for name, value in summary.items()}

    def content(self, metrics: Columns, index: int) -> dict[str, dict[str, float]]:
        """Returns evaluation.json of replica `index`: its finite metrics by kind of statistics."""
        content: dict[str, dict[str, float]] = {}
        for name, column in metrics.items():
            metric, _, kind = name.partition("@")
            is_asked = bool(kind) or "running" in self.recipe.statistics
            if is_asked and math.isfinite(column[index]):
                content.setdefault(kind or "running", {})[metric] = column[index]
        return content

    def samples_of(self, metrics: Columns, index: int) -> dict[str, np.ndarray]:
        """Returns samples.npz of replica `index`: kinds whose test loss is finite."""
        return {
            kind: rows[index].numpy()
            for kind, rows in self.samples.items()
            if math.isfinite(metrics["test/loss" + suffix_of(kind)][index])
        }


def scores_of_tiles(replicas: Replicas, batch: Batch, view: View) -> Tensor:
    """Returns the scores of images that networks see in tiles, (S, N, K) or (S, N, K, H, W).

    They are the logarithm of the mean probability: for each pixel over the tiles that cover it, or
    for each image over all its tiles.
    """
    images = batch["inputs"]
    total, count = torch.zeros(()), torch.zeros(())

    def probabilities(output: Tensor, _: Batch) -> Tensor:
        return output.to(wide_dtype(output)).softmax(dim=1)

    for rows, columns in view.tiles(*images.shape[-2:]):
        tile = batch | {"inputs": images[..., rows, columns]}
        found = replicas.measure(tile, probabilities, shared=True)
        is_map = found.ndim == 5
        if not total.ndim:
            total = found.new_zeros((*found.shape[:3], *(images.shape[-2:] if is_map else ())))
            count = torch.zeros_like(total[0, 0, 0])
        place = (..., rows, columns) if is_map else (...,)
        total[place] += found
        count[place] += 1
    mean = total / count
    return mean.clamp(min=torch.finfo(mean.dtype).tiny).log()


def suffix_of(kind: str) -> str:
    """Returns the end of the names of metrics with this kind of statistics."""
    return "" if kind == "running" else f"@{kind}"
