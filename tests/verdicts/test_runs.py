"""Reading a study: unended, torn, foreign and evaluated runs; and its numbers as text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from synthetic_study import write_cell, write_study

import normexp
from normexp.errors import UserError
from normexp.status import main as status_main
from normexp.training.records.archive import pack_study
from normexp.training.records.files import write_json
from normexp.training.studies.rows import read_studies
from normexp.verdicts.interval import Interval
from normexp.verdicts.metric import Estimate


@pytest.fixture
def cell(tmp_path: Path) -> Path:
    """A cell with two finished seeds."""
    return write_cell(tmp_path, "batch", {0: 0.8, 1: 0.9}, knobs={"eps": 1e-5, "dims": [1, 2]})


def test_a_study_is_a_table_with_sizes_as_numbers(tmp_path: Path, cell: Path):
    write_cell(tmp_path, "batch", {0: 0.7}, norm_batch_size=2, study="other")
    content = {
        "running": {"test/accuracy": 0.1},  # what the training recorded stands
        "precise": {"test/accuracy": 0.85, "num_samples": 4096},
        "gap": {"norm1": {"mean_shift": {"mean": 0.1}}},
    }
    write_json(cell / "seed-0" / "evaluation.json", content)
    runs = normexp.load_study(["synthetic", "other"], tmp_path)
    assert runs.loc[0, ["test/accuracy", "test/accuracy@precise"]].tolist() == [0.8, 0.85]
    assert not [name for name in runs if "num_samples" in name or "gap" in name]
    means = runs.groupby("norm_batch_size")["test/accuracy"].mean()
    assert means.to_dict() == pytest.approx({2: 0.7, 128: 0.85})
    assert len(normexp.load_study("synthetic", tmp_path)) == 2


def corrupt(file: Path, how: str) -> None:
    if how == "torn":
        file.write_text(file.read_text()[:50])
    elif how == "foreign":
        write_json(file, {"loss": 1})
    else:
        content = json.loads(file.read_text())
        del content["derived"]["batch_size"]
        write_json(file, content)


@pytest.mark.parametrize("how", ["torn", "foreign", "without sizes"])
def test_what_cannot_be_read_and_what_has_not_ended_are_lines(tmp_path: Path, cell: Path, how: str):
    corrupt(cell / "seed-1" / "result.json", how)
    (tmp_path / "synthetic" / "later" / "seed-0").mkdir(parents=True)
    (cell / "seed-2").mkdir()
    records = read_studies(tmp_path, ["synthetic"])
    assert [run.seed for run in records.runs] == [0]
    torn, waiting = records.problems
    assert "seed-1" in torn and "\n" not in torn
    assert waiting == "later: 1 run begun, none ended"


def test_studies_without_a_readable_result_are_refused(tmp_path: Path, cell: Path):
    for seed in (0, 1):
        corrupt(cell / f"seed-{seed}" / "result.json", "torn")
    (tmp_path / "young" / "cell" / "seed-0").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "study.jsonl").touch()
    words = {"synthetic": "seed-0", "young": "1 run begun, none ended", "empty": "has no runs"}
    for name, problem in words.items():
        with pytest.raises(UserError, match=f"study={name} .*{problem}"):
            read_studies(tmp_path, [name])


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((1.21, 0.6, 1.9), "1.2 [0.6, 1.9]"),
        ((0.1, 0.05, 0.15), "0.10 [0.05, 0.15]"),
        ((0.8, 0.03, 1.6), "0.80 [0.03, 1.60]"),  # a bound off 0 is not shown as 0
        ((0.0, -0.01, 0.01), "0.00 [-0.01, 0.01]"),
        ((5e-7, 4e-7, 6e-7), "5.00e-07 [4.00e-07, 6.00e-07]"),
        ((1.23, None, None), "1.2"),
        ((-1e-15, None, None), "0.0"),
        ((None, None, None), "-"),
    ],
)
def test_digits_follow_the_width_of_the_interval(values: tuple, text: str):
    assert str(Estimate(Interval(*values, 8), 1)) == text


def test_a_study_that_ships_as_a_zip_has_the_report_of_its_folder(tmp_path: Path):
    runs, shipped = tmp_path / "runs", tmp_path / "shipped"
    write_study(runs)
    shipped.mkdir()
    pack_study(runs / "synthetic", shipped / "synthetic.zip")
    before, after = (normexp.load_report("synthetic", folder) for folder in (runs, shipped))
    assert [one.row for one in after.comparisons] == [one.row for one in before.comparisons]
    assert len(after.comparisons) == 9 and after.counts == before.counts
    assert status_main(["study=synthetic", f"runs_dir={shipped}"]) == 2


def test_cells_that_were_copied_without_their_commands_have_no_command_to_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    cell = write_cell(tmp_path, "batch", [0.8, 0.9])
    (cell / "seed-0" / "result.json").unlink()
    assert status_main(["study=synthetic", f"runs_dir={tmp_path}"]) == 0
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert last_line.endswith("synthetic: 2 runs of 1 cell: 1 finished, 1 not started")


def test_a_value_that_was_not_typed_is_the_recorded_default(tmp_path: Path):
    for knobs in ({}, {"momentum": 0.3}):
        write_cell(tmp_path, "batch", {0: 0.8}, knobs=knobs, defaults={"norm.momentum": 0.1})
    assert [*normexp.load_study("synthetic", tmp_path)["norm.momentum"]] == [0.1, 0.3]
    (slice_,) = normexp.load_report("synthetic", tmp_path).slices
    assert slice_.arms == ["batch", "batch momentum=0.3"]


def test_a_setting_that_acts_through_derived_values_alone_stays_known(tmp_path: Path):
    for half_life in (20, 2000):
        write_cell(tmp_path, "batch", {0: 0.8, 1: 0.9}, knobs={"half_life": half_life})
    (slice_,) = normexp.load_report("synthetic", tmp_path).slices
    assert slice_.arms == ["batch half_life=20", "batch half_life=2000"]
