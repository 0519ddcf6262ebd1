"""Norms of the user's own in `python -m normexp.train`, and one that fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from train_cases import cells, train

from normexp.records.result import read_result
from normexp.train import main

OWN_NORM = """
import torch
from torch import nn

class Shifted(nn.Module):
    def __init__(self, num_features, knob=1.0):
        super().__init__()
        self.shift = nn.Parameter(torch.full((num_features,), float(knob)))
    def forward(self, x):
        return x + self.shift.view(1, -1, *[1] * (x.ndim - 2))
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "own_norms_of_a_test.py"
    file.write_text(OWN_NORM)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield file
    sys.modules.pop("own_norms_of_a_test", None)


def test_own_norm_by_target_and_knob(tmp_path: Path, own_module: Path):
    target = "norm._target_=own_norms_of_a_test.Shifted"
    assert train(tmp_path, "norm=custom", target, "norm.knob=2") == 0
    (cell,) = cells(tmp_path)
    assert cell.name.startswith("shifted-")
    own_module.write_text(OWN_NORM + "\n# edited\n")
    assert train(tmp_path, "norm=custom", target, "norm.knob=2") == 0
    assert len(cells(tmp_path)) == 2  # an edited norm is a new cell, never a stale answer


def test_own_norm_by_a_yaml_of_the_users(tmp_path: Path, own_module: Path):  # noqa: ARG001
    folder = tmp_path / "my_conf" / "norm"
    folder.mkdir(parents=True)
    yaml = "_target_: own_norms_of_a_test.Shifted\n_partial_: true\nknob: 3\n"
    (folder / "mine.yaml").write_text(yaml)
    assert train(tmp_path, "--config-dir", str(folder.parent), "norm=mine", "norm.knob=4") == 0
    (cell,) = cells(tmp_path)
    assert read_result(cell / "seed-0").config["norm"] == "mine"


FAILING_NORM = """
from torch import nn

class Failing(nn.Module):
    calls = 0
    def __init__(self, num_features):
        super().__init__()
    def forward(self, x):
        Failing.calls += 1
        if Failing.calls > 200:
            raise RuntimeError("no more")
        return x
"""


@pytest.mark.slow
def test_failure_is_a_row_with_its_error_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "failing_norm_of_a_test.py").write_text(FAILING_NORM)
    monkeypatch.syspath_prepend(str(tmp_path))
    target = "norm._target_=failing_norm_of_a_test.Failing"
    words = ["norm=custom", target, "steps=200", "stack=false", f"runs_dir={tmp_path / 'runs'}"]
    assert main([*words, "replicas=2"]) == 1
    (cell,) = cells(tmp_path)
    result = read_result(cell / "seed-0")
    assert result.status == "failed"
    assert result.error == "RuntimeError: no more"
    assert "RuntimeError: no more" in capsys.readouterr().err
    assert "Traceback" in (cell / "stacks" / "0-1" / "run.log").read_text()
    sys.modules["failing_norm_of_a_test"].Failing.calls = -100_000
    assert main([*words, "replicas=2"]) == 0
    assert read_result(cell / "seed-0").status == "finished"
