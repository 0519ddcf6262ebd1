"""normexp.confirm as a user runs it: which cells and seeds it trains, what it records, resuming."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from train_cases import files

import normexp
from normexp.confirm import main
from normexp.errors import UserError
from normexp.train import main as train
from normexp.training.records.journal import (
    CommandEntry,
    ConfirmRequest,
    append_entry,
    confirmations_of,
    read_entries,
)
from normexp.training.records.layout import CONFIRM_LOCK, list_cells, list_seeds
from normexp.training.records.locks import file_lock
from normexp.training.search import confirm as confirming

TINY = ["model.width=4", "steps=2", "replicas=2", "workers=0", "trainer=cpu", "study=loop"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A baseline and three tries, each with two seeds."""
    runs_dir = tmp_path_factory.mktemp("loop")
    assert train(["norm=none", *TINY, f"runs_dir={runs_dir}"]) == 0
    tries = ["-m", "norm=none", "lr=0.02,0.5,2.0"]
    assert train([*tries, *TINY, f"runs_dir={runs_dir}"]) == 0
    return runs_dir


@pytest.fixture
def runs_dir(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "runs"))


def confirm(runs_dir: Path, *words: str) -> int:
    return main(["study=loop", f"runs_dir={runs_dir}", "replicas=2", "workers=0", *words])


def seeds(runs_dir: Path) -> dict[str, list[int]]:
    return {cell.name: list_seeds(cell) for cell in list_cells(runs_dir / "loop")}


def confirmations(runs_dir: Path) -> list[ConfirmRequest]:
    return confirmations_of(read_entries(runs_dir / "loop"))


def commands(runs_dir: Path) -> list[CommandEntry]:
    return [one for one in read_entries(runs_dir / "loop") if isinstance(one, CommandEntry)]


def report(runs_dir: Path) -> dict[str, Any]:
    content = json.loads((runs_dir / "loop/report/report.json").read_text())
    del content["tables"]["cells"]
    return content


def test_a_dry_run_says_what_it_would_train(runs_dir: Path, capsys: pytest.CaptureFixture[str]):
    before = files(runs_dir)
    assert confirm(runs_dir, "best=2", "dry_run=true") == 0
    told = capsys.readouterr().out
    assert "confirmation 1" in told and "against none, seeds 2 to 3; it spends 3.0 %" in told
    assert "6 runs of 3 cells" in told and files(runs_dir) == before


def test_a_confirmation_from_the_first_run_to_the_next_one(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("normexp.verdicts.page.draw_figures", lambda *_: [])  # which takes time
    assert confirm(runs_dir, "best=2") == 0
    (found,) = confirmations(runs_dir)
    assert found.seeds == [2, 3] and len({*found.cells}) == 3
    for cell, of_cell in seeds(runs_dir).items():
        assert of_cell == [0, 1, *(found.seeds if cell in found.cells else [])]
    content = report(runs_dir)
    confirmed = [one for one in content["comparisons"] if one["id"].startswith("confirmation-1/")]
    assert {one["cells"][0][0] for one in confirmed} == {*found.finalists}
    assert all(one["metric"] == "test/accuracy" and one["n"] == [2, 2] for one in confirmed)
    assert all(one["verdict"] is None for one in content["comparisons"] if one not in confirmed)

    # Interrupted, and the ranking has turned since: the same cells and seeds.
    rank = confirming.rank_tries
    monkeypatch.setattr(confirming, "rank_tries", lambda *about: rank(*about)[::-1])
    lost = runs_dir / "loop" / found.finalists[0] / "seed-3"
    shutil.rmtree(lost)
    assert confirm(runs_dir, "best=2") == 0
    assert (lost / "result.json").exists() and confirmations(runs_dir) == [found]
    assert report(runs_dir) == content

    # The same command, now with other finalists: another confirmation.
    assert confirm(runs_dir, "best=2") == 0
    assert [one.seeds for one in confirmations(runs_dir)] == [[2, 3], [4, 5]]
    assert "it spends 0.8 %" in capsys.readouterr().out

    # The ranking as it was: the first confirmation again, from Python, and as it was recorded.
    monkeypatch.setattr(confirming, "rank_tries", rank)
    before = seeds(runs_dir)
    is_told = pytest.raises(UserError, match='study="loop" is being confirmed by process')
    with file_lock(runs_dir / "loop" / CONFIRM_LOCK), is_told:
        normexp.confirm_best("loop", runs_dir, best=2, replicas=2)
    shutil.rmtree(runs_dir / "loop" / found.finalists[0] / "seed-3")
    shown = normexp.confirm_best("loop", runs_dir, best=2, replicas=2)
    *_, last = commands(runs_dir)
    capsys.readouterr()
    assert main([*last.command[1:], "dry_run=true"]) == 0
    assert "confirmation 1: " in capsys.readouterr().out
    assert seeds(runs_dir) == before and len(confirmations(runs_dir)) == 2
    verdicts = [one for one in shown.comparisons if one.verdict]
    assert {one.first.best.directory.name for one in verdicts[:2]} == {*found.finalists}


def test_a_cell_without_runs_is_left_out_or_refused_with_the_command_that_trains_it(
    runs_dir: Path, capsys: pytest.CaptureFixture[str]
):
    baseline, *tries = (cell for command in commands(runs_dir) for cell in command.cells)
    shutil.rmtree(runs_dir / "loop" / tries[0] / "seed-1")
    assert confirm(runs_dir, "dry_run=true") == 0
    assert "left out: none lr=0.02 (1 of 2 runs ended)" in capsys.readouterr().out

    # A confirmation began, and then a cell of it was removed.
    asked = {}
    for command in commands(runs_dir):
        for cell, request in command.cells.items():
            if cell in (baseline, tries[1]):
                asked[cell] = replace(request, seeds=[2, 3])
    found = ConfirmRequest(baseline, [tries[1]], [2, 3])
    append_entry(runs_dir / "loop", CommandEntry("1", ["confirm"], "", asked, confirms=found))
    for cell in (tries[1], baseline):
        shutil.rmtree(runs_dir / "loop" / cell)
        assert confirm(runs_dir, "dry_run=true") == 2
        told = capsys.readouterr().err
        assert cell in told and "or confirm others" in told
        words = shlex.split(told.partition("python -m normexp.train ")[2].partition(";")[0])
        assert "replicas=2" in words and train(words) == 0
        assert seeds(runs_dir)[cell] == [0, 1]
        assert confirm(runs_dir, "dry_run=true") == 0


def test_mistakes_are_refused_before_training(runs_dir: Path, capsys: pytest.CaptureFixture[str]):
    for word, why in {
        "best=4": "3 cells with all runs and val/accuracy",
        "baseline=nope": "no cell of the study has this id or name",
        "best=0": "must be greater than 0",
    }.items():
        assert confirm(runs_dir, word) == 2
        assert why in capsys.readouterr().err
    for config in (runs_dir / "loop").glob("*/config.yaml"):
        config.write_text(config.read_text().replace("eps: 1.0e-05", "eps: 0.001"))
    assert confirm(runs_dir, "best=1") == 2
    assert "have changed since it was tried" in capsys.readouterr().err
