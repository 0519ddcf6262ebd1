"""Norms. To read the code, start with factory, site, base and sample; contract: what a norm is.

    from normexp.norms import GroupNorm

`NAMES` lists the public names by module, without the deliberate mistakes of zoo/deviations.
Importing this package does not import torch; the first use of a name does.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

NAMES = {
    "factory": "NormFactory",
    "site": "Site",
    "contract": "Norm NormOfGroups MergesState",
    "base": "AffineNorm",
    "sample": "GroupNorm LayerNorm InstanceNorm LayerNorm2d PositionNorm RMSNorm SimpleRMSNorm "
    "NoNorm",
    "batch": "BatchNorm GhostBatchNorm SyncBatchNorm FrozenBatchNorm",
    "sequence": "CausalGroupNorm CausalInstanceNorm BatchNormPerPosition",
    "zoo.batch": "L1BatchNorm EvalNorm BatchRenorm",
    "zoo.power": "PowerNorm MovingAverageBatchNorm",
    "zoo.mixtures": "SwitchableNorm BatchInstanceNorm BatchChannelNorm ModeNorm",
    "zoo.nonlinear": "FilterResponseNorm GlobalResponseNorm EvoNormB0 EvoNormS0 "
    "DyT Derf ISRU HardTanh",
    "zoo.rep_batch": "RepBatchNorm ProgressiveRepBatchNorm",
    "zoo.salu": "SALU",
    "zoo.rms": "PreAffineRMSNorm GatedRMSNorm SeeDNorm BHyT ScaleNorm CRMSNorm TaperNorm",
}
MODULES = {name: module for module, names in NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Imports the module of a public name."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *MODULES})
