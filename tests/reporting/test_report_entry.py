"""The entry: files, page, terminal, no torch, several studies, watching, and bad input."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from contextlib import redirect_stdout
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from synthetic_study import answers_of, declare, report_of, write_cell, write_study

import normexp
from normexp.report import main
from normexp.reporting import page, publish
from normexp.reporting.metric import describe_metric

EVIL = "</script><img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """A page's tags with their attributes, and the text inside each kind of tag."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.inside = ""
        self.source = (folder / "index.html").read_text()
        self.feed(self.source)
        scripts = [attributes.get("id") for tag, attributes in self.tags if tag == "script"]
        self.data = json.loads(self.texts["script"][scripts.index("report")])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.texts.setdefault(tag, []).append("")
        self.inside = tag

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.texts[self.inside][-1] += data

    def handle_endtag(self, tag: str) -> None:  # noqa: ARG002
        self.inside = ""

    def values(self, attribute: str) -> list[str | None]:
        return [found[attribute] for _, found in self.tags if attribute in found]


def report(root: Path, *words: str, study: str = "synthetic") -> Path:
    """Runs the entry, which must succeed; returns the folder of the report."""
    declare(root, *study.strip("[]").split(","))
    expected = 130 if "watch=true" in words else 0  # ended by Ctrl-C
    assert main([f"study={study}", f"runs_dir={root}", *words]) == expected
    return root / study.strip("[]").replace(",", "+") / "report"


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips writing figures, which takes most of the time; one test writes them."""
    monkeypatch.setattr(page, "_write_figure", lambda *_: "")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Writes the report of the synthetic study; yields it and its output."""
    root, printed = tmp_path_factory.mktemp("runs"), io.StringIO()
    write_study(root, np.random.default_rng(0))
    with redirect_stdout(printed):
        assert main(["study=synthetic", f"runs_dir={root}"]) == 0
    return root / "synthetic" / "report", printed.getvalue()


def test_a_report_has_its_page_figures_tables_and_verdict(whole: tuple[Path, str]):
    folder, printed = whole
    names = {path.stem for path in (folder / "figures").glob("*.svg")}
    assert "metric_by_size_main" in names
    for files in ("*.png", "*.pdf", "*.csv", "paper/*.svg", "paper/*.pdf"):
        assert names == {path.stem for path in (folder / "figures").glob(files)}
    assert "6 cells, 48 runs: 48 finished" in printed and str(folder / "index.html") in printed
    page = Page(folder)
    assert set(page.values("data-figure")) == names == set(page.data["figures"])
    sentences = [found for _, found in page.tags if "data-norms" in found]
    kinds = ["headline loses", "loses", "cause", "independent", "better", "better"]
    assert [found["class"] for found in sentences] == kinds
    about = [json.loads(found["data-norms"]) for found in sentences]
    others = [["layer", "group"], ["layer", "batch"], ["group", "batch"]]
    assert about[1:] == [["batch"], ["batch"], *others]
    for sentence in page.texts["li"]:
        assert f"- {sentence}" in printed
    headline = page.texts["p"][1]
    assert headline.startswith("batch loses") and "(n = " not in headline
    assert page.texts["li"][0].startswith(headline.rstrip("."))
    assert not list(folder.parent.glob(".report-*"))


