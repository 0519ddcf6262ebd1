"""`python -m normexp.train` as a user runs it: records, reruns, sweeps, own norms, mistakes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
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


def test_norm_batch_sizes_are_one_cell_for_a_norm_that_does_not_mix_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert train(tmp_path, "-m", "norm=group,batch", "norm_batch_size=2,8,5") == 1
    names = [cell.name for cell in cells(tmp_path)]
    assert len([name for name in names if name.startswith("group-")]) == 1
    assert len([name for name in names if name.startswith("batch-")]) == 2
    assert "norm_batch_size=5 does not divide" in capsys.readouterr().err  # the others went on


def test_divergence_is_recorded_and_is_no_failure(tmp_path: Path):
    assert train(tmp_path, "norm=none", "lr=1e30", "optim.warmup=0") == 0
    (cell,) = cells(tmp_path)
    result = read_result(cell / "seed-0")
    assert result.status == "diverged"
    assert result.diverged_at_step is not None
    assert "test/accuracy" not in result.metrics


def test_a_dry_run_lists_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert train(tmp_path, "-m", "norm=batch,group", "dry_run=true") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:3]]
    assert [row[:2] for row in rows] == [["norm=batch", "2"], ["norm=group", "2"]]
    assert all(row[-1] == "MiB" for row in rows)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_ctrl_c_leaves_a_checkpoint_that_the_same_line_finishes(tmp_path: Path):
    """The interrupted and resumed study equals an undisturbed one, byte for byte."""

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


# --- norms of the user's own --------------------------------------------------------------------

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
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    file = tmp_path / "own_norms_of_a_test.py"
    file.write_text(OWN_NORM)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield file
    sys.modules.pop("own_norms_of_a_test", None)


def test_a_norm_of_the_users_by_target_and_by_yaml(tmp_path: Path, own_module: Path):
    target = "norm._target_=own_norms_of_a_test.Shifted"
    assert train(tmp_path, "norm=custom", target, "norm.knob=2") == 0
    (cell,) = cells(tmp_path)
    assert cell.name.startswith("shifted-")
    folder = tmp_path / "my_conf" / "norm"
    folder.mkdir(parents=True)
    yaml = "_target_: own_norms_of_a_test.Shifted\n_partial_: true\nknob: 3\n"
    (folder / "mine.yaml").write_text(yaml)
    by_yaml = ["--config-dir", str(folder.parent), "norm=mine"]
    assert train(tmp_path, *by_yaml, "norm.knob=2") == 0
    assert cells(tmp_path) == [cell]  # the same training
    own_module.write_text(OWN_NORM + "\n# edited\n")
    del sys.modules["own_norms_of_a_test"]  # as in a new process
    assert train(tmp_path, *by_yaml, "norm.knob=2") == 0
    (other,) = [each for each in cells(tmp_path) if each != cell]  # never a stale answer
    assert read_result(other / "seed-0").config["norm"] == "mine"


# --- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("norm=instance model=custom model._target_=torch.nn.Identity", "model.replace"),
        ("norm=group norm.num_groups=5", "num_groups=5 does not divide num_features=16"),
        ("norm=batch batch_size=2000", "batch_size=2000 is more than the 1294"),
        ("model=gpt", "does not fit data=digits"),
        ("data=langid model=convnet", "does not fit data=langid"),
        ("norm=batch norm.half_life=100", "are both set"),
        ("steps=5 samples=100", "are both set"),
        ("data=text_file", "data.path is not set"),
        ("data=text_file data.path=nowhere.txt", "nowhere.txt"),
        ("data=image_folder data.root=nowhere", "nowhere"),
        ("data=custom data._target_=builtins.dict", "data._target_=builtins.dict"),
        ("trainer=gpu", "trainer"),
        ("norm=custom norm._target_=no.such.Norm", "there is no module no"),
        ("norm=custom norm._target_=normexp.norms.group.Grp", "normexp.norms.group has no Grp"),
        ("norm=custom norm._target_=torch.nn.Linear", "torch.nn.Linear"),
        ("norm=custom norm._target_=torch.nn.GroupNorm", "num_groups"),
        ("+optim.knob=3", "knob"),
        ("norm=batch norm.view=sideways", "norm.view=sideways: must be token or sequence"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, part: str
):
    if line == "trainer=gpu" and torch.cuda.is_available():
        pytest.skip("a GPU is there")
    words = line.split()
    given = {word.partition("=")[0] for word in words}
    quick = [word for word in QUICK if word.partition("=")[0] not in given]
    assert main([*words, *quick, f"runs_dir={tmp_path / 'runs'}"]) == 2
    err = capsys.readouterr().err
    (told,) = [text for text in err.splitlines() if text.startswith("normexp: ")]
    assert part in told
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()


def test_runs_dir_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert main([*QUICK, f"runs_dir={blocked}/runs"]) == 2
    assert "runs_dir" in capsys.readouterr().err
