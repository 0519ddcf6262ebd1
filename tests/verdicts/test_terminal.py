"""What commands print, at any width."""

from __future__ import annotations

import pytest

from normexp.verdicts.terminal import open_console, print_rows

COLUMNS = ["norm batch size", "norm", "test accuracy (%)", "verdict", "why"]
ROW = ["2", "SoftDevNorm", "57.1 [53.7, 60.5]", "undecided", "seeds differ too much"]


@pytest.mark.parametrize(("width", "has_columns"), [("100", True), ("60", True), ("40", False)])
def test_no_word_is_broken(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    width: str,
    has_columns: bool,
):
    monkeypatch.setenv("COLUMNS", width)
    print_rows(open_console(), COLUMNS, [ROW], COLUMNS[:-1])
    open_console().print(" ".join(ROW * 3))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= int(width)
    assert set(" ".join([*COLUMNS, *ROW]).split()) <= set(out.replace(":", "").split())
    assert ("verdict: undecided" in out) != has_columns
    assert "57.1 [53.7, 60.5]" in out  # unbroken, since the reason can be broken


def test_numbers_are_broken_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Too narrow for both numbers on one line, wide enough for the halves of each."""
    monkeypatch.setenv("COLUMNS", "41")
    print_rows(open_console(), ["a", "b", "why"], [[ROW[2], ROW[2], ROW[4] * 2]], ["a", "b"])
    assert capsys.readouterr().out.count("57.1 [53.7, ") == 2


def test_without_a_known_width_a_row_and_a_sentence_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("COLUMNS", raising=False)
    print_rows(open_console(), COLUMNS, [[*ROW[:-1], ROW[-1] * 3]])
    open_console().print(" ".join(ROW * 3))
    table, sentence = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert "57.1 [53.7, 60.5]" in table and len(table.splitlines()[1]) > 100
    assert sentence == " ".join(ROW * 3)
