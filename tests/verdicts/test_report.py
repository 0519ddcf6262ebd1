"""What a report prints: headlines, tables, JSON; and numbers that may not move."""

from __future__ import annotations

import json
from dataclasses import replace
from html import escape
from pathlib import Path

import numpy as np
import pytest
from scipy import stats as scipy_stats
from synthetic_study import cell_of, find, report_of_cells, write_cell, write_study

import normexp
from normexp.errors import UserError
from normexp.report import main
from normexp.training.records.archive import pack_study, unpack_study
from normexp.training.records.journal import CommandEntry, Request, append_entry
from normexp.training.studies.report import read_report
from normexp.verdicts.compare import ADDED
from normexp.verdicts.report import Report, to_json
from normexp.verdicts.rows import RefusedCell
from normexp.verdicts.terminal import print_report

# Of the report at 3c1ad04, where every verdict was a sentence.
GOLDEN = {
    ("batch", 2): (86.92794018501206, 86.39046122901435, 87.4561910254061),
    ("batch", 128): (90.40387632046505, 89.81979887960529, 90.9724819361508),
    ("layer", 2): (90.56913832568549, 89.90885349717118, 91.20933830823023),
}
GOLDEN_GAPS = {  # at the smallest size; of scipy.stats.ttest_ind(..., equal_var=False)
    ("batch at 2", "batch at 128"): (-3.475936135452983, -4.188339236815218, -2.763533034090748),
    ("layer", "batch"): (3.641198140673424, 2.87584337288648, 4.406552908460369),
    ("group", "batch"): (3.454884387096854, 2.829830742799394, 4.079938031394314),
}

TUNED_MEAN = (88.11249999999994, 84.88415699376841, 90.99985157718673)
TUNED_GAP = (-0.07083333333334584, -3.194700841674801, 3.0530341750081496)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    root = tmp_path_factory.mktemp("runs")
    write_study(root)
    return read_report(root, ["synthetic"])


def test_means_and_differences_are_those_of_before(report: Report):
    (slice_,) = report.slices
    for (norm, size), expected in GOLDEN.items():
        found = slice_.lines[norm][size].mean
        assert (found.estimate, found.low, found.high) == pytest.approx(expected, abs=1e-9)
    for names, expected in GOLDEN_GAPS.items():
        gap = next(c.gap for c in report.comparisons if (c.arm, c.against) == names)
        assert (gap.estimate, gap.low, gap.high) == pytest.approx(expected, abs=1e-9)


def test_tuned_means_over_test_samples_are_those_of_before():
    rng, cells = np.random.default_rng(1), []
    hard = rng.normal(size=400)
    for norm in ("batch", "group"):
        for place, lr in enumerate((0.03, 0.1, 0.3)):
            effect = rng.normal(0, 0.1, 6)
            rights = {
                seed: (1.5 + 0.2 * (place == 1) + effect[seed] + hard + rng.normal(size=400)) > 0
                for seed in range(6)
            }
            means = {seed: float(right.mean()) for seed, right in rights.items()}
            cells.append(cell_of(norm, means, lr=lr, samples=rights))
    report = report_of_cells(*cells)
    gap, mean = find(report, "group").gap, report.slices[0].lines["batch"][128].mean
    assert (mean.estimate, mean.low, mean.high) == pytest.approx(TUNED_MEAN, abs=1e-9)
    assert (gap.estimate, gap.low, gap.high) == pytest.approx(TUNED_GAP, abs=1e-9)


def test_the_terminal_answers_the_sweep_first_in_25_lines(capsys):
    rng = np.random.default_rng(6)
    sizes = {2: 0.85, 8: 0.88, 32: 0.89, 64: 0.895, 128: 0.9}
    cells = [
        cell_of("batch", (mean + 0.002 * rng.normal(size=4)).tolist(), norm_batch_size=size)
        for size, mean in sizes.items()
    ]
    norms = ("layer", "group", "instance")
    cells += [cell_of(norm, (0.9 + 0.002 * rng.normal(size=4)).tolist()) for norm in norms]
    print_report(report_of_cells(*cells))
    first, scope, *lines = capsys.readouterr().out.splitlines()
    assert first == "At 2, batch norm loses 5.2 pp against 128; 3 of 4 norms may lead."
    assert "resnet on cifar10, batch size 128" in scope and "n = 4 seeds" in scope
    at_2 = [number for number, line in enumerate(lines) if line.split()[:2] == ["2", "group"]]
    assert at_2[0] + 2 <= 25, "\n".join(lines)


def test_the_json_holds_the_rows_of_the_terminal(report: Report):
    content = json.loads(json.dumps(to_json(report), allow_nan=False))
    rows = [(one["arm"], one["against"], one["verdict"]) for one in content["comparisons"]]
    assert rows == [(one.arm, one.against, one.verdict) for one in report.comparisons]
    ids = {cell for one in content["comparisons"] for side in one["cells"] for cell in side}
    assert ids == {cell.directory.name for cell in report.cells}
    assert content["slices"][0]["headline"] == report.headline(report.slices[0])
    for table in report.tables_of(report.slices[0]):
        rows = content["tables"][table.name]["rows"]
        assert [[*row.values()] for row in rows] == table.frame.to_numpy().tolist()
    assert len(repr(report)) < 100