def test_tables_hold_the_numbers_of_the_study(whole: tuple[Path, str]):
    folder, _ = whole
    tables = {}
    for name, text in Page(folder).data["tables"].items():
        (file,) = folder.glob(f"*/{name}.csv")
        assert file.read_text() == text
        tables[name] = list(csv.DictReader(text.splitlines()))
    names = [
        "paper_test_accuracy",
        "sensitivity",
        "comparisons",
        "cells",  # nothing is outside the tests, so there is no table of that
    ]
    assert list(tables)[:4] == names
    with (folder / "tables" / "runs.csv").open() as file:
        tables["runs"] = list(csv.DictReader(file))
    points = [float(row["mean"]) for row in tables["metric_by_size_main"]]
    assert points[:4] == [float(row["mean"]) for row in tables["cells"][:4]]
    assert [row["n"] for row in tables["cells"]] == ["8"] * 6
    row = tables["cells"][0]
    low, centre, high = (float(row[f"mean{end}"]) for end in (" low", "", " high"))
    assert row["mean [95 % interval]"] == f"{centre:.1f} [{low:.1f}, {high:.1f}]"
    own = [float(run["test/accuracy"]) for run in tables["runs"] if run["norm"] == "batch"]
    assert float(row["mean"]) == pytest.approx(100 * np.mean(own[:8]))
    first = tables["sensitivity"][0]
    assert (first["norm"], first["verdict"], first["from"], first["to"]) == (
        *("batch", "loses", "128", "2"),
    )
    assert [row["verdict"] for row in tables["comparisons"]] == ["better", "better"]
    markdown = (folder / "tables" / "cells.md").read_text()
    assert not (folder / "tables" / "cells.tex").exists()  # 18 columns are no table for papers
    assert f"| {row['mean [95 % interval]']} |" in markdown
    latex = (folder / "tables" / "paper_test_accuracy.tex").read_text()
    assert r"norm & 2 & 8 & 32 & 128 \\" in latex and latex.count(r" \\") == 5


def test_report_json_and_load_report_hold_the_comparisons_of_the_page(whole: tuple[Path, str]):
    folder, printed = whole
    written = json.loads((folder / "report.json").read_text())
    loaded = normexp.load_report("synthetic", folder.parents[1])
    assert len(loaded.comparisons) == len(written["comparisons"]) == 3
    for one, row in zip(loaded.comparisons, written["comparisons"], strict=True):
        assert (one.verdict, one.margin, one.gap.n) == (row["verdict"], 1.0, 8)
        ends = [f"synthetic/{cell.directory.name}" for cell in (one.first, one.second)]
        assert [row["first"], row["second"]] == ends and set(ends) <= written["cells"].keys()
        assert (row["difference"]["low"], row["p"]) == (one.gap.low, one.p)
        assert (row["in_family"], row["family_size"], row["budget"]) == (True, 4, "epochs=3")
    assert [row["verdict"] for row in written["comparisons"]] == ["loses", "better", "better"]
    assert written["comparisons"][0]["recipes_differ_in"] == ["norm_batch_size"]
    cell = next(one for one in loaded.cells if one.norm == "batch" and one.norm_batch_size == 2)
    (of_cell,) = [
        row["metrics"]
        for name, row in written["cells"].items()
        if name.endswith(cell.directory.name)
    ]
    for name in ("test/accuracy", "val/accuracy@precise"):
        value = cell.mean(describe_metric(name))
        assert (of_cell[name]["estimate"], of_cell[name]["n"]) == (value.estimate, 8)
    (section,) = written["sections"]
    assert all(f"- {sentence}" in printed for sentence in section["sentences"])


def test_a_report_is_replaced_while_the_study_goes_on(tmp_path: Path, capsys):
    result = {"environment": {"cpu": "AMD EPYC", "cpu_count": 2}, "num_parameters": 14000}
    cell = write_cell(tmp_path, "batch", {0: 0.8}, norm_batch_size=2, result=result)
    (cell / "seed-1").mkdir()
    page = Page(report(tmp_path))
    assert not page.values("data-filter")  # nothing to choose between
    printed = capsys.readouterr().out
    measured = "Measured on CPU (AMD EPYC, 2 cores), 14,000 parameters."
    assert measured in page.texts["p"] and measured in printed and "1 not ended" in printed
    (tmp_path / "synthetic" / "group-later" / "seed-0").mkdir(parents=True)
    (tmp_path / "synthetic" / "torn" / "seed-0").mkdir(parents=True)
    (tmp_path / "synthetic" / "torn" / "seed-0" / "result.json").write_text("{")
    write_cell(tmp_path, "batch", {1: 0.9}, norm_batch_size=8)
    page = Page(report(tmp_path))
    printed = capsys.readouterr().out
    assert "2 cells, 2 runs: 2 finished; 2 not ended; 1 unreadable" in printed
    assert page.values("data-filter") == ["size"] * 2
    for words in ("group-later: 1 run", "torn/seed-0"):
        assert words in printed and any(words in item for item in page.texts["li"])


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_text_from_configs_and_errors_is_escaped_everywhere(tmp_path: Path):
    for norm in ("batch", "=cmd()"):
        write_cell(tmp_path, norm, {0: 0.8, 1: 0.9}, norm_batch_size=2, data=EVIL)
    folder = report(tmp_path)
    page = Page(folder)
    assert EVIL not in page.source and not page.values("onerror")
    assert len(re.findall("</script", page.source)) == len(re.findall("<script", page.source))
    assert EVIL in page.values("data-data")
    assert "'=cmd()" in (folder / "tables" / "cells.csv").read_text()


