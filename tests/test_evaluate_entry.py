"""normexp.evaluate: the statistics of a training, and more of them later from kept weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from normexp import load
from normexp.evaluate import main
from normexp.records.metrics import read_metrics
from normexp.records.paths import list_seeds, seed_dir
from normexp.records.result import read_result
from normexp.records.samples import read_samples
from normexp.train import main as train

ALL = "evaluate_with=[running,precise,batch]"


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def trained(runs_dir: Path, study: str, *words: str) -> Path:
    """The folder of a cell trained for one epoch on digits, on the CPU."""
    common = ["epochs=1", "model.width=4", "trainer=cpu", f"runs_dir={runs_dir}", f"study={study}"]
    assert train([*common, *words]) == 0
    (cell_dir,) = (path for path in (runs_dir / study).iterdir() if path.is_dir())
    return cell_dir


@pytest.fixture(scope="module")
def cell_dir(runs_dir: Path) -> Path:
    return trained(runs_dir, "three", "norm=batch", "norm_batch_size=2", "replicas=2", ALL)


def evaluation(cell_dir: Path, seed: int = 0) -> dict[str, dict[str, float]]:
    return json.loads((seed_dir(cell_dir, seed) / "evaluation.json").read_text())


def final_rows(cell_dir: Path, seed: int) -> dict[str, float]:
    """The last value of each metric in metrics.csv."""
    return {row.name: row.value for row in read_metrics(seed_dir(cell_dir, seed) / "metrics.csv")}


def test_training_records_three_statistics_in_every_file(cell_dir: Path):
    for seed in list_seeds(cell_dir):
        found = evaluation(cell_dir, seed)
        result = read_result(seed_dir(cell_dir, seed))
        rows = final_rows(cell_dir, seed)
        for kind, suffix in {"running": "", "precise": "@precise", "batch2": "@batch2"}.items():
            for name in ("val/accuracy", "val/loss", "test/accuracy", "test/loss"):
                value = found[kind][name]
                assert value == result.metrics[name + suffix] == rows[name + suffix]
        assert found["precise"]["num_samples"] == 1294
        assert set(found["gap"]) == {"norm1", "norm2", "norm3"}
    assert found["batch2"]["test/loss"] > found["running"]["test/loss"]


def test_samples_are_recorded_for_every_kind_and_extended(cell_dir: Path, tmp_path: Path):
    copy = shutil.copytree(cell_dir, tmp_path / cell_dir.name)
    before = [read_samples(seed_dir(copy, seed)) for seed in (0, 1)]
    assert main([f"run={copy}", "evaluate_with=[batch]", "evaluate_batch_sizes=[32]"]) == 0
    for seed in (0, 1):
        found, own = read_samples(seed_dir(copy, seed)), evaluation(copy, seed)
        assert found.keys() == {"running", "precise", "batch2", "batch32"}
        for kind, right in found.items():
            assert right.mean() == pytest.approx(own[kind]["test/accuracy"])
        for kind, right in before[seed].items():
            assert right.tolist() == found[kind].tolist()


def test_evaluating_kept_weights_gives_what_training_recorded(
    cell_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    copy = shutil.copytree(cell_dir, tmp_path / cell_dir.name)
    recorded = [evaluation(cell_dir, seed) for seed in (0, 1)]
    for seed in (0, 1):
        (seed_dir(copy, seed) / "evaluation.json").unlink()
    assert main([f"run={copy}", "evaluate_with=[running,precise,batch]"]) == 0
    for seed in (0, 1):
        assert evaluation(copy, seed) == recorded[seed]
    shown = capsys.readouterr().out
    assert "batch on digits: n = 2 seeds" in shown
    values = [r["precise"]["test/accuracy"] for r in recorded]
    assert f"{sum(values) / 2:.4f}" in shown


def test_evaluating_again_adds_to_what_is_there(cell_dir: Path, tmp_path: Path):
    copy = shutil.copytree(cell_dir, tmp_path / cell_dir.name)
    before = evaluation(copy)
    assert main([f"run={copy}", "evaluate_with=[batch]", "evaluate_batch_sizes=[2,32]"]) == 0
    after = evaluation(copy)
    assert set(after) == {*before, "batch32"}
    assert after["asked"] == before["asked"] | {"batch32": 32}
    assert all(after[name] == before[name] for name in before if name != "asked")
    assert after["batch32"]["test/loss"] < after["batch2"]["test/loss"]
    assert main([f"run={copy}", "evaluate_with=[precise]", "precise_samples=100"]) == 0
    assert evaluation(copy)["precise"]["num_samples"] == 100


def test_statistics_that_a_norm_does_not_have_are_absent(
    runs_dir: Path, capsys: pytest.CaptureFixture[str]
):
    cell_dir = trained(runs_dir, "group", "norm=group", "norm.num_groups=2", "replicas=1", ALL)
    assert set(evaluation(cell_dir)) == {"running", "asked"}
    assert not [name for name in final_rows(cell_dir, 0) if "@" in name]
    said = capsys.readouterr().err
    assert said.count("no precise statistics") == said.count("no batch statistics") == 1


REFUSED = {
    "far": (["run=/nowhere/at/all"], "/nowhere/at/all does not exist"),
    "near": (["run={cell}x"], "{cell}x does not exist; nearest: {cell}"),
    "study": (["run={study}"], "{study} is not a run"),
    "seed": (["run={cell}/seed-0"], "is one seed of a cell; give the cell, {cell}"),
    "large": (["run={cell}", "evaluate_batch_sizes=[145]"], "145 is more than the 144 samples of"),
}


@pytest.mark.parametrize(("words", "part"), REFUSED.values(), ids=REFUSED.keys())
def test_mistake_is_one_line_and_exit_code_two(
    cell_dir: Path, words: list[str], part: str, capsys: pytest.CaptureFixture[str]
):
    names = {"cell": cell_dir, "study": cell_dir.parent}
    before = evaluation(cell_dir)
    assert main([word.format(**names) for word in words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert part.format(**names) in lines[-1]
    assert evaluation(cell_dir) == before


def test_run_without_weights_or_end_is_refused(
    cell_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    copy = shutil.copytree(cell_dir, tmp_path / cell_dir.name)
    for seed in (0, 1):
        (seed_dir(copy, seed) / "weights.pt").unlink()
    assert main([f"run={copy}"]) == 2
    assert "none of its seeds kept its weights (save_weights=true)" in capsys.readouterr().err
    for seed in (0, 1):
        (seed_dir(copy, seed) / "result.json").unlink()
    assert main([f"run={copy}"]) == 2
    assert "none of its seeds has ended" in capsys.readouterr().err


def test_only_finished_seeds_are_evaluated(cell_dir: Path, tmp_path: Path):
    copy = shutil.copytree(cell_dir, tmp_path / cell_dir.name)
    (seed_dir(copy, 1) / "result.json").unlink()
    (seed_dir(copy, 1) / "evaluation.json").unlink()
    assert main([f"run={copy}", "evaluate_with=[precise]"]) == 0
    assert not (seed_dir(copy, 1) / "evaluation.json").exists()


def test_changed_config_is_refused(
    cell_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    copy = shutil.copytree(cell_dir, tmp_path / cell_dir.name)
    config = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(config.replace("width: 4", "width: 8"))
    assert main([f"run={copy}"]) == 2
    assert "has changed since it was trained" in capsys.readouterr().err


def test_a_run_from_before_a_knob_is_evaluated_with_its_default(cell_dir: Path, tmp_path: Path):
    copy = shutil.copytree(cell_dir, tmp_path / cell_dir.name)
    lines = (copy / "config.yaml").read_text().splitlines()
    newer = ("  affine:", "  nesterov:", "max_grad_norm:", "residual_scale:")
    older = [line for line in lines if not line.startswith(newer)]
    assert len(older) == len(lines) - len(newer)
    (copy / "config.yaml").write_text("\n".join(older))
    assert main([f"run={copy}", "evaluate_with=[precise]"]) == 0
    assert evaluation(copy)["precise"] == evaluation(cell_dir)["precise"]
    assert not load(copy / "seed-0").training


@pytest.mark.parametrize(("text", "told"), [(": [", "is not valid YAML"), ("a: 1", "has no norm")])
def test_torn_config_is_refused(
    cell_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, told: str
):
    copy = shutil.copytree(cell_dir, tmp_path / cell_dir.name)
    (copy / "config.yaml").write_text(text)
    assert main([f"run={copy}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"config.yaml {told}; remove the cell's folder and train it again")


def test_torn_weights_are_refused(
    cell_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    copy = shutil.copytree(cell_dir, tmp_path / cell_dir.name)
    path = seed_dir(copy, 0) / "weights.pt"
    path.write_bytes(path.read_bytes()[:1000])
    assert main([f"run={copy}"]) == 2
    assert "weights.pt does not fit its config.yaml, or is torn" in capsys.readouterr().err


def test_batch_statistics_of_a_leaking_norm_are_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["data=manual", "norm=batch", "model.width=16", "model.depth=1", "epochs=1", ALL]
    assert train([*words, f"runs_dir={tmp_path}"]) == 2
    assert "try evaluate_with=[running,precise]" in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_batch_of_one_value_per_statistic_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["data=langid", "norm=batch_per_position", "epochs=1", ALL, "evaluate_batch_sizes=[1]"]
    assert train([*words, f"runs_dir={tmp_path}"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "evaluate_batch_sizes=1 leaves one value per statistic at blocks.0.attn_norm" in said
