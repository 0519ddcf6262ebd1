"""Records that contradict themselves are told first, and no verdict rests on them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from synthetic_study import report_of, write_cell

from normexp.records.samples import write_samples
from normexp.report import main
from normexp.reporting import page as page_module


def edited(path: Path, **changes: object) -> None:
    result = json.loads(path.read_text())
    for key, value in changes.items():
        result[key] = {**result[key], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(result))


def edit_accuracy(cell: Path) -> None:
    edited(cell / "seed-2" / "result.json", metrics={"test/accuracy": 0.95})


def leave_the_range(cell: Path) -> None:
    (cell / "seed-2" / "samples.npz").unlink()
    edited(cell / "seed-2" / "result.json", metrics={"test/accuracy": 1.2})


def copy_a_run(cell: Path) -> None:
    shutil.rmtree(cell / "seed-3")
    shutil.copytree(cell / "seed-1", cell / "seed-3")
    edited(cell / "seed-3" / "result.json", seed=3)


def change_the_code(cell: Path) -> None:
    edited(cell / "seed-2" / "result.json", environment={"code_version": "two"})


def cut_the_curves(cell: Path) -> None:
    path = cell / "seed-2" / "metrics.csv"
    path.write_bytes(path.read_bytes()[:-3])


@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        (cut_the_curves, "seed 2: metrics.csv is torn at line "),
        (edit_accuracy, "seed 2: result.json has test/accuracy=0.95, samples.npz "),
        (leave_the_range, "seed 2: test/accuracy=1.2 is outside the range of the metric"),
        (copy_a_run, "seeds 1 and 3 have the same metrics and curves"),
        (change_the_code, "its runs are of 2 versions of the code"),
    ],
)
def test_what_was_tampered_with_is_told_first(
    tmp_path: Path, monkeypatch, capsys, tamper: Callable[[Path], None], words: str
):
    rng = np.random.default_rng(0)
    cells = {}
    for norm, level in (("batch", 0.6), ("group", 0.8), ("layer", 0.8)):
        counts = 400 * level + np.array([0, 3, -2, 5, -1])
        right = np.array([rng.permutation(400) < count for count in counts])
        values = dict(enumerate(map(float, right.mean(axis=1))))
        cells[norm] = write_cell(tmp_path, norm, values, with_history=True)
        for seed, row in enumerate(right):
            write_samples(cells[norm] / f"seed-{seed}", {"running": row})
    kinds = {one.first.norm: one.kind for one in report_of(tmp_path).comparisons}
    assert kinds == {"group": "better", "layer": "better"}
    tamper(cells["group"])
    report = report_of(tmp_path)
    kinds = {one.first.norm: one.kind for one in report.comparisons}
    assert kinds == {"group": "doubtful", "layer": "better"}
    (line,) = report.doubts
    assert line.startswith(f"synthetic/{cells['group'].name}: {words}")
    monkeypatch.setattr(page_module, "_write_figure", lambda *_: "")
    assert main(["study=synthetic", f"runs_dir={tmp_path}"]) == 0
    assert line in capsys.readouterr().out.splitlines()[0]
    page = (report.directory / "index.html").read_text()
    assert page.index("Contradiction, no verdict rests on it") < page.index(report.counts)
