"""Builds the data set that a config names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from normexp.training.config.target import read_target
from normexp.training.data.dataset import (
    Data,
    describe_copies,
    describe_missing,
    limit_train,
    validate,
)

logger = logging.getLogger(__name__)


def build_data(values: Mapping[str, Any]) -> Data:
    """The data set that the values of `data` name, checked, on the CPU.

    Two values are normexp's own and no argument of the target: `limit_train`, the number of
    training samples to keep, and `order`, that of the samples within each batch.
    """
    values = dict(values)
    limit = values.pop("limit_train", None)
    order = values.pop("order", None)
    data = read_target(values, "data").make(Data)
    if order is not None:
        data = replace(data, order=order)
    validate(data)
    if limit is not None:
        data = limit_train(data, limit, values.get("split_seed", 0))
    for line in chain(describe_missing(data), describe_copies(data)):
        logger.warning(line)
    return data