def test_sizes_stand_in_order_also_where_a_norm_lacks_one():
    cells = [cell_of("batch", [0.8, 0.9], norm_batch_size=size) for size in (2, 32)]
    cells += [cell_of("other", [0.8, 0.9], norm_batch_size=8, mixes_samples=True)]
    table, *_ = report_of_cells(*cells).tables
    assert list(table.frame) == ["norm", "2", "8", "32", "n"]


def test_an_undeclared_norm_that_mixes_nothing_is_compared_once_per_size():
    scores = np.linspace(0.8, 0.82, 8)
    batch = [cell_of("batch", [*scores], norm_batch_size=size, lr=0.1) for size in (2, 32)]
    own = cell_of("own", [*(0.1 + scores**1.1)], lr=0.1)
    place = own[0].directory.parents[1] / "own-n2"
    twin = [replace(run, cell_id=place.name, directory=place / run.directory.name) for run in own]
    report = report_of_cells(*batch, own, twin)
    small, large = (one for one in report.comparisons if one.arm == "own")
    assert small.verdict == large.verdict == "better" and small.gap.n == 8


def test_what_is_lost_has_a_row_with_its_reason(capsys):
    cells = [
        cell_of("batch", [0.9, None, 0.1, 0.9], failed=[3]),
        cell_of("group", [0.9, 0.9, 0.92, 0.93]),
    ]
    for run in cells[1]:
        run.measured["traits.mixes_samples_in_evaluation"] = True
    refused = [RefusedCell("norm=broken", "no such norm")]
    report = report_of_cells(*cells, refused=refused)
    (lost,) = [table for table in report.tables if table.name == "lost"]
    rows = dict(zip(lost.frame["what"], lost.frame["why"], strict=True))
    assert rows.pop("refused") == "refused: no such norm"
    assert rows.pop("evaluated in batches").endswith("metrics are of 128")
    assert rows == {"failed": "CUDA out of memory", "diverged": "", "at chance": ""}
    print_report(report)
    assert "at chance" in capsys.readouterr().out
    assert report.counts == "2 cells, 8 runs: 6 finished, 1 diverged, 1 failed; 1 cell refused"


def test_causes_of_a_drop_are_three_numbers_that_add_up():
    def at(size: int, running: float, precise: float, own_share: float) -> list:
        return [
            run
            for seed in range(4)
            for run in cell_of(
                "batch",
                {seed: 0.5},
                norm_batch_size=size,
                metrics={
                    "test/accuracy": running + 0.001 * seed,
                    "test/accuracy@precise": precise + 0.001 * seed,
                    "test/accuracy@own_share": own_share + 0.001 * seed**2,
                },
            )
        ]

    report = report_of_cells(at(2, 0.8, 0.83, 0.87), at(128, 0.9, 0.9, 0.9))
    (causes,) = report.causes
    terms = {name: term.estimate for name, term in causes.terms.items()}
    expected = {"training noise": 3.0, "own share": 4.0, "averages": 3.0}
    assert terms == pytest.approx(expected)
    assert sum(terms.values()) == pytest.approx(causes.drop.estimate)
    assert "causes" in [table.name for table in report.tables]


def test_seeds_of_a_later_command_are_those_that_were_added(tmp_path: Path):
    for norm, mean in (("batch", 0.9), ("group", 0.95)):
        noise = np.random.default_rng(int(100 * mean)).normal(0, 0.002, 4)
        write_cell(tmp_path, norm, dict(enumerate(mean + noise)))
    cells = [path.name for path in (tmp_path / "synthetic").glob("*-*")]
    for number, seeds in enumerate(([0, 1], [0, 1, 2, 3])):
        asked = {cell: Request([], seeds) for cell in cells}
        entry = CommandEntry(str(number), ["normexp-train"], "one", asked)
        append_entry(tmp_path / "synthetic", entry)
    one = find(normexp.load_report("synthetic", tmp_path), "group")
    assert one.is_extended and one.row["verdict"] == "better†"
    report = normexp.load_report("synthetic", tmp_path)
    tables = report.tables
    assert all("seeds were added" in table.note for table in tables if ADDED in str(table.frame))
    assert report.headline(report.slices[0]).endswith(f"{ADDED}.")
    assert main([f"runs_dir={tmp_path}"]) == 0
    assert "seeds were added" in (tmp_path / "index.html").read_text()


