"""Whether the optimizer holds every parameter, and whether training reaches those of the norms."""

from __future__ import annotations

import logging

import torch
from torch import nn
from torch.nn import functional

from normexp.batching.replicas import Batch, model_arguments
from normexp.checks.probing import scratch
from normexp.checks.sites import name_some
from normexp.errors import UserError
from normexp.norms.site import named_sites

logger = logging.getLogger(__name__)


def check_coverage(network: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """Raises UserError for a parameter outside the optimizer; warns of a norm's without gradient.

    Args:
        optimizer: built for the parameters of this network.
    """
    missing = find_missing(network, optimizer)
    if missing:
        raise UserError(
            f"parameter {name_some(missing)} requires a gradient but is not in the optimizer; "
            "try another optim, or set requires_grad=False on what is not to be trained"
        )
    without = find_without_gradient(network, batch)
    if without:
        logger.warning("no gradient reaches %s of the norm: it stays as it is", name_some(without))


def find_missing(network: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the parameters that require a gradient and that no group of the optimizer has."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [n for n, p in network.named_parameters() if p.requires_grad and id(p) not in held]


def find_without_gradient(network: nn.Module, batch: Batch) -> list[str]:
    """Names of norm parameters that one backward of the cross-entropy leaves without a gradient."""
    with scratch(network, training=True, norm_batch_size=None) as own, torch.enable_grad():
        output = own(*model_arguments(batch))  # (N, classes) or (B, T, V)
        targets = batch["targets"].flatten()
        functional.cross_entropy(output.flatten(0, -2), targets).backward()
        return [
            f"{name}.{parameter_name}"
            for name, site in named_sites(own)
            for parameter_name, parameter in site.named_parameters()
            if parameter.requires_grad and parameter.grad is None
        ]
