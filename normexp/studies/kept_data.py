"""Data sets that stay in memory from cell to cell of a process, as some take seconds to load."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from omegaconf import DictConfig, OmegaConf

from normexp.build import build_data
from normexp.data.dataset import Data

MOST = 2  # data sets: the cells of a grid use them in turn

_kept: dict[str, Data] | None = None  # by config, the latest last; None outside of `keeping_data`


@contextmanager
def keeping_data() -> Iterator[None]:
    """`load_data` loads each data set once while inside. Files that change meanwhile go unseen."""
    global _kept
    before, _kept = _kept, {} if _kept is None else _kept
    try:
        yield
    finally:
        _kept = before


def load_data(cfg: DictConfig) -> Data:
    """The data set that `data` names, see `build_data`; nobody writes to its tensors."""
    if _kept is None:
        return build_data(cfg)
    name = json.dumps(OmegaConf.to_container(cfg.data, resolve=True), sort_keys=True, default=str)
    data = _kept.pop(name, None) or build_data(cfg)
    _kept[name] = data
    while len(_kept) > MOST:
        del _kept[next(iter(_kept))]
    return data
