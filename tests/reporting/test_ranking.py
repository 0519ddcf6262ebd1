"""The first screen of a report: which norms may be the best, and where the others stand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from normexp.records.history import CommandEntry, EndEntry, append_entries
from synthetic_study import report_of, write_cell

from normexp.errors import UserError
from normexp.records.samples import write_samples
from normexp.report import main
from normexp.reporting.ranking import Ranking
from normexp.reporting.report import to_json
from normexp.reporting.tables import cell_table


def write_norms(root: Path, levels: dict[str, float], sd: float = 0.002, **options) -> None:
    rng = np.random.default_rng(len("".join(levels)))
    for norm, level in levels.items():
        write_cell(root, norm, dict(enumerate(rng.normal(level, sd, 8))), **options)


def ranking_of(root: Path, **options) -> Ranking:
    (ranking,) = report_of(root, **options).rankings
    return ranking


def groups_of(ranking: Ranking) -> dict[str, set[str]]:
    groups: dict[str, set[str]] = {}
    for place in ranking.places:
        groups.setdefault(place.group, set()).add(place.norm)
    return groups


def test_norms_stand_in_groups_that_tests_tell_apart(tmp_path: Path):
    levels = {"batch": 0.90, "group": 0.95, "layer": 0.9505, "rms": 0.93, "dyt": 0.5}
    write_norms(tmp_path, levels)
    write_norms(tmp_path, {"frn": 0.9}, sd=0.02)
    ranking = ranking_of(tmp_path)
    assert groups_of(ranking) == {
        "best": {"group", "layer"},
        "better": {"rms"},
        "level": {"batch", "frn"},
        "worse": {"dyt"},
    }
    assert ranking.sentence.startswith("The best of 6 norms is one of 2: ")
    frn = next(place for place in ranking.places if place.norm == "frn")
    words = ranking.standing(frn)
    assert frn.comparison is not None
    assert f"undecided, {frn.comparison.seeds_to_decide} seeds would decide" in words


def test_equal_norms_have_no_order(tmp_path: Path):
    write_norms(tmp_path, {"batch": 0.9, "group": 0.9, "layer": 0.9}, sd=0.02)
    ranking = ranking_of(tmp_path)
    assert groups_of(ranking) == {"best": {"batch", "group", "layer"}}
    assert ranking.sentence.startswith("Any of these 3 norms may be the best: ")


def test_the_sentence_says_where_the_norm_of_the_user_stands(tmp_path: Path):
    write_norms(tmp_path, {"batch": 0.95, "group": 0.9})
    write_norms(tmp_path, {"mine": 0.85}, identity={"norm": {"_target_": "my_norms.Mine"}})
    assert ranking_of(tmp_path).sentence.startswith(
        "The best of 3 norms is batch. mine against batch: worse by "
    )
    assert ranking_of(tmp_path, reference="group").sentence.startswith(
        "The best of 3 norms is batch. mine against group: worse by "
    )
    assert ranking_of(tmp_path, reference="my_norms.Mine").reference == "mine"  # as for training
    with pytest.raises(UserError, match="reference=grup: .* the norms are batch, group, mine"):
        report_of(tmp_path, reference="grup")


def test_a_norm_whose_every_run_diverged_is_no_candidate_for_the_best(tmp_path: Path):
    """Its difference is a bound, as a diverged run counts as the worst run that there is."""
    for norm, values in {"batch": [0.9, 0.91], "group": [0.89, 0.92], "none": [None, None]}.items():
        write_cell(tmp_path, norm, dict(enumerate(values)))
    ranking = ranking_of(tmp_path)
    assert groups_of(ranking) == {"best": {"batch", "group"}, "diverged": {"none"}}
    assert ranking.sentence == "Any of these 2 norms may be the best: batch and group"
    assert ranking.rows[-1][0] == "diverged"
    assert ranking.rows[-1][4].startswith("at most -")
    write_cell(tmp_path, "rms", {0: 0.9, 1: None})
    rms = next(place for place in ranking_of(tmp_path).places if place.norm == "rms")
    assert rms.group == "best" and ranking.standing(rms).startswith("at most ")


def test_seeds_at_chance_are_named_wherever_their_norm_stands(tmp_path: Path, capsys):
    rng = np.random.default_rng(0)
    for norm, lost in {"batch": 0, "dyt": 2, "none": 8}.items():
        values = [*np.full(lost, 0.1), *rng.normal(0.9, 0.01, 8 - lost)]
        write_cell(tmp_path, norm, dict(enumerate(values)), chance_accuracy=0.1)
    write_cell(tmp_path, "rms", {0: 0.9, 1: None}, chance_accuracy=0.1)
    report = report_of(tmp_path)
    (ranking,) = report.rankings
    assert "dyt (2 of 8 seeds at chance)" in ranking.sentence
    seeds = {row[1]: row[3] for row in ranking.rows}
    assert seeds == {"batch": "8", "dyt": "8/8 ~2", "none": "8/8 ~8", "rms": "1/2 ×1"}
    summary = "norm=rms: 1 of 2 seeds diverged; norm=none: 8 of 8 seeds at chance; norm=dyt: 2 of 8"
    assert report.losses.summary == f"{summary} seeds at chance"
    line = "norm=dyt lr=0.1: 2 of 8 seeds at chance (10 %); lower its learning rate, search it, "
    line += "or train longer"
    content = to_json(report)
    assert line in content["losses"]
    (dyt,) = [cell for cell in content["cells"].values() if cell["norm"] == "dyt"]
    assert dyt["seeds_at_chance"] == [0, 1]
    assert main([f"runs_dir={tmp_path}", "study=synthetic"]) == 0
    assert line in " ".join(capsys.readouterr().out.split())
    page = (tmp_path / "synthetic" / "report" / "index.html").read_text()
    assert line in page and page.index(summary) < page.index("<table") < page.index(line)


def test_losses_at_rates_that_a_search_does_not_choose_are_summed(tmp_path: Path):
    rng = np.random.default_rng(0)
    for norm in ("batch", "group"):
        for lr in (0.03, 0.1, 3.0):
            values = dict(enumerate(rng.normal(0.9, 0.01, 8) if lr < 1 else np.full(8, 0.1)))
            write_cell(tmp_path, norm, values, lr=lr, chance_accuracy=0.1)
    losses = report_of(tmp_path).losses
    assert losses.summary == "runs at rates that no seed chooses: 16 at chance"
    said = re.compile(
        r"norm=(batch|group): 8 of (8|16) runs at chance at rates that no seed chooses"
    )
    assert len(losses.lines) == 2 and all(map(said.fullmatch, losses.lines))


def test_a_tuned_norm_stands_where_fresh_seeds_put_it(tmp_path: Path):
    """The rate that won by luck has a mean above what it reports on the other seeds."""
    rng = np.random.default_rng(0)
    for norm in ("batch", "group"):
        for lr in (0.03, 0.1, 0.3):
            values = dict(enumerate(rng.normal(0.9, 0.02, 8)))
            write_cell(tmp_path, norm, values, lr=lr)
    report = report_of(tmp_path)
    (ranking,) = report.rankings
    for place in ranking.places:
        chosen = place.cell.mean(ranking.part.metric).estimate
        assert ranking.part.tuned(place.cell) and chosen and place.value.estimate
        assert place.value.estimate < chosen
    assert ranking.heading.endswith("tuned over 3 rates")  # of every norm
    assert "tuned" not in str(ranking.rows)


def test_refused_cells_are_counted_and_named_with_their_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_norms(tmp_path, {"batch": 0.9, "layer": 0.9})
    study = tmp_path / "synthetic"
    cells = {
        f"g{lr}": [
            (f"norm=group batch_size=128 norm_batch_size=2 norm.num_groups=7 lr={lr}", [0, 1])
        ]
        for lr in (0.1, 0.5)
    }
    ends = [
        EndEntry(cell, points[0][0], [0, 1], "c", "refused", "num_groups=7 does not divide 16")
        for cell, points in cells.items()
    ]
    append_entries(study, [CommandEntry("c", ["normexp-train"], "one", 3, cells), *ends])
    report = report_of(tmp_path)
    assert report.counts.endswith("; 2 cells refused")
    reason = "group num_groups=7, 2 cells refused: num_groups=7 does not divide 16"
    assert report.losses.lines == [reason] and report.losses.summary == "2 cells refused"
    rows = cell_table(report.cells, None, None, report.refused).rows[-2:]
    assert [row["norm"] for row in rows] == ["group num_groups=7"] * 2
    assert [(row["lr"], row["model"]) for row in rows] == [("0.1", "resnet"), ("0.5", "resnet")]
    assert [(row["norm batch size"], row["setting"]) for row in rows] == [("2", "")] * 2
    assert json.loads(json.dumps(to_json(report)))["refused"][0]["cell_id"] == "g0.1"
    assert main([f"runs_dir={tmp_path}", "study=synthetic"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert reason in shown
    assert reason in (study / "report" / "index.html").read_text()


def test_a_mean_has_one_interval_whatever_stands_beside_it(tmp_path: Path):
    """With 100 recorded test samples a run moves in steps of 1 %, not of the gaps in a table."""
    cells = [
        write_cell(tmp_path, norm, dict(enumerate(values)))
        for norm, values in {"batch": [0.9, 0.9, 0.9], "group": [0.5, 0.9, 0.7]}.items()
    ]
    for cell, values in zip(cells, ([0.9, 0.9, 0.9], [0.5, 0.9, 0.7]), strict=True):
        for seed, value in enumerate(values):
            right = np.arange(100) < round(100 * value)
            write_samples(cell / f"seed-{seed}", {"running": right})
    report = report_of(tmp_path)
    (part,) = report.slices
    batch = part.lines["batch"][128]
    assert batch.step(part.metric) == pytest.approx(1.0)
    (row, _) = cell_table(report.cells, None, None).rows
    ranked = next(place for place in report.rankings[0].places if place.norm == "batch")
    assert (row["mean low"], row["mean high"]) == (ranked.value.low, ranked.value.high)
    low, high = row["mean low"], row["mean high"]
    assert 1.0 < high - low < 6.0
