"""`python -m normexp.train` as a user runs it: records, reruns, sweeps, own norms, mistakes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from train_cases import QUICK, cells, files, train

from normexp.records.metrics import read_metrics
from normexp.records.result import read_result
from normexp.train import main


def test_a_run_leaves_what_the_design_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert train(tmp_path, "norm=group") == 0
    (cell,) = cells(tmp_path)
    assert cell.name.startswith("group-convnet-digits-b32-lr0.1-")
    assert {p.name for p in cell.iterdir()} == {"config.yaml", "seed-0", "seed-1", "stacks"}
    for seed in (0, 1):
        run = {p.name for p in (cell / f"seed-{seed}").iterdir()}
        assert {"result.json", "metrics.csv", "weights.pt"} <= run
    assert [p.name for p in (cell / "stacks" / "0-1").iterdir()] == ["run.log"]
    result = read_result(cell / "seed-1")
    assert result.status == "finished"
    assert result.config["norm"] == "group"
    assert result.config["num_steps"] == 12
    assert result.config["identity"]["norm"]["num_groups"] == 8  # also what is as by default
    assert {"val/loss", "val/accuracy", "test/loss", "test/accuracy"} == set(result.metrics)
    weights = torch.load(cell / "seed-1" / "weights.pt", weights_only=True)
    assert result.num_parameters == sum(tensor.numel() for tensor in weights.values())
    out = capsys.readouterr().out
    assert str(cell) in out.replace("\n", "")
    assert "n = 2 seeds" in out and "next:" in out

    rows = [read_metrics(cell / f"seed-{seed}" / "metrics.csv") for seed in (0, 1)]
    assert [row.step for row in rows[1] if row.name == "train/loss"] == [5, 10]
    assert {row.name: row.value for row in rows[1]}["val/loss"] == result.metrics["val/loss"]
    assert rows[0] != rows[1]

    before = files(cell)
    assert train(tmp_path, "norm=group") == 0  # the same line again
    assert files(cell) == before


def test_norm_batch_sizes_are_one_cell_for_a_norm_that_does_not_mix_samples(tmp_path: Path, capsys):
    assert train(tmp_path, "-m", "norm=group,batch", "norm_batch_size=2,8,5") == 1
    names = [cell.name for cell in cells(tmp_path)]
    assert len([name for name in names if name.startswith("group-")]) == 1
    assert len([name for name in names if name.startswith("batch-")]) == 2
    assert "norm_batch_size=5 does not divide" in capsys.readouterr().err  # the others went on


def test_a_dry_run_lists_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert train(tmp_path, "-m", "norm=batch,group", "dry_run=true") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:3]]
    assert [row[:2] for row in rows] == [["norm=batch", "2"], ["norm=group", "2"]]
    assert all(row[-1] == "MiB" for row in rows)
    assert not (tmp_path / "runs").exists()


CTRL_C = """
import os, signal
from pytorch_lightning import Callback

class CtrlC(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 4 and os.environ.pop("INTERRUPTED", ""):
            os.kill(os.getpid(), signal.SIGINT)
"""


def test_ctrl_c_leaves_a_checkpoint_that_the_same_line_finishes(
    tmp_path: Path, own_module: Callable[[str, str], Path], monkeypatch, capsys
):
    """The interrupted and resumed study equals an undisturbed one, byte for byte."""
    own_module("presses_ctrl_c", CTRL_C)
    words = ["norm=batch", "callback=custom", "callback._target_=presses_ctrl_c.CtrlC"]
    assert train(tmp_path / "whole", *words) == 0
    monkeypatch.setenv("INTERRUPTED", "once")
    capsys.readouterr()
    assert train(tmp_path / "cut", *words) == 130
    err = capsys.readouterr().err
    assert err.count("stopped") == err.count("normexp: stopped; ") == 1
    (cut,), (whole,) = (cells(tmp_path / name) for name in ("cut", "whole"))
    assert (cut / "stacks" / "0-1" / "last.ckpt").exists()
    assert train(tmp_path / "cut", *words) == 0
    assert not (cut / "stacks" / "0-1" / "last.ckpt").exists()
    for seed in ("seed-0", "seed-1"):
        rows = [(cell / seed / "metrics.csv").read_bytes() for cell in (cut, whole)]
        metrics = [read_result(cell / seed).metrics for cell in (cut, whole)]
        assert rows[0] == rows[1] and metrics[0] == metrics[1]


# --- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("norm=batch batch_size=2000", "batch_size=2000 is more than the 1294"),  # as it is built
        ("norm=batch norm.half_life=100", "are both set"),
        ("workers=-1", "workers=-1"),
        ("max_attempts=0", "max_attempts=0"),
        ("-m norm=none,group workers=0,1", "workers=0,1"),
        ("runs_dir={blocked}/runs", "runs_dir"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(tmp_path: Path, capsys, line: str, part: str):
    (tmp_path / "a_file").touch()
    words = line.format(blocked=tmp_path / "a_file").split()
    given = {word.partition("=")[0] for word in words}
    others = [*QUICK, f"runs_dir={tmp_path / 'runs'}"]
    assert main([*words, *(word for word in others if word.partition("=")[0] not in given)]) == 2
    err = capsys.readouterr().err
    (told,) = [text for text in err.splitlines() if text.startswith("normexp: ")]
    assert part in told
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()