@pytest.mark.parametrize(
    ("norms", "words"),
    [
        ({"batch": {0: 0.8, 1: 0.8, 2: 0.8}, "group": {0: 0.91, 1: 0.9, 2: 0.92}}, "is better"),
        ({"batch": {0: 0.9}}, "one norm batch size"),
        ({"group": {0: 0.9}}, "does not depend"),
        ({"batch": {0: None}}, "batch"),
    ],
)
def test_the_headline_is_a_finding_if_there_is_one(tmp_path: Path, norms, words: str):
    for norm, accuracies in norms.items():
        write_cell(tmp_path, norm, accuracies, norm_batch_size=2)
    (section,) = report_of(tmp_path).sections
    assert section.headline is not None and words in section.headline.claim


CPU = {"cpu": "AMD EPYC", "cpu_count": 2}
GPU = {"cpu": "AMD EPYC", "cpu_count": 16, "gpu": "NVIDIA H100"}


@pytest.mark.parametrize(
    ("places", "config", "words"),
    [
        ([CPU], {"precision": "64-true"}, "CPU (AMD EPYC, 2 cores), float64, 14,000 parameters"),
        ([GPU], {"matmul_precision": "high", "devices": 4},
         "GPU (4 x NVIDIA H100), float32 with matmul_precision=high, 14,000 parameters"),
        ([CPU, GPU], {}, "CPU (AMD EPYC, 2 cores), float32, GPU (NVIDIA H100), float32, "
         "14,000 to 14,001 parameters"),
    ],
)  # fmt: skip
def test_an_answer_names_what_it_was_measured_on(tmp_path: Path, places, config, words: str):
    for number, place in enumerate(places):
        result = {"environment": place, "num_parameters": 14000 + number}
        options = {"norm_batch_size": 2 + 6 * number, "precision": "32-true", **config}
        write_cell(tmp_path, "batch", {0: 0.9}, result=result, **options)
    (answer,) = answers_of(tmp_path)
    assert answer.measured_on == words


# Several studies


@pytest.mark.usefixtures("undrawn")
def test_studies_are_shown_side_by_side_and_verdicts_stay_within_one(tmp_path: Path, capsys):
    for study, level in (("old", 0.9), ("new", 0.88)):
        for norm in ("batch", "group"):
            write_cell(tmp_path, norm, {0: level, 1: level + 0.01}, study=study)
    (answer,) = answers_of(tmp_path, "old", "new")
    pairs = [(one.norm, one.reference) for one in answer.comparisons]
    assert pairs == [("group · new", "batch · new"), ("group · old", "batch · old")]
    assert report(tmp_path, study="[old,new]").parent.name == "old+new"
    assert "group · new" in capsys.readouterr().out


# Watching


