"""Data sets of rows: a sample is a few numbers, such as measurements."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from normexp.errors import UserError
from normexp.training.data.dataset import Data, Examples
from normexp.training.data.sources import split_off_val


def build_row_data(
    name: str,
    train: Examples,
    test: Examples,
    *,
    num_classes: int,
    val_fraction: float,
    split_seed: int,
    class_names: Sequence[str] | None = None,
    source_version: str = "",
) -> Data:
    """Data for the classification of rows; a part of `train` becomes val.

    Models get each feature with the mean 0 and the standard deviation 1 of the training rows; a
    constant feature is only centred.

    Shapes: inputs float32 (N, F), targets int64 (N,) in [0, num_classes).

    Raises:
        UserError: rows of another dtype or shape, a value that is not finite, a fraction that
            empties train or val.
    """
    rows = train.inputs
    if rows.ndim != 2 or rows.dtype != torch.float32 or len(rows) != len(train.targets):
        raise UserError(
            f"data={name}: train.inputs is {rows.dtype} {tuple(rows.shape)} for "
            f"{len(train.targets)} targets, must be torch.float32 (N, F) for N"
        )
    is_finite = rows.isfinite().all(dim=0)
    if not is_finite.all():
        column = int((~is_finite).int().argmax())
        raise UserError(f"data={name}: feature {column} has a value that is not finite; fill it in")
    train, val = map(train.subset, split_off_val(len(train), val_fraction, split_seed))
    values = train.inputs.double()
    std = values.std(dim=0, correction=0)
    return Data(
        name=name,
        task="classification",
        train=train,
        val=val,
        test=test,
        num_outputs=num_classes,
        input_shape=(values.shape[1],),
        mean=tuple(values.mean(dim=0).tolist()),
        std=tuple(torch.where(std > 0, std, 1).tolist()),
        divisor=1,
        source_version=source_version,
        class_names=tuple(class_names) if class_names else None,
    )
