"""Builds the data set that a config names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from normexp.training.config.keys import separate
from normexp.training.config.target import read_target
from normexp.training.data.dataset import (
    Data,
    describe_copies,
    describe_missing,
    limit_train,
    validate,
)
from normexp.training.data.views import with_crop

logger = logging.getLogger(__name__)


def build_data(values: Mapping[str, Any]) -> Data:
    """The data set that the values of `data` name, checked, on the CPU.

    Some values are normexp's own and no argument of the target: `limit_train`, the number of
    training samples to keep, `order`, that of the samples within each batch, and `crop`, the pixels
    that networks see of an image.
    """
    own, knobs = separate("data", values)
    data = read_target(knobs, "data").make(Data)
    if own.get("order") is not None:
        data = replace(data, order=own["order"])
    validate(data)
    if own.get("limit_train") is not None:
        data = limit_train(data, own["limit_train"], knobs.get("split_seed", 0))
    if own.get("crop") is not None:
        data = with_crop(data, own["crop"])
    for line in chain(describe_missing(data), describe_copies(data)):
        logger.warning(line)
    return data
