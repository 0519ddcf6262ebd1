"""The entry: files, terminal, bad input, and no torch."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from synthetic_study import make_runs, write_runs, write_study

from normexp.report import main
from normexp.reporting.options import parse_options
from normexp.reporting.serve import serve_report, stamp_of

EVIL = "</script><img src=x onerror=alert(1)>"


def test_a_report_has_its_page_figures_tables_and_verdict(tmp_path: Path, capsys):
    write_study(tmp_path, np.random.default_rng(0))
    assert main(["study=synthetic", f"runs_dir={tmp_path}"]) == 0
    folder = tmp_path / "synthetic" / "report"
    names = {path.stem for path in (folder / "figures").glob("*.svg")}
    assert {"metric_by_size_main", "heat_map_main", "improvement_main"} <= names
    assert names == {path.stem for path in (folder / "figures").glob("*.png")}
    for ending in ("csv", "md", "tex"):
        assert (folder / "tables" / f"cells.{ending}").stat().st_size > 100
    printed = capsys.readouterr().out
    assert "batch loses" in printed and "group does not depend" in printed
    with open(folder / "tables" / "cells.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["n"] for row in rows] == ["8"] * 6
    for name in ("mean", "median", "IQM"):
        row = rows[0]
        low, centre, high = (float(row[f"{name}{end}"]) for end in (" low", "", " high"))
        assert low < centre < high
        assert row[f"{name} [95 % interval]"] == f"{centre:.1f} [{low:.1f}, {high:.1f}]"
    assert not list((tmp_path / "synthetic").glob(".report-*"))


def test_a_report_is_replaced_while_the_study_goes_on(tmp_path: Path, capsys):
    words = ["study=synthetic", f"runs_dir={tmp_path}"]
    cell = write_runs(make_runs("batch", {0: 0.8}, root=tmp_path, norm_batch_size=2))
    (cell / "seed-1").mkdir()
    assert main(words) == 0
    assert "1 not ended" in capsys.readouterr().out
    (tmp_path / "synthetic" / "group-later" / "seed-0").mkdir(parents=True)
    write_runs(make_runs("batch", {1: 0.9}, root=tmp_path, norm_batch_size=8))
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "2 cells, 2 runs" in printed
    assert "not ended: group-later: 1 run begun, none ended" in printed
    page = (tmp_path / "synthetic" / "report" / "index.html").read_text()
    assert "<li>group-later: 1 run begun, none ended</li>" in page


def test_text_from_configs_and_errors_is_escaped_everywhere(tmp_path: Path):
    runs = make_runs("batch", {0: 0.8, 1: 0.9}, root=tmp_path, norm_batch_size=2, data=EVIL)
    runs += make_runs("=cmd()", {0: 0.8, 1: 0.9}, root=tmp_path, norm_batch_size=2, data=EVIL)
    write_runs(runs)
    assert main(["study=synthetic", f"runs_dir={tmp_path}"]) == 0
    folder = tmp_path / "synthetic" / "report"
    page = (folder / "index.html").read_text()
    assert EVIL not in page and "<img src=x" not in page
    assert len(re.findall("</script", page)) == len(re.findall("<script", page))
    assert "'=cmd()" in (folder / "tables" / "cells.csv").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "study is missing"),
        (["study="], "study is missing"),
        (["synthetic"], "synthetic: not of the form key=value; try study=synthetic"),
        (["study=syntetic"], "study=syntetic not found .* nearest: synthetic"),
        (["study=[synthetic,synthetic]"], "study=synthetic is named twice"),
        (["study=synthetic", "metrc=x"], "metrc: unknown key; did you mean metric?"),
        (["study=synthetic", "metric=test/acuracy"], "no run has it; .*test/accuracy"),
        (["study=synthetic", "tolerance=-1"], "tolerance=-1 is not a number of 0 or more"),
        (["study=synthetic", "tolerance=nan"], "tolerance=nan is not a number"),
        (["study=synthetic", "serve=maybe"], "serve=maybe is neither true nor false"),
        (["study=synthetic", "serve=true", "serve=true"], "serve is given twice"),
    ],
)
def test_bad_input_is_one_message(tmp_path: Path, capsys, words: list[str], message: str):
    write_runs(make_runs("batch", {0: 0.8}, root=tmp_path))
    assert main([*words, f"runs_dir={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert re.match(f"normexp: .*{message}", error) and error.count("\n") == 1
    assert not (tmp_path / "synthetic" / "report").exists()


@pytest.mark.slow
def test_two_thousand_runs_are_reported_in_half_a_minute(tmp_path: Path):
    rng = np.random.default_rng(0)
    norms = [f"norm{i}" for i in range(10)]
    for data in ("a", "b", "c", "d", "e"):
        for norm in norms:
            for size in (2, 4, 8, 32, 128):
                values = dict(enumerate(rng.normal(0.9, 0.01, 8).tolist()))
                options = {"norm_batch_size": size, "mixes_samples": True, "data": data}
                write_runs(make_runs(norm, values, root=tmp_path, **options), with_history=True)
    start = time.monotonic()
    assert main(["study=synthetic", f"runs_dir={tmp_path}"]) == 0
    assert time.monotonic() - start < 30


def test_several_studies_are_a_list():
    assert parse_options(["study=[a, b]"]).studies == ["a", "b"]
    assert parse_options(["study=a,b"]).studies == ["a", "b"]


def test_no_torch_is_imported(tmp_path: Path):
    write_runs(make_runs("batch", {0: 0.8, 1: 0.9}, root=tmp_path, norm_batch_size=2))
    script = (
        "import sys; from normexp.report import main; code = main(sys.argv[1:]); "
        "sys.exit(99 if 'torch' in sys.modules else code)"
    )
    words = ["study=synthetic", f"runs_dir={tmp_path}", "log=tensorboard"]
    command = [sys.executable, "-c", script, *words]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_serving_is_local_and_rebuilds_when_a_result_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setattr("normexp.reporting.serve.LOOK_EVERY", 0.02)
    page = tmp_path / "page"
    page.mkdir()
    (page / "index.html").write_text("one")
    stop, rebuilt = threading.Event(), threading.Event()
    study = tmp_path / "synthetic"
    server = threading.Thread(
        target=serve_report, args=(page, [study], rebuilt.set), kwargs={"stop": stop}
    )
    server.start()
    try:
        printed = ""
        while "http" not in printed:
            printed += capsys.readouterr().out
        url = printed.split()[1].rstrip(",")
        assert url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(url) as answer:
            assert answer.read() == b"one" and answer.headers["ETag"]
        assert not rebuilt.is_set()
        write_runs(make_runs("batch", {0: 0.8}, root=tmp_path))
        assert rebuilt.wait(5)
    finally:
        stop.set()
        server.join(5)
    assert not server.is_alive() and len(stamp_of([study])) == 1


def test_a_rebuild_while_serving_prints_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    write_runs(make_runs("batch", {0: 0.8, 1: 0.9}, root=tmp_path, norm_batch_size=2))

    def serve_once(directory: Path, studies: object, rebuild: Callable[[], None], *, stop: object):
        del studies, stop
        assert directory == tmp_path / "synthetic" / "report"
        capsys.readouterr()
        rebuild()

    monkeypatch.setattr("normexp.reporting.serve.serve_report", serve_once)
    assert main(["study=synthetic", f"runs_dir={tmp_path}", "serve=true"]) == 0
    line = r"\d\d:\d\d:\d\d 1 cell, 2 runs: 2 finished\n"
    assert re.fullmatch(line, capsys.readouterr().out)


def test_studies_without_a_cell_in_common_are_said_to_be_so(tmp_path: Path, capsys):
    for study, data in (("a", "digits"), ("b", "cifar10")):
        write_runs(make_runs("batch", {0: 0.8}, root=tmp_path, study=study, data=data))
    assert main(["study=[a,b]", f"runs_dir={tmp_path}"]) == 0
    assert "no cell is in both studies" in capsys.readouterr().out