@pytest.mark.usefixtures("undrawn")
def test_a_watched_page_is_written_anew_and_reloads_itself_until_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    write_cell(tmp_path, "batch", {0: 0.8, 1: 0.9}, norm_batch_size=2)
    folder = tmp_path / "synthetic" / "report"
    pages, looks = [], 0

    def look_again(_: float) -> None:
        nonlocal looks
        looks += 1
        pages.append(Page(folder))
        if looks == 1:
            write_cell(tmp_path, "group", {0: 0.8, 1: 0.9})
        elif looks == 2:
            (tmp_path / "synthetic" / "broken" / "seed-0").mkdir(parents=True)
        elif looks == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(publish.time, "sleep", look_again)
    assert report(tmp_path, "watch=true") == folder
    reloads = ["reload" in page.values("id") for page in [*pages, Page(folder)]]
    assert reloads == [True, True, True, False]  # the page that stays behind stands still
    assert "location.reload" not in Page(folder).source.partition('id="report"')[0]
    assert "group" not in pages[0].values("data-norm") and "group" in pages[1].values("data-norm")
    lines = re.findall(r"\d\d:\d\d:\d\d (.*)", capsys.readouterr().out)
    assert lines == ["2 cells, 4 runs: 4 finished"]


@pytest.mark.usefixtures("undrawn")
def test_a_watched_report_has_intervals_until_every_declared_seed_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cells = [
        write_cell(tmp_path, norm, {k: level + 0.001 * k**power for k in range(6)})
        for norm, level, power in (("batch", 0.9, 1), ("group", 0.8, 1.2))
    ]
    declare(tmp_path, "synthetic")
    last = cells[1] / "seed-5" / "result.json"
    content, looks = last.read_text(), []
    last.unlink()

    def look_again(_: float) -> None:
        shown = json.loads((tmp_path / "synthetic" / "report" / "report.json").read_text())
        (comparison,) = shown["comparisons"]
        looks.append((comparison["verdict"], comparison["n"], comparison["margin_rule"]))
        if len(looks) > 1:
            raise KeyboardInterrupt
        last.write_text(content)

    monkeypatch.setattr(publish.time, "sleep", look_again)
    assert main(["study=synthetic", f"runs_dir={tmp_path}", "watch=true"]) == 130
    assert looks == [(None, 5, 1), ("worse", 6, 1)]


@pytest.mark.usefixtures("undrawn")
def test_watching_begins_before_there_is_a_result(tmp_path: Path, monkeypatch, capsys):
    looks = []

    def look_again(_: float) -> None:
        looks.append(1)
        if len(looks) > 1:
            raise KeyboardInterrupt
        write_cell(tmp_path, "batch", {0: 0.8, 1: 0.9})

    monkeypatch.setattr(publish.time, "sleep", look_again)
    assert report(tmp_path, "watch=true").is_dir()
    printed = capsys.readouterr().out
    assert printed.index("waiting for the first result of synthetic") < printed.index("2 finished")


# Refusals


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["study=syntetic"], "study=syntetic not found .* nearest: synthetic"),
        (["study=synthetic", "metric=test/acuracy"], "no run has it; .*test/accuracy"),
    ],
)
def test_bad_input_is_one_message(tmp_path: Path, capsys, words: list[str], message: str):
    write_cell(tmp_path, "batch", {0: 0.8})
    assert main([*words, f"runs_dir={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert re.match(f"normexp: .*{message}", error) and error.count("\n") == 1
    assert not (tmp_path / "synthetic" / "report").exists()


def test_a_machine_that_cannot_write_drawings_gets_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    write_cell(tmp_path, "batch", {0: 0.8, 1: 0.9})
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    for name in ("page", "publish"):
        monkeypatch.delitem(sys.modules, f"normexp.reporting.{name}")
    folder = report(tmp_path)
    assert "vl_convert is not installed" in capsys.readouterr().err
    assert (folder / "tables" / "cells.csv").is_file() and not (folder / "index.html").exists()


def test_a_machine_without_torch_that_cannot_draw_gets_the_tables(tmp_path: Path):
    write_study(tmp_path, np.random.default_rng(0))
    script = (  # an import of these packages fails
        "import sys; sys.modules |= dict.fromkeys(['torch', 'altair']); "
        "from normexp.report import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", script, "study=synthetic", f"runs_dir={tmp_path}"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0 and "cells" in run.stdout, run.stderr
    assert "altair is not installed" in run.stderr and "Traceback" not in run.stderr
    folder = tmp_path / "synthetic" / "report"
    assert (folder / "tables" / "cells.csv").is_file()
    assert not (folder / "index.html").exists()
