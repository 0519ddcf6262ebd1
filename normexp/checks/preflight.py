"""Examines a built network before it trains: refuses it, warns of it, or measures its traits."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from normexp.batching.sizes import Sizes
from normexp.checks.network import BuiltNetwork, explain
from normexp.checks.questions import OF_NETWORKS
from normexp.checks.reading import OUTSIDE, Reach
from normexp.data.dataset import Data
from normexp.errors import UserError
from normexp.records.provenance import source_line_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Traits:
    """Properties of a built network, measured before its training; each is a row of the table.

    Attributes:
        mixing: where, in training, a sample's output or gradient, or the running state, depends on
            other samples; None if nowhere.
        mixes_samples_in_evaluation: a sample's output in evaluation depends on other samples.
        leak: where a later position moves an earlier output in evaluation; language models only.
        leaks_future_in_training: a later position moves an earlier output in training.
        draws_for_itself: a module uses torch's global random state.
        stacking_obstacle: why replicas cannot run under vmap.
        elements_per_sample: values of one sample that reach all sites.
        reaches: the sites whose norm takes a statistic, and how far it reaches.
    """

    mixing: str | None
    mixes_samples_in_evaluation: bool
    leak: str | None
    leaks_future_in_training: bool
    draws_for_itself: bool
    stacking_obstacle: str | None
    elements_per_sample: int
    reaches: Mapping[str, Reach]

    @property
    def mixes_samples(self) -> bool:
        return self.mixing is not None

    @property
    def norms_mix_samples(self) -> bool:
        """True if it is a norm that mixes them."""
        return self.mixing not in (None, OUTSIDE)

    @property
    def leaks_future(self) -> bool:
        return self.leak is not None

    def single_valued(self, group_size: int) -> list[str]:
        """Sites with statistics over a single value if `group_size` samples share them."""
        return [name for name, r in self.reaches.items() if r.num_values(group_size) == 1]


def examine(
    network: nn.Module, data: Data, sizes: Sizes, *, drop_last: bool, allow_leak: bool = False
) -> Traits:
    """Probes a network on a few training samples, at the sizes of its training.

    Raises:
        UserError: a forward fails or returns NaN; no norm has an effect; a statistic is over one
            value; padding is read; a checkpoint would lack state; a sequential state would be
            split; a language model reads the future, unless `allow_leak`. Names the sites.
    """
    built = BuiltNetwork(network, data, sizes, drop_last=drop_last, allow_leak=allow_leak)
    traits: dict[str, Any] = {}
    for question in OF_NETWORKS:
        try:
            reply = question.ask(built)
        except Exception as error:
            if isinstance(error, UserError) or not source_line_of(error):
                raise  # a refusal, or a fault that is not of the user's code
            raise UserError(f"probing the model fails: {explain(error)}") from error
        if question.follows == "trait":
            traits[question.name] = reply
        elif reply is not None:
            if question.follows == "refusal":
                raise UserError(reply)
            level = logging.WARNING if question.follows == "warning" else logging.INFO
            logger.log(level, "%s", reply)
    return Traits(**traits)
