"""A finished study typed again: passed over without torch, unless something has changed."""

from __future__ import annotations

import importlib
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from normexp.cli import parse_command
from normexp.config.grid import compose_cells
from normexp.config.outcome import Outcome
from normexp.config.spec import CellSpec
from normexp.evaluate import main as evaluate
from normexp.records.logs import collected_messages, messages_to
from normexp.records.result import Status
from normexp.sweeps.log import StudyLog
from normexp.sweeps.walk import Walk
from normexp.train import main

QUICK = ["steps=4", "replicas=2", "workers=0", "norm=none"]
NORM = """
from torch import nn

class Scale(nn.Module):
    def __init__(self, num_features):
        super().__init__()
    def forward(self, x):
        return {factor} * x
"""
OWN = ["norm=custom", "norm._target_=a_package_of_a_test.norms.Scale"]


def line(tmp_path: Path, *words: str) -> list[str]:
    """The words, completed by those of QUICK with other keys."""
    own = {word.partition("=")[0] for word in words}
    quick = [word for word in QUICK if word.partition("=")[0] not in own]
    return [*quick, *words, f"runs_dir={tmp_path / 'runs'}"]


def specs(tmp_path: Path, *words: str) -> list[CellSpec]:
    return compose_cells(parse_command(line(tmp_path, *words)))


def train(tmp_path: Path, *words: str) -> int:
    return main(line(tmp_path, *words))


def ids(tmp_path: Path) -> set[str]:
    return {path.parts[-3] for path in tmp_path.glob("runs/default/*/seed-0/result.json")}


def is_passed(tmp_path: Path, *words: str) -> bool:
    """True if no cell of a command needs training, or an evaluation."""
    cells = specs(tmp_path, *words)
    with messages_to(logging.NullHandler()), collected_messages() as messages:
        outcomes = outcomes_of(cells)
    return {outcome.status for outcome in outcomes} == {Status.SKIPPED} and not messages


def outcomes_of(cells: list[CellSpec]) -> list[Outcome]:
    walk = Walk(StudyLog(cells, []))
    return [walk.outcome(position) for position in range(len(cells))]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the runs of one cell, which tests must not change."""
    root = tmp_path_factory.mktemp("trained")
    assert train(root) == 0
    return root / "runs"


def test_finished_cell_is_passed_over_until_a_seed_or_its_result_is_missing(
    tmp_path: Path, trained: Path
):
    assert not is_passed(tmp_path)
    shutil.copytree(trained, tmp_path / "runs")
    assert is_passed(tmp_path) and is_passed(tmp_path, "replicas=1", "workers=2", "study=default")
    (outcome,) = outcomes_of(specs(tmp_path))
    assert [result.seed for result in outcome.results] == [0, 1]
    assert (outcome.status, outcome.title) == ("skipped", "none on digits")
    for words in (["replicas=3"], ["seed=1"], ["lr=0.2"], ["study=other"]):
        assert not is_passed(tmp_path, *words), words
    assert outcome.directory is not None
    lock = outcome.directory / ".lock"
    lock.touch()  # something may be left over
    assert not is_passed(tmp_path)
    lock.unlink()
    assert is_passed(tmp_path)
    result = outcome.directory / "seed-1" / "result.json"
    result.write_text('{"sch')
    assert not is_passed(tmp_path)
    result.unlink()
    assert not is_passed(tmp_path)


def test_finished_sweep_typed_again_ends_without_torch(tmp_path: Path, capsys):
    words = ["-m", "norm=none,group", *QUICK[:2], f"runs_dir={tmp_path / 'runs'}"]
    assert main([*words, "workers=0"]) == 0
    first = capsys.readouterr().out
    script = (
        "import sys; from normexp.train import main; code = main(sys.argv[1:]); "
        "sys.exit(99 if 'torch' in sys.modules else code)"
    )
    shown = [word if word != "finished" else "skipped" for word in first.split()]
    for workers in (0, 2):
        command = [sys.executable, "-c", script, *words, f"workers={workers}"]
        again = subprocess.run(command, capture_output=True, text=True, check=False)
        assert again.returncode == 0, again.stderr
        assert "2 skipped" in again.stdout
        assert shown == again.stdout.split()


# --- The user's own files ------------------------------------------------------------------------


def forget_own() -> None:
    for name in [name for name in sys.modules if "_of_a_test" in name]:
        del sys.modules[name]


@pytest.fixture
def own_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A package with a norm, which its module reads from a helper; returns the helper."""
    package = tmp_path / "a_package_of_a_test"
    package.mkdir()
    (package / "__init__.py").write_text("imported = True\n")
    (package / "norms.py").write_text("from a_helper_of_a_test import Scale\n")
    helper = tmp_path / "a_helper_of_a_test.py"
    helper.write_text(NORM.format(factor=1))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield helper
    forget_own()


