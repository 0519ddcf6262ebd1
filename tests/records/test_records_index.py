"""cells.csv: what a study was asked for, merged from lines that are only ever appended."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from normexp.records.history import CellEntry, append_cells, read_index

ASKED = CellEntry("d1", "norm=batch", [0, 1])


def test_lines_of_one_cell_add_up_and_the_latest_error_counts(tmp_path: Path):
    refused = CellEntry(
        "d1", "norm=batch", [0, 1], error='5 does not divide, "quoted",\nin two lines'
    )
    append_cells(tmp_path, [ASKED, refused])
    (cell,) = read_index(tmp_path).values()
    assert cell.error == '5 does not divide, "quoted", in two lines'
    append_cells(tmp_path, [CellEntry("d1", "norm=batch", [2], cell_id="batch-1")])
    (cell,) = read_index(tmp_path).values()
    assert (cell.seeds, cell.cell_id, cell.error) == ({0, 1, 2}, "batch-1", "")


def test_ids_of_an_edited_cell_are_kept(tmp_path: Path):
    for cell_id in ("own-1", "own-2", "own-2"):
        append_cells(tmp_path, [CellEntry("d1", "norm=own", [0], cell_id=cell_id)])
    (cell,) = read_index(tmp_path).values()
    assert (cell.cell_id, cell.earlier_ids) == ("own-2", {"own-1"})
    append_cells(tmp_path, [CellEntry("d1", "norm=own", [0], cell_id="own-1")])  # edited back
    (cell,) = read_index(tmp_path).values()
    assert (cell.cell_id, cell.earlier_ids) == ("own-1", {"own-2"})


def test_what_is_known_is_not_written_again(tmp_path: Path):
    news = [ASKED, CellEntry("d1", "norm=batch", [0, 1], cell_id="batch-1")]
    append_cells(tmp_path, news)
    before = (tmp_path / "cells.csv").read_bytes()
    append_cells(tmp_path, [*news, ASKED])
    assert (tmp_path / "cells.csv").read_bytes() == before


def test_torn_last_line_is_ignored_and_then_cut(tmp_path: Path):
    append_cells(tmp_path, [ASKED])
    path = tmp_path / "cells.csv"
    whole = path.read_bytes()
    path.write_bytes(whole + b"d2,norm=gro")
    assert list(read_index(tmp_path)) == ["d1"]
    append_cells(tmp_path, [CellEntry("d3", "norm=layer", [0])])
    assert path.read_bytes() == whole + b"d3,norm=layer,0,,\n"


def test_cell_without_known_seeds_is_listed_with_its_error(tmp_path: Path):
    append_cells(tmp_path, [CellEntry("d1", "norm=gruop", [], error="no such norm")])
    (cell,) = read_index(tmp_path).values()
    assert (cell.title, cell.seeds, cell.error) == ("norm=gruop", set(), "no such norm")


def test_study_without_an_index_and_lines_by_hand_are_no_error(tmp_path: Path):
    assert read_index(tmp_path) == {}
    (tmp_path / "cells.csv").write_text("digest,title,seeds,cell_id,error\nhello\na,b,c,d,e\n")
    assert read_index(tmp_path) == {}


def test_known_news_open_nothing_for_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    append_cells(tmp_path, [ASKED])

    def denied(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    append_cells(tmp_path, [ASKED])
    with pytest.raises(PermissionError):
        append_cells(tmp_path, [CellEntry("d2", "norm=layer", [0])])
