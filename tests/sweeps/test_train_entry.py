"""`python -m normexp.train` as a user runs it: records, reruns, sweeps, and a Ctrl-C."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from train_cases import cells, files, train

from normexp.records.metrics import read_metrics
from normexp.records.result import read_result
from normexp.train import main


def test_a_run_leaves_what_the_design_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert train(tmp_path, "norm=group") == 0
    (cell,) = cells(tmp_path)
    assert cell.name.startswith("group-convnet-digits-b32-lr0.1-")
    expected = {"config.yaml", "seed-0", "seed-1", "stacks"}
    assert {p.name for p in cell.iterdir()} == expected
    for seed in (0, 1):
        run = {p.name for p in (cell / f"seed-{seed}").iterdir()}
        assert {"result.json", "metrics.csv", "weights.pt"} <= run
    assert [p.name for p in (cell / "stacks" / "0-1").iterdir()] == ["run.log"]
    result = read_result(cell / "seed-1")
    assert result.status == "finished"
    assert result.config["norm"] == "group"
    assert result.config["num_steps"] == 12
    assert set(result.metrics) == {
        *("val/loss", "val/accuracy", "test/loss", "test/accuracy"),
    }
    assert result.num_parameters == sum(
        t.numel() for t in torch.load(cell / "seed-1" / "weights.pt", weights_only=True).values()
    )
    out = capsys.readouterr().out
    assert str(cell) in out.replace("\n", "")
    assert "n = 2 seeds" in out
    assert "next:" in out


def test_metrics_csv_has_the_rows_of_its_own_seed(tmp_path: Path):
    train(tmp_path, "norm=batch")
    (cell,) = cells(tmp_path)
    rows = [read_metrics(cell / f"seed-{seed}" / "metrics.csv") for seed in (0, 1)]
    steps = [row.step for row in rows[0] if row.name == "train/loss"]
    assert steps == [5, 10]
    result = read_result(cell / "seed-0")
    last = {row.name: row.value for row in rows[0]}
    assert last["val/loss"] == result.metrics["val/loss"]
    assert rows[0] != rows[1]


def test_the_same_line_again_trains_nothing(tmp_path: Path):
    train(tmp_path, "norm=group")
    (cell,) = cells(tmp_path)
    before = files(cell)
    assert train(tmp_path, "norm=group") == 0
    assert files(cell) == before


@pytest.mark.slow
def test_more_replicas_train_only_the_new_seeds(tmp_path: Path):
    train(tmp_path, "norm=group")
    (cell,) = cells(tmp_path)
    before = files(cell / "seed-0")
    assert train(tmp_path, "norm=group", "replicas=3") == 0  # QUICK's replicas come later
    assert (
        main(
            ["norm=group", "steps=12", "log_every=5", "replicas=3", f"runs_dir={tmp_path / 'runs'}"]
        )
        == 0
    )
    assert files(cell / "seed-0") == before
    assert read_result(cell / "seed-2").status == "finished"


def test_norm_batch_sizes_are_one_cell_for_a_norm_that_does_not_mix_samples(tmp_path: Path):
    assert train(tmp_path, "-m", "norm=group,batch", "norm_batch_size=2,8,32") == 0
    names = [cell.name for cell in cells(tmp_path)]
    assert len([name for name in names if name.startswith("group-")]) == 1
    assert len([name for name in names if name.startswith("batch-")]) == 3


def test_a_refused_cell_is_a_row_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert train(tmp_path, "-m", "norm=batch", "norm_batch_size=5,8") == 1
    assert len(cells(tmp_path)) == 1
    assert "norm_batch_size=5 does not divide" in capsys.readouterr().err


def test_divergence_is_recorded_and_is_no_failure(tmp_path: Path):
    assert train(tmp_path, "norm=none", "lr=1e30", "optim.warmup=0") == 0
    (cell,) = cells(tmp_path)
    result = read_result(cell / "seed-0")
    assert result.status == "diverged"
    assert result.diverged_at_step is not None
    assert "test/accuracy" not in result.metrics


def test_dry_run_lists_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert train(tmp_path, "-m", "norm=batch,group", "dry_run=true") == 0
    out = capsys.readouterr().out
    assert out.count("2 runs to do") == 2
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_ctrl_c_leaves_a_checkpoint_that_the_same_line_finishes(tmp_path: Path):
    """The interrupted and resumed study equals an undisturbed one, byte for byte."""
    import signal
    import time

    def command(runs: str) -> list[str]:
        words = ["norm=batch", "epochs=12", "replicas=2", f"runs_dir={tmp_path / runs}"]
        return [sys.executable, "-m", "normexp.train", *words]

    subprocess.run(command("whole"), check=True, capture_output=True)
    process = subprocess.Popen(command("cut"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("cut/default/*/seed-0")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.7)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err.decode()
    assert err.decode().count("stopped") == err.decode().count("normexp: stopped; ") == 1
    assert len(list(tmp_path.glob("cut/default/*/stacks/0-1/last.ckpt"))) == 1
    subprocess.run(command("cut"), check=True, capture_output=True)
    for seed in (0, 1):
        whole, cut = (next(tmp_path.glob(f"{k}/default/*/seed-{seed}")) for k in ("whole", "cut"))
        assert (whole / "metrics.csv").read_bytes() == (cut / "metrics.csv").read_bytes()
        results = [json.loads((run / "result.json").read_text()) for run in (whole, cut)]
        assert results[0]["metrics"] == results[1]["metrics"]
    assert not list(tmp_path.glob("cut/default/*/stacks/0-1/last.ckpt"))
