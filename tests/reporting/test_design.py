"""What the design of a study allows a report to say: grids of rates, searches, declared seeds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from normexp.records.history import CommandEntry, EndEntry, SearchEntry, append_entries
from synthetic_study import report_of, write_cell

from normexp.records.paths import list_seeds
from normexp.reporting.metric import RULE
from normexp.reporting.publish import draw
from normexp.reporting.report import read_report
from normexp.reporting.sentences import Claim
from normexp.status import main as status

RATES = (0.03, 0.1, 0.3)


def group_of(root: Path) -> Claim:
    sections = report_of(root).sections
    claims = [claim for section in sections for one in section.answers for claim in one.sentences]
    return next(claim for claim in claims if claim.norms == ["group"] and claim.comparison)


def write_grid(
    root: Path, norm: str, levels: Mapping[float, float], *, n: int = 8, seed: int = 0
) -> list[Path]:
    rng = np.random.default_rng(seed)
    return [
        write_cell(root, norm, dict(enumerate(rng.normal(level, 0.005, n))), lr=lr)
        for lr, level in levels.items()
    ]


def write_grids(root: Path, ahead: float, *, rates: tuple[float, ...] = RATES) -> list[Path]:
    levels = dict(zip(RATES, (0.80, 0.90, 0.85), strict=True))
    write_grid(root, "batch", levels)
    return write_grid(root, "group", {lr: levels[lr] + ahead for lr in rates}, seed=1)


def test_a_complete_grid_is_cross_fitted_and_judged(tmp_path: Path):
    write_grids(tmp_path, 0.03)
    one = group_of(tmp_path)
    assert one.kind == "better" and "lr=" not in one.claim
    assert "tuned over 3 rates: 4 of 8 seeds choose, the others report" in one.text
    assert "optimism" not in one.text and "edge" not in one.text
    values = [[cell.values(one.comparison.part.metric)[s] for s in range(8)]
              for cell in (one.comparison.first, one.comparison.second)]  # fmt: skip
    gap = np.mean(values[0]) - np.mean(values[1])  # one rate is always chosen
    assert one.comparison.gap.estimate == pytest.approx(gap)


def test_tables_and_figures_of_a_grid_show_the_cross_fitted_value(tmp_path: Path):
    """Two rates that are equally good: the better mean of the two is no estimate of either."""
    rng = np.random.default_rng(4)
    for norm, size in (("batch", 2), ("batch", 128), ("group", 128)):
        for lr in RATES:
            values = dict(enumerate(rng.normal(0.9, 0.02, 8)))
            write_cell(tmp_path, norm, values, lr=lr, norm_batch_size=size)
    drawing = draw(report_of(tmp_path))
    (part,) = drawing.report.slices
    cell = part.smallest["group"]
    tuned, plain = part.mean(cell), cell.mean(part.metric)
    assert tuned.estimate == pytest.approx(part.tuned(cell).values.mean()) != plain.estimate
    shown = f"{tuned.estimate:.1f} ["
    tables = {table.name: table for table in drawing.tables}
    paper = tables["paper_test_accuracy"]
    assert shown in str([r for r in paper.rows if r["norm"] == "group"])
    assert "Learning rates: tuned over 3 rates" in paper.note
    means = [figure.table["mean"] for figure in drawing.figures if "mean" in figure.table]
    assert any(tuned.estimate in set(column) for column in means)


def test_a_best_rate_at_an_edge_is_said(tmp_path: Path):
    for norm, seed in (("batch", 0), ("group", 1)):
        write_grid(tmp_path, norm, dict(zip(RATES, (0.8, 0.85, 0.9), strict=True)), seed=seed)
    text = group_of(tmp_path).text
    assert "best rate of group at an edge of the grid in 100 % of splits" in text
    tables = {table.name: table for table in draw(report_of(tmp_path)).tables}
    assert "†" in str(tables["paper_test_accuracy"].rows)


def test_an_incomplete_grid_has_no_verdict(tmp_path: Path):
    cells = write_grids(tmp_path, 0.03)
    (cells[0] / "seed-3" / "result.json").unlink()
    one = group_of(tmp_path)
    assert one.kind == "search" and one.comparison.gap.low > 0
    assert "; no verdict while the search of learning rates is incomplete (" in one.text


def test_norms_with_other_rates_are_not_compared(tmp_path: Path):
    write_grids(tmp_path, 0.03, rates=RATES[:2])
    one = group_of(tmp_path)
    words = "searched lr=2 rates from 0.03 to 0.1 and 3 rates from 0.03 to 0.3"
    assert one.kind == "unlike" and words in one.text


@pytest.mark.parametrize("place", ["synthetic", "synthetic-search"])
def test_one_search_and_then_fresh_seeds_has_no_verdict(tmp_path: Path, place: str):
    for norm, lr, level in (("batch", 0.1, 0.9), ("group", 0.3, 0.95)):
        values = dict(enumerate(level + 0.00001 * np.arange(8) ** (1 + 10 * lr)))
        write_cell(tmp_path, norm, values, lr=lr)
    assert group_of(tmp_path).kind == "unlike"  # two rates, and no search
    (tmp_path / place).mkdir(exist_ok=True)
    search = SearchEntry("norm=group", ["norm=group"], ["lr"], "val/accuracy", ["one", "two"])
    append_entries(tmp_path / place, [search])
    one = group_of(tmp_path)
    assert "lr searched: 2 points for group, 0 points for batch" in one.text
    assert one.kind == "given rates" and "learning rate 0.3 of group, 0.1 of batch" in one.text


def test_why_a_grid_of_rates_does_not_tune_is_said_and_a_failed_norm_is_named(tmp_path: Path):
    for norm, failed in (("batch", [1]), ("group", [])):
        write_cell(tmp_path, norm, dict.fromkeys(range(2), 0.9), lr=0.1)
        write_cell(tmp_path, norm, dict.fromkeys(range(2), 0.8), lr=3.0, failed=failed)
    report = report_of(tmp_path)
    words = {
        norm: report.slices[0].search_words(line[128])
        for norm, line in report.slices[0].lines.items()
    }
    assert words["batch"] == "best of 2 rates, runs failed"
    assert words["group"].startswith("best of 2 rates, by 2 seeds each")
    assert report.losses.lines == ["batch, 1 run failed: CUDA out of memory"]


def write_declared(root: Path, *commands: Mapping[str, int], ended: int = 8) -> None:
    """commands: by norm, the number of seeds that each command of the study asks for."""
    rng = np.random.default_rng(0)
    level = {"batch": 0.90, "group": 0.95, "layer": 0.95}
    entries, cells = [], {}
    for norm in {norm for command in commands for norm in command}:
        values = dict(enumerate(rng.normal(level[norm], 0.003, ended)))
        cells[norm] = write_cell(root, norm, values).name
    for number, command in enumerate(commands):
        asked = {cells[norm]: [("", list(range(count)))] for norm, count in command.items()}
        time = f"2026-01-01T00:00:{number:02d}+00:00"
        words = ["normexp-train", f"replicas={max(command.values())}", f"norm={','.join(command)}"]
        entries.append(CommandEntry(str(number), words, "one", 3, asked, time=time))
    append_entries(root / "synthetic", entries)


def test_declared_seeds_that_have_ended_are_judged(tmp_path: Path):
    write_declared(tmp_path, {"batch": 8, "group": 8})
    assert group_of(tmp_path).kind == "better"


def test_until_the_declared_seeds_have_ended_there_is_no_verdict(tmp_path: Path):
    write_declared(tmp_path, {"batch": 8, "group": 8}, ended=5)
    one = group_of(tmp_path)
    assert one.kind == "incomplete" and one.comparison.gap.low > 0
    assert "points; no verdict yet: 5 of 8 declared seeds (" in one.text


def test_until_every_declared_cell_has_ended_there_is_no_verdict(tmp_path: Path):
    write_declared(tmp_path, {"batch": 8, "group": 8, "layer": 8})
    (layer,) = (tmp_path / "synthetic").glob("layer-*")
    (layer / "seed-7" / "result.json").unlink()
    one = group_of(tmp_path)
    assert one.kind == "unended" and "no verdict yet: 1 declared cell has not ended" in one.text
    end = EndEntry(layer.name, "norm=layer", [7], "0", "failed", "no memory")
    append_entries(tmp_path / "synthetic", [end])
    assert group_of(tmp_path).kind == "better"


def test_what_has_failed_for_good_or_was_refused_stays_so_when_the_command_is_typed_again(
    tmp_path: Path,
):
    rng, study, failed = np.random.default_rng(0), tmp_path / "synthetic", [0, 1]
    for norm, level in (("batch", 0.90), ("group", 0.95)):
        write_cell(tmp_path, norm, dict(enumerate(rng.normal(level, 0.003, 8))))
    values = dict.fromkeys(failed, 0.9)
    write_cell(tmp_path, "layer", values, failed=failed, result={"attempts": 2})
    asked = {cell.name: [("", list_seeds(cell))] for cell in study.iterdir()}
    asked["bad-1"] = [("norm=bad", [0, 1])]
    refused = EndEntry("bad-1", "norm=bad", [0, 1], "0", "refused", "it changes the shape")
    kinds = []
    for number, max_attempts in enumerate((2, 2, 3)):  # the second leaves nothing but itself
        words = ["normexp-train", f"max_attempts={max_attempts}"]
        command = CommandEntry(str(number), words, "one", max_attempts, asked)
        append_entries(study, [command, refused] if number == 0 else [command])
        kinds.append(group_of(tmp_path).kind)
    assert kinds == ["better", "better", "unended"]  # the third allows one more attempt


def test_without_a_declaration_there_are_intervals_and_no_verdict(tmp_path: Path):
    write_declared(tmp_path, {"batch": 8, "group": 8})
    (tmp_path / "synthetic" / "study.jsonl").unlink()
    answer = read_report(tmp_path, ["synthetic"]).sections[0].answers[0]
    one = next(claim for claim in answer.sentences if claim.comparison)
    assert one.kind == "undeclared" and one.comparison.gap.low > 0
    assert "no verdict: the declared number of seeds is unknown" in one.text


def test_the_margin_is_the_declared_one(tmp_path: Path):
    """Whatever this version of the code would take; without a declaration that is said."""
    write_declared(tmp_path, {"batch": 8, "group": 8})
    path = tmp_path / "synthetic" / "study.jsonl"
    entry = json.loads(path.read_text())
    assert "margin not declared before the data" in group_of(tmp_path).text
    entry["rule"] = {**RULE, "version": 7, "margins": {"accuracy": {"most": 20.0}}}
    path.write_text(json.dumps(entry) + "\n")
    one = group_of(tmp_path)
    assert one.comparison.margin == 20 and "not declared" not in one.text
    entry["rule"] = {**RULE, "metrics": ["test/loss"]}
    path.write_text(json.dumps(entry) + "\n")
    assert group_of(tmp_path).comparison.part.metric.name == "test/loss"


def test_what_was_given_to_the_report_stands_in_each_sentence(tmp_path: Path):
    for epochs in (12, 48):
        for norm, level in (("batch", 0.90), ("group", 0.95)):
            values = dict(enumerate(np.random.default_rng(epochs).normal(level, 0.003, 8)))
            write_cell(tmp_path, norm, values, epochs=epochs)
    options = {"metric": "val/accuracy", "tolerance": 2.0}
    report = report_of(tmp_path, **options)
    texts = [report.sections[0].headline.claim]
    for answer in report.sections[0].answers:
        for claim in answer.sentences:
            if claim.comparison:
                texts += [claim.claim, *claim.elsewhere.split(". ")]
    assert len(texts) > 4
    words = "with metric=val/accuracy and tolerance=2 given to the report"
    assert all(words in text for text in texts)


def test_seeds_that_were_added_take_the_verdict_back(tmp_path: Path):
    write_declared(tmp_path, {"batch": 5, "group": 5}, {"batch": 8, "group": 8})
    one = group_of(tmp_path)
    assert one.kind == "extended" and "3 seeds were added to the 5 declared" in one.text


def test_a_forgotten_command_takes_back_its_seeds_but_not_what_was_seen_of_them(tmp_path: Path):
    study, options = tmp_path / "synthetic", ["study=synthetic", f"runs_dir={tmp_path}"]
    write_declared(tmp_path, {"batch": 5, "group": 5, "layer": 5}, {"batch": 8}, {"layer": 8})
    for norm in ("group", "layer"):
        for run in list(study.glob(f"{norm}-*/seed-[567]")):
            shutil.rmtree(run)
    assert group_of(tmp_path).kind == "extended"
    count = {cell.name: (cell.finished, cell.missing) for cell in report_of(tmp_path).cells}
    assert count == {"batch": (8, 0), "group": (5, 0), "layer": (5, 3)}
    assert status([*options, "forget=[2,3]"]) == 0
    assert group_of(tmp_path).kind == "better"
    report = report_of(tmp_path)
    assert {cell.finished for cell in report.cells} == {5} and "seeds missing" not in report.counts
    assert "3 of forgotten commands left out" in report.counts
    # More seeds are not a new declaration, although the first one is forgotten: results were seen.
    asked = {cell.name: [("", list(range(8)))] for cell in study.iterdir() if cell.is_dir()}
    assert status([*options, "forget=1"]) == 0
    append_entries(study, [CommandEntry("3", ["normexp-train"], "one", 3, asked)])
    assert group_of(tmp_path).kind != "better"


def test_norms_are_not_selected_by_forgetting_the_command_that_showed_them(tmp_path: Path):
    study, options = tmp_path / "synthetic", ["study=synthetic", f"runs_dir={tmp_path}"]
    write_declared(tmp_path, {"batch": 8, "group": 8, "layer": 8})
    assert group_of(tmp_path).kind == "better"
    assert status([*options, "forget=1"]) == 0
    seeds = [("", list(range(8)))]
    cells = {cell.name: seeds for cell in study.iterdir() if cell.is_dir()}
    some = {name: seeds for name in cells if not name.startswith("layer")}
    append_entries(study, [CommandEntry("2", ["normexp-train"], "one", 3, some)])
    one = group_of(tmp_path)
    assert one.kind == "unended" and "1 declared cell has not ended or was forgotten" in one.text
    append_entries(study, [CommandEntry("3", ["normexp-train"], "one", 3, cells)])
    assert group_of(tmp_path).kind == "better"


def test_norms_of_a_later_command_are_a_family_of_their_own(tmp_path: Path):
    write_declared(tmp_path, {"batch": 8, "group": 8}, {"layer": 8, "batch": 8})
    comparisons = {one.first.norm: one for one in report_of(tmp_path).comparisons}
    assert [comparisons[norm].family_size for norm in ("group", "layer")] == [1, 1]
    assert comparisons["layer"].round == 1
    assert "a family of its own" not in group_of(tmp_path).text
    texts = [claim.text for claim in report_of(tmp_path).sections[0].answers[0].sentences]
    assert any("layer" in text and "later command: a family of its own" in text for text in texts)