def test_the_points_of_a_search_are_those_of_the_same_words(tmp_path: Path):
    """Another search of the same study, of other points, is not mixed with them."""

    def ask(norm: str, lr: float, seeds: list[int]) -> Request:
        return Request([f"norm={norm}", "batch_size=8", f"lr={lr}"], seeds, {"lr": lr})

    places = {}
    for norm, lr in (("batch", 0.1), ("group", 0.3)):
        cell = write_cell(
            tmp_path, norm, {seed: 0.9 + lr * seed**2 / 1e3 for seed in range(4)}, lr=lr
        )
        places[cell.name] = norm, lr
    for number, rates in enumerate(((0.1, 1), (0.03, 0.1, 0.3, 1.0))):
        words = ["normexp-tune", f"lr=choice{rates}"]
        tried = {
            f"{norm}-{lr}": ask(norm, lr, [1000, 1001])
            for norm in ("batch", "group")
            for lr in rates
        }
        trial = CommandEntry(f"t{number}", words, "one", tried, ["lr"])
        append_entry(tmp_path / "synthetic-search", trial)
    chosen = {cell: ask(*place, [0, 1, 2, 3]) for cell, place in places.items()}
    append_entry(tmp_path / "synthetic", CommandEntry("f", words, "one", chosen, ["lr"]))
    report = normexp.load_report("synthetic", tmp_path)
    (search,) = {cell.search for cell in report.cells}
    assert search is not None and find(report, "group").verdict == "tie"
    assert search.rates == [0.03, 0.1, 0.3, 1.0]
    shipped, again = tmp_path / "shipped", tmp_path / "again"
    shipped.mkdir()
    pack_study(tmp_path / "synthetic", shipped / "synthetic.zip")
    unpack_study(shipped / "synthetic.zip", again / "synthetic")
    for folder in (shipped, again):
        assert find(normexp.load_report("synthetic", folder), "group").verdict == "tie"


def test_bad_input_is_one_message(tmp_path: Path):
    write_cell(tmp_path, "batch", {0: 0.8, 1: 0.9})
    with pytest.raises(UserError, match="no run has it; the runs have test/accuracy"):
        read_report(tmp_path, ["synthetic"], metric="test/acuracy")
    with pytest.raises(UserError, match="no cell has this norm; there are batch"):
        read_report(tmp_path, ["synthetic"], reference="layer")


@pytest.mark.slow
def test_comparisons_of_a_real_study_are_those_of_scipy(tmp_path: Path):
    sweep = ["-m", "norm=batch,group", "norm_batch_size=2,32", "steps=10,30", "replicas=4"]
    normexp.run([*sweep, "study=real", f"runs_dir={tmp_path}"])
    report = normexp.load_report("real", tmp_path)
    # At each budget: batch norm at 2 against 32, and group norm against it at both sizes.
    assert len(report.comparisons) == 6 and report.counts == "6 cells, 24 runs: 24 finished"
    for one in report.comparisons:
        first, second = (np.array([*side.values.values()]) for side in (one.first, one.second))
        test = scipy_stats.ttest_ind(first, second, equal_var=False).confidence_interval(0.95)
        assert one.gap.estimate == pytest.approx(first.mean() - second.mean())
        assert one.gap.low <= test.low + 1e-9 and one.num_samples > 100  # over test samples too


@pytest.mark.slow
def test_a_watched_report_is_written_anew_until_ctrl_c(tmp_path: Path, monkeypatch, capsys):
    pages = []

    def later(_seconds: float) -> None:
        page = tmp_path / "synthetic" / "report" / "index.html"
        pages.append(page.read_text() if page.exists() else "")
        if len(pages) == 1:  # waits for the first result
            write_cell(tmp_path, "batch", {0: 0.8, 1: 0.9})
        elif len(pages) == 2:
            write_cell(tmp_path, "group", {0: 0.7, 1: 0.75})
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", later)
    assert main(["study=synthetic", f"runs_dir={tmp_path}", "watch=true"]) == 130
    assert pages[0] == "" and ">group<" not in pages[1] and ">group<" in pages[2]
    assert 'http-equiv="refresh"' in pages[2]
    final = (tmp_path / "synthetic" / "report" / "index.html").read_text()
    assert 'http-equiv="refresh"' not in final and "2 cells, 4 runs" in capsys.readouterr().out


def test_without_a_study_the_report_lists_all_and_links_their_pages(tmp_path: Path):
    write_study(tmp_path)
    (name,) = [path.name for path in tmp_path.iterdir()]
    broken = tmp_path / "broken" / "cell" / "seed-0" / "result.json"
    broken.parent.mkdir(parents=True)
    broken.write_text("{")
    assert main([f"runs_dir={tmp_path}"]) == 0
    page, report = (tmp_path / "index.html").read_text(), tmp_path / name / "report"
    headline = json.loads((report / "report.json").read_text())["slices"][0]["headline"]
    assert f'<a href="{name}/report/index.html">' in page and escape(headline) in page
    assert "broken has no readable result" in page and 'href="broken' not in page
    made = (report / "index.html").stat().st_mtime_ns
    assert main([f"runs_dir={tmp_path}"]) == 0
    assert (report / "index.html").stat().st_mtime_ns == made  # up to date
