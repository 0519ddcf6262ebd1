"""conf/norm: every file names a norm that exists, with knobs that it has, and that builds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from norm_cases import C
from omegaconf import DictConfig, OmegaConf

from normexp.build import RESERVED_NORM_KEYS
from normexp.norms.adapt import adapt
from normexp.norms.factory import NormFactory

FOLDER = Path(__file__).resolve().parents[2] / "conf" / "norm"
FILES = sorted(FOLDER.glob("*.yaml"))
EXPECTED = [
    *("batch", "group", "instance", "layer", "layer2d", "none", "rms"),
    *("group1", "position", "scale", "simple_rms", "crms", "frn", "evonorm_b0", "evonorm_s0"),
    *("dyt", "derf"),
]


def test_the_shipped_norms_are_there():
    assert set(EXPECTED) <= {path.stem for path in FILES}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_norm_is_built_from_its_file_and_runs_on_maps_and_tokens(name):
    cfg = OmegaConf.load(FOLDER / f"{name}.yaml")
    assert isinstance(cfg, DictConfig)
    view = cfg.view
    for key in RESERVED_NORM_KEYS:  # what build.py keeps for itself
        cfg.pop(key, None)
    make = adapt(instantiate(cfg), target=cfg._target_, eps=0.25)
    factory = NormFactory(make, view=view)
    site = factory(16)
    assert getattr(site.norm, "eps", 0.25) == 0.25
    assert site(torch.randn(2, 16, 3, 3)).shape == (2, 16, 3, 3)
    assert factory.tokens(2 * C)(torch.randn(2, 5, 2 * C)).shape == (2, 5, 2 * C)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_opens_with_what_the_norm_is(path):
    assert path.read_text().startswith("# ")
    assert OmegaConf.load(path)._partial_ is True
