"""`python -m normexp.train` as a user runs it, in-process: records, reruns, sweeps, mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from normexp.records.metrics import read_metrics
from normexp.records.reader import read_result
from normexp.train import main

QUICK = ["steps=12", "replicas=2", "log_every=5", "workers=0"]  # no other process


def train(tmp_path: Path, *words: str) -> int:
    return main([*words, *QUICK, f"runs_dir={tmp_path / 'runs'}", f"data_dir={tmp_path / 'data'}"])


def cells(tmp_path: Path, study: str = "default") -> list[Path]:
    return sorted(p for p in (tmp_path / "runs" / study).iterdir() if (p / "config.yaml").is_file())


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["norm=instance", "model=custom", "model._target_=torch.nn.Identity"],
            "no argument `norm`",
        ),
        (["norm=group", "norm.num_groups=5"], "num_groups=5 does not divide num_features=16"),
        (["norm=batch", "batch_size=2000"], "batch_size=2000 is more than the 1294"),
        (["model=gpt"], "does not fit data=digits"),
        (["data=langid", "model=convnet"], "does not fit data=langid"),
        (["norm=batch", "norm.half_life=100"], "are both set"),
        (["steps=5", "samples=100"], "are both set"),
        (["data=text_file", "data.path=nowhere.txt"], "nowhere.txt"),
        (["data=image_folder", "data.root=nowhere"], "nowhere"),
        (["trainer=gpu"], "trainer"),
        (["norm=custom", "norm._target_=no.such.Norm"], "no.such.Norm"),
        (["norm=custom", "norm._target_=torch.nn.Linear"], "torch.nn.Linear"),
        (["norm=custom", "norm._target_=torch.nn.GroupNorm"], "num_groups"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_is_one_short_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
):
    if "trainer=gpu" in words and torch.cuda.is_available():
        pytest.skip("a GPU is there")
    quick = [w for w in QUICK if w.split("=")[0] not in {x.split("=")[0] for x in words}]
    assert main([*words, *quick, f"runs_dir={tmp_path / 'runs'}"]) == 2
    err = capsys.readouterr().err
    (line,) = [line for line in err.splitlines() if line.startswith("normexp: ")]
    assert message in line
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()


def test_runs_dir_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert main([*QUICK, f"runs_dir={blocked}/runs"]) == 2
    assert "runs_dir" in capsys.readouterr().err


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
    assert len(list(tmp_path.glob("cut/default/*/stacks/0-1/last.ckpt"))) == 1
    subprocess.run(command("cut"), check=True, capture_output=True)
    for seed in (0, 1):
        whole, cut = (next(tmp_path.glob(f"{k}/default/*/seed-{seed}")) for k in ("whole", "cut"))
        assert (whole / "metrics.csv").read_bytes() == (cut / "metrics.csv").read_bytes()
        results = [json.loads((run / "result.json").read_text()) for run in (whole, cut)]
        assert results[0]["metrics"] == results[1]["metrics"]
    assert not list(tmp_path.glob("cut/default/*/stacks/0-1/last.ckpt"))
