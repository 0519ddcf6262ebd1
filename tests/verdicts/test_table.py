"""Verdicts for tables of runs made elsewhere: what is compared, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import normexp
import normexp.verdicts
from normexp.errors import UserError
from normexp.report import main
from normexp.verdicts.report import Report

MEANS = {"sgd": 0.90, "adam": 0.92, "lion": 0.905}
SCORE = "val/accuracy"


def export(num_seeds: int = 6, **columns: Any) -> pd.DataFrame:
    """What a tracker exports: names of runs, a time and another metric among the settings."""
    rng = np.random.default_rng(3)
    rows = []
    for data_set in ("easy", "hard"):
        for optimizer, mean in MEANS.items():
            for seed in range(num_seeds):
                score = mean - 0.2 * (data_set == "hard") + 0.003 * rng.normal()
                row = {"Name": f"run-{len(rows)}", "optimizer": optimizer, "data set": data_set}
                row |= {"seed": seed, "data_seed": 7 * seed, "steps": 100, "batch_size": 2.0}
                rows.append(row | {"Runtime": rng.random(), SCORE: score})
    return pd.DataFrame(rows).assign(**columns)


def compare(table: pd.DataFrame, **options: Any) -> Report:
    return normexp.compare(table, arm="optimizer", seed="seed", **{"metric": SCORE, **options})


def verdicts(report: Report) -> dict[str, tuple[str | None, str]]:
    """Of the first table."""
    first = report.slices[0]
    return {one.arm: (one.verdict, one.why) for one in report.comparisons_of(first)}


def test_a_trackers_export_gets_the_verdicts_of_a_study(tmp_path: Path, capsys):
    path = tmp_path / "runs.csv"
    export().to_csv(path, index=False, sep=";")
    assert main([str(path), "arm=optimizer", "seed=seed", f"metric={SCORE}", "reference=adam"]) == 0
    out = capsys.readouterr().out
    assert "left out, since no value repeats: Name, Runtime" in out and "optimizer" in out
    assert (tmp_path / "runs_report" / "index.html").exists()
    report = compare(pd.read_csv(path, sep=";"), reference="adam")
    assert [slice_.heading for slice_ in report.slices] == ["data set=easy", "data set=hard"]
    (easy, _) = report.slices
    one = next(c for c in report.comparisons_of(easy) if c.arm == "sgd")
    scores = export().query("`data set` == 'easy'").pivot(index="seed", columns="optimizer")[SCORE]
    gap = 100 * (scores["sgd"] - scores["adam"]).mean()
    assert one.gap.estimate == pytest.approx(gap) and one.family_size == 3  # the best, too
    assert (one.verdict, one.against, one.gap.n) == ("worse", "adam", 6)
    assert report.headline(easy) == "adam is ahead." and "<svg" in report._repr_html_()


def test_the_cell_of_the_page_prints_the_verdicts(tmp_path: Path, monkeypatch, capsys):
    page = Path(normexp.verdicts.__file__).with_name("README.md").read_text(encoding="utf-8")
    (cell,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    export().to_csv(tmp_path / "runs.csv", index=False)
    monkeypatch.chdir(tmp_path)
    exec(cell, {})
    assert "adam sgd" in (out := capsys.readouterr().out) and " better" in out


def without(table: pd.DataFrame, row: int) -> pd.DataFrame:
    return table.drop(index=row)


def with_score(table: pd.DataFrame, row: int, score: float) -> pd.DataFrame:
    table.loc[row, SCORE] = score
    return table


@pytest.mark.parametrize(
    ("table", "options", "expected"),
    [
        (without(export(), 7), {}, (None, "5 of 6 seeds of adam")),
        (with_score(export(), 7, np.nan), {}, (None, "5 of 6 seeds of adam")),
        (with_score(export(), 7, np.inf), {}, (None, "1 of 6 seeds of adam diverged")),
        (with_score(export(), 7, -np.inf), {"chance": 0.1}, ("undecided", "adam: 1 diverged")),
        (
            export(steps=[100 + 100 * (row // 6 % 3 == 1) for row in range(36)]),
            {},
            (None, "not compared: steps 200 and 100"),
        ),
    ],
    ids=["missing", "failed", "diverged", "diverged with a chance level", "unequal steps"],
)
def test_what_gives_no_verdict_says_why_and_counts_in_the_family(
    table: pd.DataFrame, options: dict[str, Any], expected: tuple
):
    report = compare(table, **options)
    assert verdicts(report)["adam"] == expected
    assert verdicts(report)["lion"][0] is not None
    (family,) = {one.family_size for one in report.comparisons_of(report.slices[0])}
    assert family == (2 if "not compared" in expected[1] else 3)


def test_percentages_and_metrics_of_any_name():
    percent = compare(export().assign(**{SCORE: 100 * export()[SCORE]}))
    assert verdicts(percent) == verdicts(compare(export()))
    table = export().rename(columns={SCORE: "miss"})
    turned = compare(table, metric="miss", higher_is_better=False, tolerance=0.01)
    assert verdicts(turned)["adam"][0] == "worse"


def test_a_tuned_arm_is_cross_fitted_and_one_that_was_tuned_before_is_not_compared():
    grids = []
    for number, lr in enumerate((0.001, 0.01, 0.1, 1.0)):
        best = export()["optimizer"].map({"sgd": 0.1, "adam": 0.01, "lion": 0.1})
        score = export()[SCORE] - 0.02 * np.abs(np.log10(lr / best)) + 1e-4 * number
        noise = np.random.default_rng(number).random(36)
        grids.append(export(lr=lr, Runtime=noise, Name=[f"{lr}-{row}" for row in range(36)]))
        grids[-1][SCORE] = score
    table = pd.concat(grids, ignore_index=True)
    report = compare(table, tune="lr")
    assert "lr tuned over 4" in report.slices[0].scope
    assert verdicts(report)["adam"][0] == "better"
    assert compare(table).slices[0].heading == "data set=easy, lr=0.001"  # a setting, if not tuned
    is_best = table["lr"] == table["optimizer"].map({"sgd": 0.1, "adam": 0.01, "lion": 0.1})
    alone = compare(table[is_best], reference="sgd")
    assert verdicts(alone)["adam"] == (None, "not compared: lr 0.01 and 0.1")
    table["val_loss"] = 1 - table[SCORE]  # of the best learning rate the lowest
    by_loss = compare(table, tune="lr", choose_by="val_loss")
    assert "lr tuned over 4 by val_loss" in by_loss.slices[0].scope
    assert verdicts(by_loss) == verdicts(report)
    with pytest.raises(UserError, match="choose_by=.*: which way does it improve"):
        compare(table.rename(columns={"val_loss": "miss"}), tune="lr", choose_by="miss")


def test_cells_seeds_and_rows_of_any_values_stay_apart():
    """Values that read alike when joined, seeds that are texts, an index that repeats."""
    table = export().drop(columns=["data_seed"])
    arms = {"sgd": "a", "adam": "a-b", "lion": "b"}
    table["optimizer"] = table["optimizer"].map(arms)
    table["data set"] = table["data set"].map({"easy": "b-c", "hard": "c"})
    table["seed"] = [f"run {seed}" if seed else seed for seed in table["seed"]]
    table.index = [0] * len(table)
    report = compare(table)
    assert len(report.cells) == 6 and {len(cell.runs) for cell in report.cells} == {6}
    assert verdicts(report)["a-b"][0] == "better"


def test_a_diverged_run_counts_in_the_unit_of_the_column():
    shares = with_score(export(), 7, np.inf)
    percent = shares.assign(**{SCORE: 100 * shares[SCORE]})
    first, second = compare(shares, chance=0.1), compare(percent, chance=10)
    means = [report.tables[1].frame.set_index("optimizer") for report in (first, second)]
    assert means[0].equals(means[1]) and "1 diverged" in means[0].loc["adam", "lost"]
    margins = [one.slices[0].metric.tolerance for one in (first, compare(shares, tolerance=0.02))]
    assert margins == pytest.approx([1.0, 2.0])


@pytest.mark.parametrize("name", ["optim.name", "act"])
def test_any_column_may_be_the_arm_and_none_is_a_budget_by_its_name(name: str):
    table = export().rename(columns={"optimizer": name, "data set": "samples", "steps": "epochs"})
    table["epochs"] = 10 * table["seed"]  # follows from the seed
    report = normexp.compare(table, arm=name, seed="seed", metric=SCORE)
    assert [slice_.heading for slice_ in report.slices] == ["samples=easy", "samples=hard"]
    assert verdicts(report)["adam"][0] == "better"


def other_rate(row: int) -> float:
    return 0.3 if row == 9 else 0.1  # a seed of one arm has another


def test_settings_that_vary_together_separate_the_tables():
    table = export().assign(classes=lambda t: t["data set"].map({"easy": 10, "hard": 100}))
    headings = [slice_.heading for slice_ in compare(table).slices]
    assert headings == ["classes=10, data set=easy", "classes=100, data set=hard"]


def crashed(table: pd.DataFrame) -> pd.DataFrame:
    """Two runs of each optimizer have crashed, of sgd other seeds than of adam."""
    has_crashed = (table["seed"] + (table["optimizer"] == "sgd")) % 3 == 0
    states = has_crashed.map({True: "crashed", False: "finished"})
    return table.assign(state=states, code=has_crashed, **{SCORE: table[SCORE].mask(has_crashed)})


def crashed_on_hard(table: pd.DataFrame) -> pd.DataFrame:
    """All runs of sgd have crashed on one data set, where a tracker keeps their last values."""
    has_crashed = (table["optimizer"] == "sgd") & (table["data set"] == "hard")
    return table.assign(state=has_crashed.map({True: "crashed", False: "finished"}))


def rerun(table: pd.DataFrame) -> pd.DataFrame:
    """Two seeds of each cell have crashed and were run again."""
    again = table[table["seed"] < 2].assign(state="crashed", **{SCORE: 0.1})
    again["Runtime"] += 1
    return pd.concat([table.assign(state="finished"), again], ignore_index=True)


def on_two_machines(table: pd.DataFrame) -> pd.DataFrame:
    """Each seed is on one machine for one data set, and on the other for the other."""
    machine = (table["seed"] + (table["data set"] == "hard")) % 2
    return pd.concat([machine.rename("gpu"), table], axis=1)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda t: t, {"metric": "val/acuracy"}, "val/acuracy: no such column; did you mean val/"),
        (lambda t: t, {"ignore": ["lr,x"]}, r"lr,x: no such column; type several as \[lr,x\]"),
        (lambda t: t, {"metric": "seed"}, "seed: one column cannot play two parts"),
        (
            lambda t: t,
            {"metric": "Runtime"},
            "set higher_is_better=True, or higher_is_better=False",
        ),
        (lambda t: t[t["seed"] == 0], {}, 'seed="seed": one value, 0; two are the fewest'),
        (lambda t: t[t["optimizer"] == "sgd"], {}, 'arm="optimizer": one value, sgd; two are'),
        (lambda t: t.assign(seed=t["seed"].replace(3, np.nan)), {}, 'seed="seed": row 5 is empty'),
        (lambda t: pd.concat([t, t.iloc[[4]]]), {}, "row 38 repeats an earlier row"),
        (
            lambda t: t.assign(seed=t["seed"] % 3),
            {"ignore": ["data_seed"]},
            'optimizer="sgd", .*seed=0: stands twice',
        ),
        (
            lambda t: t.assign(lr=[other_rate(row) for row in range(36)]),
            {},
            "lr: a setting or a mea",
        ),
        (crashed, {}, "state, code: a setting or a measurement.*from seed to seed"),
        (crashed_on_hard, {}, '^state: a setting or .*ignore=."state"'),
        (rerun, {"ignore": ["Name"]}, "^state: a setting or a measurement"),
        (on_two_machines, {}, r"^data set, gpu: a setting .*others in ignore=\[...\]"),
        (lambda t: t.assign(state=t["seed"] < 2), {}, "^state: a setting or a measurement"),
        (lambda t: t.assign(**{SCORE: "high"}), {}, "val/accuracy: row 2 has 'high', no number"),
        (
            lambda t: t,
            {"choose_by": "Runtime"},
            'choose_by="Runtime" chooses among .*; add tune="COL',
        ),
        (lambda t: t, {"tune": "data set"}, "data set: row 2 has 'easy', no number"),
        (lambda t: t, {"chance": 10}, "chance=10: must be 0 to 1, as val/accuracy is"),
        (lambda t: t.assign(**{SCORE: 200 * t[SCORE]}), {}, 'val/accuracy": .* is no accuracy'),
        (
            lambda t: t.rename(columns={SCORE: "accuracy_loss"}),
            {"metric": "accuracy_loss"},
            "which",
        ),
        (lambda t: t.rename(columns={"Name": "steps"}), {}, "steps: two columns of this name"),
        (lambda t: t, {"reference": "adamw"}, "no cell has this optimizer; there are adam"),
        (lambda t: t.assign(w=t["optimizer"]), {"by": ["w"]}, None),
        (lambda t: t, {"by": ["Runtime"]}, "no two values of optimizer have equal settings"),
    ],
)
def test_a_table_from_which_no_verdict_follows_is_refused(
    change: Callable[[pd.DataFrame], pd.DataFrame], options: dict[str, Any], message: str | None
):
    if message is None:
        assert verdicts(compare(change(export()), **options))["adam"][0] is None
        return
    with pytest.raises(UserError, match=message):
        compare(change(export()), **options)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runs.csv", "arm=optimizer", "seed=seed"], "metric is missing: metric=COLUMN"),
        (["runs.csv", "study=mine"], "study=mine: runs.csv is a table of runs, not a study"),
        (["study=mine", "arm=optimizer"], "arm=optimizer: only a CSV has columns"),
        (["no.csv", "arm=a", "seed=b", "metric=c"], "no.csv cannot be read as a table: No such"),
    ],
)
def test_words_that_do_not_belong_together_are_one_line(words: list[str], message: str, capsys):
    assert main(words) == 2
    assert message in capsys.readouterr().err
