"""The card's line of an export to ONNX; what needs the packages is skipped where they are not."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normexp.checks import compatibility_onnx
from normexp.checks.card import Line, run_checks
from normexp.checks.subject import open_subject
from normexp.norms.batch import BatchNorm
from normexp.norms.causal import CausalInstanceNorm
from normexp.norms.group import LayerNorm


class Zeta(nn.Module):
    """A function that ONNX does not have."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.zeta(x.abs() + 2, x.abs() + 1)


def line_of(norm: type[nn.Module]) -> Line:
    subject = open_subject(norm, name="mine", target="mine", eps=1e-5)
    (line,) = run_checks("compatibility", {"ONNX": compatibility_onnx.exports_to_onnx}, subject)
    return line


def test_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compatibility_onnx, "PACKAGES", ("no_such_package",))
    line = line_of(LayerNorm)
    assert (line.status, line.detail) == ("skipped", "no_such_package is not installed")


def test_failed_export_is_the_first_cause_in_one_line_and_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def export(*_: Any, **__: Any) -> None:
        print("step 1 of 3", file=sys.stderr)
        raise RuntimeError("Failed.\nNext steps: ...") from ValueError("no function zeta\nat ...")

    monkeypatch.setattr(compatibility_onnx, "PACKAGES", ())
    monkeypatch.setattr(torch.onnx, "export", export)
    line = line_of(LayerNorm)
    assert (line.status, line.detail) == ("fail", "no function zeta, (4, 8, 4, 6)")
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize("norm", [BatchNorm, CausalInstanceNorm])
def test_exported_norm_computes_what_it_does_here(norm: type[nn.Module]):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    assert line_of(norm).status == "pass"


@pytest.mark.slow
def test_norm_without_an_export_fails_with_the_function_that_is_missing():
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    line = line_of(Zeta)
    assert line.status == "fail" and "zeta" in line.detail


@pytest.mark.slow
def test_exported_graph_that_computes_something_else_is_a_failure(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    right = compatibility_onnx._export
    other = nn.Hardtanh()
    monkeypatch.setattr(compatibility_onnx, "_export", lambda _, shape: right(other, shape))
    assert line_of(BatchNorm).detail.startswith("exported outputs differ by ")
