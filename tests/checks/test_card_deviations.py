"""Each of the tutorials' norms is told from the sound one by the line that measures its fault."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from normexp.checks.card import run_checks
from normexp.checks.card_invariance import INVARIANCE
from normexp.checks.card_traits import DEPENDS_ON
from normexp.checks.contract import ON_SHAPES
from normexp.checks.subject import open_subject
from normexp.norms.batch import BatchNorm
from normexp.norms.deviations import (
    BatchNormBiasedAverage,
    BatchNormEpsOutside,
    BatchNormFlattened,
    BatchNormNaiveVariance,
    BatchNormNoEps,
    BatchNormUnbiased,
    LayerNormNoEps,
    LayerNormOverMap,
    LayerNormOverTime,
    LayerNormUnbiased,
)
from normexp.norms.group import LayerNorm

# The deviation, the sound norm, the line, and what it says of each: a verdict or a number.
GAIN, GAP, EPS = "output size, batch of 4", "train/eval gap, batch of 4", "effect of eps x10"
TOLD_BY = [
    (BatchNormUnbiased, BatchNorm, GAIN, (0.866, 1.0)),  # sqrt(3 / 4)
    (BatchNormEpsOutside, BatchNorm, f"{EPS} at std 0.001", (0.082, 0.67)),  # 1 - 1.01 / 1.1
    (BatchNormBiasedAverage, BatchNorm, GAP, (0.747, 0.614)),
    (BatchNormFlattened, BatchNorm, "pools positions", ("no", "in training")),
    (BatchNormNaiveVariance, BatchNorm, "exact at mean 1e4", ("fail", "pass")),
    (BatchNormNoEps, BatchNorm, "finite on constants", ("fail", "pass")),
    (LayerNormUnbiased, LayerNorm, GAIN, (0.935, 1.0)),  # sqrt(7 / 8)
    (LayerNormNoEps, LayerNorm, "finite on constants", ("fail", "pass")),
    (LayerNormOverTime, LayerNorm, "pools channels", ("no", "yes")),
    (LayerNormOverMap, LayerNorm, "pools channels", ("no", "yes")),
]


def measure(norm: type[nn.Module], name: str) -> Any:
    checks = {**ON_SHAPES, **DEPENDS_ON, **INVARIANCE}
    subject = open_subject(norm, name="mine", target="normexp.norms.mine", eps=1e-5)
    (line,) = run_checks("contract", {name: checks[name]}, subject)
    return line.value if line.status == "value" else line.status


@pytest.mark.parametrize(
    ("deviation", "sound", "name", "expected"),
    TOLD_BY,
    ids=[deviation.__name__ for deviation, *_ in TOLD_BY],
)
def test_deviation_is_told_by_its_line(deviation, sound, name, expected):
    found = measure(deviation, name), measure(sound, name)
    assert found == (pytest.approx(expected, rel=0.01) if name in (GAIN, GAP) else expected)
