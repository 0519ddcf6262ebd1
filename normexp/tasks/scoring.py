"""Metrics of a stack with other statistics than running averages: precise ones, or a batch's own.

Their names carry a suffix: `val/accuracy@precise`, `test/loss@batch32`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from normexp.errors import UserError
from normexp.tasks.frozen import batch_statistics, block_size, holding, shuffled
from normexp.tasks.population import Population
from normexp.tasks.split_score import Columns, Scorer, SplitScore

Block = tuple[Tensor, int]  # indices of a forward's samples, and how many from the first count


@torch.no_grad()
def score_precise(task: Scorer, population: Population, splits: Sequence[str]) -> Columns:
    """Metrics of each split with the moments of `population` in the place of running averages."""
    metrics: Columns = {}
    with holding(task.replicas, population.states):
        for split in splits:
            indices = torch.arange(len(getattr(task.data, split)))
            blocks = ((block, len(block)) for block in indices.split(block_size(task.replicas)))
            metrics |= _score(task, split, blocks, "precise")
    return metrics


@torch.no_grad()
def score_batch(task: Scorer, batch_size: int, splits: Sequence[str]) -> Columns:
    """Metrics of each split, its norms using the statistics of batches of `batch_size` samples.

    Raises:
        UserError: a split has fewer samples.
    """
    metrics: Columns = {}
    with batch_statistics(task.replicas, batch_size):
        for split in splits:
            indices = shuffled(task.data, split)
            if batch_size > len(indices):
                raise UserError(
                    f"evaluate_batch_sizes={batch_size} is more than the {len(indices)} samples "
                    f"of {split}; try {len(indices)} or fewer"
                )
            size = block_size(task.replicas, batch_size)
            blocks = completed_blocks(indices, size, batch_size)
            metrics |= _score(task, split, blocks, f"batch{batch_size}")
    return metrics


def completed_blocks(indices: Tensor, size: int, batch_size: int) -> Iterator[Block]:
    """`indices` in blocks of `size`; in the last, samples from the first on complete a batch.

    Only those that stand for themselves count, so each sample counts once.
    """
    for block in indices.split(size):
        missing = -len(block) % batch_size
        yield torch.cat([block, indices[:missing]]), len(block)


def _score(task: Scorer, split: str, blocks: Iterator[Block], suffix: str) -> Columns:
    score = SplitScore(task, split)
    for indices, num_counted in blocks:
        score.add(indices, num_counted)
    return {f"{split}/{name}@{suffix}": column for name, column in score.metrics().items()}
