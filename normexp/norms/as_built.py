"""The norms that a network of other authors already has."""

from __future__ import annotations

from torch import nn


class AsBuilt(nn.Module):
    """Stands in a config for the norms that a network has; sites are put around them.

    Never built: `models/surgery.py` leaves each norm of the network in its place.
    """