def test_edited_norm_is_trained_again_and_is_found_without_importing_it(
    tmp_path: Path, own_norm: Path, monkeypatch: pytest.MonkeyPatch
):
    assert train(tmp_path, *OWN) == 0
    forget_own()
    assert is_passed(tmp_path, *OWN)
    assert not [name for name in sys.modules if "_of_a_test" in name]
    package = tmp_path / "a_package_of_a_test" / "__init__.py"
    for file, text in ((own_norm, NORM.format(factor=2)), (package, "imported = 2\n")):
        before = file.read_text()
        file.write_text(text)
        assert not is_passed(tmp_path, *OWN), file
        file.write_text(before)
        assert is_passed(tmp_path, *OWN)
    first = tmp_path / "first" / "a_package_of_a_test"  # takes the place of the package
    first.mkdir(parents=True)
    (first / "__init__.py").touch()
    (first / "norms.py").write_text(NORM.format(factor=1))
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(first.parent))
        assert not is_passed(tmp_path, *OWN)
    own_norm.write_text(NORM.format(factor=2))
    assert train(tmp_path, *OWN) == 0
    assert len(ids(tmp_path)) == 2
    forget_own()
    assert is_passed(tmp_path, *OWN)


@pytest.mark.slow
def test_process_that_has_imported_a_norm_does_not_train_an_edit_of_it(
    tmp_path: Path, own_norm: Path, capsys: pytest.CaptureFixture[str]
):
    assert train(tmp_path, *OWN) == 0
    own_norm.write_text(NORM.format(factor=2))
    assert train(tmp_path, *OWN) == 2
    assert f"{own_norm} was edited after" in capsys.readouterr().err
    assert len(ids(tmp_path)) == 1
    forget_own()
    assert train(tmp_path, *OWN) == 0 and len(ids(tmp_path)) == 2
    own_norm.write_text(NORM.format(factor=3))
    for name in ("a_helper_of_a_test", "a_package_of_a_test.norms"):  # as a notebook does
        importlib.reload(sys.modules[name])
    assert train(tmp_path, *OWN) == 0 and is_passed(tmp_path, *OWN)


@pytest.mark.slow
def test_changed_text_is_trained_again(tmp_path: Path):
    text = tmp_path / "text.txt"
    words = ["data=text_file", f"data.path={text}", "data.block_size=8", "model.depth=1"]
    for content in ("what it says and how it says it; ", "how it says it and what it says; "):
        text.write_text(content * 40)
        assert not is_passed(tmp_path, *words)
        assert train(tmp_path, *words) == 0
        assert is_passed(tmp_path, *words)
    assert len(ids(tmp_path)) == 2


# --- Evaluations ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_evaluation_that_is_missing_or_has_other_samples_is_named(tmp_path: Path, capsys):
    words = ["norm=batch", "evaluate_with=[precise,batch]", "evaluate_batch_sizes=[8]"]
    few, many = "precise_samples=64", "precise_samples=96"
    assert train(tmp_path, *words, few) == 0
    for asked in (
        [*words, many],
        [*words[:2], few, "evaluate_batch_sizes=[4,8]"],
        ["norm=batch", "evaluate_with=[running,precise]", many],
    ):
        capsys.readouterr()
        assert train(tmp_path, *asked) == 0
        told = capsys.readouterr().err
        assert "normexp.evaluate run=" in told and asked[-1] in told
        assert not is_passed(tmp_path, *asked)  # still not there
    assert is_passed(tmp_path, *words, few)
    (cell,) = tmp_path.glob("runs/default/batch*")
    assert evaluate([f"run={cell}", "evaluate_with=[precise]", many]) == 0
    assert not is_passed(tmp_path, *words, few)  # there is one, and it is newer
    capsys.readouterr()
    assert train(tmp_path, *words, many) == 0
    assert "normexp.evaluate" not in capsys.readouterr().err
    assert is_passed(tmp_path, *words, many)
    (cell / "seed-1" / "evaluation.json").unlink()
    assert not is_passed(tmp_path, *words, many)
    for weights in cell.glob("seed-*/weights.pt"):
        weights.unlink()
    assert train(tmp_path, *words, many) == 0
    told = capsys.readouterr().err
    assert "without weights" in told and "normexp.evaluate" not in told


@pytest.mark.slow
def test_norm_that_an_evaluation_gives_nothing_is_passed_over(tmp_path: Path, capsys):
    words = ["norm=group", "evaluate_with=[precise,batch]"]
    assert train(tmp_path, *words) == 0
    assert is_passed(tmp_path, *words)
    assert train(tmp_path, *words, "precise_samples=96", "evaluate_batch_sizes=[8]") == 0
    assert "precise_samples=96" in capsys.readouterr().err  # not known before it is asked
    assert train(tmp_path, "norm=group", "evaluate_with=[batch]", "evaluate_batch_sizes=[8]") == 0
    assert "normexp.evaluate" not in capsys.readouterr().err  # known: it mixes no samples
