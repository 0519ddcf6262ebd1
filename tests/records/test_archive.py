"""A study in a zip: its runs, test samples and configs are those of the folder."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from unittest.mock import Mock
from zipfile import ZipFile

import numpy as np
import pytest
from test_records_result import make_result

from normexp.errors import UserError
from normexp.training.records import archive
from normexp.training.records.archive import Archive, main, pack_study
from normexp.training.records.files import write_json
from normexp.training.records.journal import CommandEntry, Request, append_entry
from normexp.training.records.layout import find_study, refuse_shipped, seed_dir
from normexp.training.records.result import Measured, write_result
from normexp.training.records.samples import write_samples

RIGHT = np.arange(13) % 3 == 0
LOSSES = np.linspace(0, 1, 5, dtype=np.float32)


def write_study(study: Path) -> None:
    """Two cells of two runs: of images, both with samples, and of texts, of which one has some."""
    for cell, samples in {"images": {"running": RIGHT}, "texts": {"running": LOSSES}}.items():
        for seed in (0, 1):
            run_dir = seed_dir(study / cell, seed)
            run_dir.mkdir(parents=True)
            measured = Measured({"test/loss": 0.5 + seed})
            write_result(run_dir, make_result(measured, cell_id=cell, seed=seed))
            if seed == 0 or cell == "images":
                own = ~RIGHT if seed else samples["running"]
                write_samples(run_dir, {"running": own})
            if seed == 0:
                write_json(run_dir / "evaluation.json", {"precise": {"test/loss": 0.25}})
    (study / "begun" / "seed-0").mkdir(parents=True)
    command = CommandEntry(
        "1", ["normexp-train", "lr=0.1"], "", {"images": Request(["lr"], [0, 1])}
    )
    append_entry(study, command)


def test_a_zip_holds_what_a_report_reads_of_a_study(tmp_path: Path):
    write_study(tmp_path / "mine")
    pack_study(tmp_path / "mine", tmp_path / "mine.zip")
    archive = Archive(tmp_path / "mine.zip")
    results = list(archive.results())
    assert [(result.cell_id, result.seed) for result in results] == [
        *(("images", 0), ("images", 1)),
        *(("texts", 0), ("texts", 1)),
    ]
    assert results[0].metrics == {"test/loss": 0.5, "test/loss@precise": 0.25}
    assert results[1].metrics == {"test/loss": 1.5}
    for seed, expected in enumerate((RIGHT, ~RIGHT)):
        (right,) = archive.samples("images", seed).values()
        assert right.dtype == bool and np.array_equal(right, expected)
    assert np.array_equal(archive.samples("texts", 0)["running"], LOSSES)
    assert archive.samples("texts", 1) == {}
    (command,) = archive.entries
    assert isinstance(command, CommandEntry) and command.cells["images"].seeds == [0, 1]


def test_a_zip_becomes_a_folder_again(tmp_path: Path):
    write_study(tmp_path / "mine")
    assert main(tmp_path / "mine", tmp_path / "mine.zip") == 0
    assert main(tmp_path / "mine.zip", tmp_path / "again") == 0
    assert main(tmp_path / "mine.zip", tmp_path / "again") == 2  # which exists now
    pack_study(tmp_path / "again", tmp_path / "again.zip")
    first, second = (Archive(tmp_path / name) for name in ("mine.zip", "again.zip"))
    assert list(second.results()) == list(first.results()) and second.entries == first.entries
    assert np.array_equal(second.samples("images", 0)["running"], RIGHT)


def test_torn_samples_are_named_and_the_results_stay_readable(tmp_path: Path):
    with ZipFile(tmp_path / "torn.zip", "w") as file:
        file.writestr("study.jsonl", "")
        file.writestr("results.jsonl", json.dumps(make_result(cell_id="images").to_dict()))
        file.writestr("images/samples.npz", b"PK torn")
    archive = Archive(tmp_path / "torn.zip")
    assert [result.seed for result in archive.results()] == [3]
    with pytest.raises(UserError, match="torn.zip: the samples of images are torn"):
        archive.samples("images", 3)


def test_a_zip_that_cannot_be_written_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_study(tmp_path / "mine")
    assert main(tmp_path / "mine", tmp_path / "lost" / "mine.zip") == 2
    assert f"{tmp_path}/lost/mine.zip: No such file or directory; " in capsys.readouterr().err


def test_a_folder_is_not_made_by_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_study(tmp_path / "mine")
    pack_study(tmp_path / "mine", tmp_path / "mine.zip")
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(archive, "write_result", Mock(side_effect=full))
    assert main(tmp_path / "mine.zip", tmp_path / "new" / "mine") == 2
    assert not [*(tmp_path / "new").iterdir()]


def test_another_file_and_a_second_study_of_a_name_are_refused(tmp_path: Path):
    write_study(tmp_path / "mine")
    pack_study(tmp_path / "mine", tmp_path / "mine.zip")
    with pytest.raises(UserError, match="study=mine is there twice"):
        find_study(tmp_path, "mine")
    with ZipFile(tmp_path / "mine.zip", "w") as backup:  # of the user's own
        backup.write(tmp_path / "mine" / "study.jsonl", "mine/study.jsonl")
    assert find_study(tmp_path, "mine") == tmp_path / "mine"
    refuse_shipped(tmp_path / "mine")
    for name, content in {"no.zip": b"no zip", "empty.zip": b"PK\x05\x06" + bytes(18)}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=f"{name} is not a zip of a study"):
            Archive(tmp_path / name)
