"""The benchmark: its table, tuned ratios, claims, and an entry from one line."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from normexp.benchmark import entry, table
from normexp.benchmark.claims import Verdict, judge
from normexp.benchmark.protocol import claims, digest, recipe_at, recipes
from normexp.benchmark.report import BenchmarkReport, standing_words
from normexp.benchmark.score import rank
from normexp.benchmark.show import comparison_lines
from normexp.benchmark.table import Table, TableCell, read_table, write_table
from normexp.errors import UserError
from normexp.stats.ratio import as_ratio

NUM_IMAGES = 500
SEEDS = tuple(range(8))


def cells(recipe: str, norm: str, error: float, size: int | None = None) -> list[TableCell]:
    """Runs of a norm whose error is lowest at the middle rate; images differ in difficulty."""
    known = recipes()[recipe]
    made = []
    for place, rate in enumerate(known.rates):
        rng = np.random.default_rng([place, *map(ord, f"{recipe}{norm}{size}")])
        wrong = error + 0.1 * abs(place - 2)
        hard = np.random.default_rng(0).gamma(2.0, 0.5, NUM_IMAGES)  # the same for every norm
        is_right = rng.random((len(SEEDS), NUM_IMAGES)) > wrong * hard
        accuracy = is_right.mean(axis=1)
        mixes = size is not None or norm == "batch"
        made.append(
            TableCell(
                *(recipe, norm, size, rate),
                {"mixes_samples": mixes, "chance": 0.1, "id": f"{norm}-{size}-{rate}"},
                SEEDS,
                np.zeros(len(SEEDS), dtype=bool),
                {"val/accuracy": accuracy, "val/loss": 1 - accuracy, "test/accuracy": accuracy},
                {"running": is_right},
            )
        )
    return made


def made_table(*groups: list[TableCell]) -> Table:
    about = {"benchmark": "benchmark1", "rules": digest(), "commits": ["c"], "time": "now"}
    return Table(about, tuple(cell for group in groups for cell in group))


def convnet(batch_at_2: float) -> Table:
    """Batch norm at both sizes, layer and group norm, at both budgets."""
    groups = []
    for recipe in ("convnet", "convnet_short"):
        groups += [cells(recipe, "batch", 0.05), cells(recipe, "batch", batch_at_2, 2)]
        groups += [cells(recipe, "layer", 0.07), cells(recipe, "group", 0.07)]
    mixes_none = {norm: {"mixes_samples": False} for norm in ("layer", "group")}
    return replace(made_table(*groups), traits={"convnet": mixes_none})


def test_norms_are_ranked_by_tuned_error_in_groups():
    grids = {"batch": 0.05, "group": 0.05, "layer": 0.15, "rms": 0.2}
    made = made_table(*(cells("convnet", norm, error) for norm, error in grids.items()))
    standings = rank(made, "convnet")
    assert standings is not None
    assert {one.norm: one.group for one in standings.places} == {
        **{"batch": "best", "group": "best"},
        **{"layer": "worse", "rms": "worse"},
    }
    layer = standings.of("layer")
    assert layer is not None and layer.tuned is not None
    assert layer.tuned.rate == recipes()["convnet"].rates[2] and not layer.tuned.is_at_edge
    assert layer.ratio is not None
    ratio = as_ratio(layer.ratio.gap)
    assert ratio.low is not None and ratio.high is not None
    assert ratio.low < 3 < ratio.high and ratio.low > 2
    assert "layer: error 2.77 [2.26, 3.40] of batch's over 1 workload" in standing_words(
        [standings], "layer"
    )
    assert standings.bars[8] > standings.bars[32] > 1


def test_norms_of_every_workload_are_ranked_over_all():
    """By the geometric mean of ratios to references that differ; one that lacks one is left out."""
    errors = {"batch": 0.05, "layer": 0.05, "group": 0.1, "rms": 0.2}
    made = [
        cells(name, norm, error) for name in ("convnet", "vit") for norm, error in errors.items()
    ]
    report = BenchmarkReport(made_table(*made, cells("convnet", "instance", 0.05)))
    assert report.overall is not None and report.overall.references == "batch's and layer's"
    places = {place.norm: place for place in report.overall.places}
    groups = {norm: place.group for norm, place in places.items()}
    assert groups == {"batch": "best", "layer": "best", "group": "worse", "rms": "worse"}
    in_each = []
    for one in report.standings:
        place = one.of("rms")
        assert place is not None and place.ratio is not None
        in_each.append(as_ratio(place.ratio.gap).estimate)
    assert places["rms"].ratio is not None
    mean = as_ratio(places["rms"].ratio.gap)
    assert mean.estimate == pytest.approx(math.sqrt(in_each[0] * in_each[1]))
    assert mean.low is not None and mean.high is not None and mean.low < 4 < mean.high


def test_a_norm_with_lost_seeds_is_told_from_no_other():
    """A quarter of its runs end at chance level, at every rate."""

    def with_lost_seeds(cell: TableCell) -> TableCell:
        lost = np.arange(len(SEEDS)) % 4 == 0
        return replace(cell, diverged=lost)

    unlucky = [with_lost_seeds(cell) for cell in cells("convnet", "layer", 0.06)]
    told = [cells("convnet", "batch", 0.05), cells("convnet", "rms", 0.2)]
    standings = rank(made_table(*told, unlucky), "convnet")
    assert standings is not None
    assert {place.norm: place.group for place in standings.places} == {
        **{"batch": "best", "rms": "worse"},
        "layer": "open",
    }
    assert "told from no other" in standing_words([standings], "layer")


def test_an_incomplete_grid_is_not_ranked_and_a_diverging_norm_neither():
    lost = [
        replace(cell, diverged=np.ones(8, dtype=bool), metrics={}, samples={})
        for cell in cells("convnet", "rms", 0.05)
    ]
    made = made_table(cells("convnet", "batch", 0.05), cells("convnet", "layer", 0.05)[1:], lost)
    standings = rank(made, "convnet")
    assert standings is not None
    assert {one.norm: one.group for one in standings.places} == {
        **{"batch": "best", "layer": "incomplete", "rms": "diverges"}
    }
    assert "not ranked: diverges" in standing_words([standings], "rms")


@pytest.mark.parametrize(
    ("batch_at_2", "outcome", "of_renorm"),
    [(0.2, "holds", "not testable here"), (0.05, "fails", "not testable here")],
)
def test_claims_are_judged_by_the_table(batch_at_2: float, outcome: str, of_renorm: str):
    verdicts = {one.name: one for one in judge(convnet(batch_at_2))}
    assert verdicts["batch_norm_falls"].outcome == outcome
    assert verdicts["batch_renorm"].outcome == of_renorm  # no runs
    assert verdicts["ghost_batches"].reason == "it has no runs"


def test_a_claim_about_a_fall_needs_one():
    groups = [cells(r, "batch_renorm", 0.05, 2) for r in ("convnet", "convnet_short")]
    renorm = [cell for group in groups for cell in group]
    falls, does_not = (
        next(one for one in judge(convnet(error).with_entry(renorm)) if one.name == "batch_renorm")
        for error in (0.2, 0.05)
    )
    assert falls.outcome == "holds"
    assert does_not.outcome == "not testable here" and "no fall" in does_not.reason


def test_a_claim_of_any_needs_one_comparison_and_falls_with_all():
    def outcome(*errors: float) -> str:
        """Of ghost batches of 16 and 64 beside the whole batch, with an error of 10 %."""
        at = zip((16, 64, None), (*errors, 0.10), strict=True)
        made = made_table(*(cells("convnet_large_batch", "batch", e, size) for size, e in at))
        [ghosts] = [one for one in judge(made) if one.name == "ghost_batches"]
        return ghosts.outcome

    assert outcome(0.02, 0.20) == outcome(0.20, 0.02) == "holds"
    assert outcome(0.20, 0.20) == "fails"
    assert outcome(0.20, 0.10) == "undecided"


def test_every_claim_compares_what_the_recipes_train():
    for claim in claims():
        beside = [one for more in claim.get("beside", []) for one in more["comparisons"]]
        for comparison in [*claim["comparisons"], *beside]:
            for budget in comparison["budgets"]:
                for side in (comparison["first"], comparison["second"]):
                    workload = side.get("workload", comparison["workload"])
                    recipe = recipes()[recipe_at(workload, budget)]
                    norm, _, alpha = side["norm"].partition(" alpha_init=")
                    assert norm in recipe.norms, (claim["name"], side)
                    assert not alpha or float(alpha) in recipe.alphas, side
                    assert side.get("batch_size", recipe.batch_size) == recipe.batch_size, side
                    sizes = recipe.norm_batch_sizes or (recipe.batch_size,)
                    assert side.get("norm_batch_size", recipe.batch_size) in sizes, side


def test_other_budgets_widths_and_knobs_are_compared_with_the_recipe_that_a_side_names():
    """At twice the width batch norm falls; the claim itself has no such runs. Alpha has its own."""
    wide = [cells("convnet_wide", "batch", 0.02), cells("convnet_wide", "batch", 0.15, 2)]
    small = [cells("convnet_short", "batch", 0.15), cells("convnet_batch_size", "batch", 0.02)]
    gpt = [cells("gpt", "layer", 0.05), cells("gpt_alpha", "dyt alpha_init=2.0", 0.15)]
    verdicts = {one.name: one for one in judge(made_table(*wide, *small, *gpt))}
    falls = verdicts["batch_norm_falls"]
    assert falls.outcome == "not testable here"
    [moving, width] = falls.beside
    assert moving.tested[0].words.startswith("batch at batch size 2 minus batch at batch size 32")
    assert moving.tested[0].outcome == "fails" and width.tested[0].outcome == "holds"
    dyt = verdicts["dyt_derf"]
    [alpha] = [one for one in dyt.tested if one.assessment is not None]
    assert alpha.words == "dyt alpha_init=2.0 minus layer, gpt at the long budget"
    assert dyt.outcome == alpha.outcome == "fails"


def test_a_claim_is_refuted_by_what_a_probe_measured():
    def claim(**leaks: bool) -> Verdict:
        of_gpt = {norm: {"leaks_future": leak} for norm, leak in leaks.items()}
        made = replace(convnet(0.05), traits={"gpt": of_gpt})
        return next(one for one in judge(made) if one.name == "transformers")

    assert claim(instance=True, frn=True).outcome == "not testable here"
    refuted = claim(instance=True, frn=False)
    assert refuted.outcome == "fails"
    lines = comparison_lines(refuted.tested)
    assert lines == [
        "instance leaks future, gpt: yes, measured by a probe: holds",
        "frn leaks future, gpt: no, measured by a probe: fails",
    ]


def test_a_table_survives_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    made = convnet(0.1)
    write_table(made, tmp_path / "table.npz")
    read = read_table(tmp_path / "table.npz")
    assert read.about == made.about and read.traits == made.traits
    assert len(read.cells) == len(made.cells)
    for before, after in zip(made.cells, read.cells, strict=True):
        assert np.array_equal(before.samples["running"], after.samples["running"])
        assert np.allclose(before.metrics["test/accuracy"], after.metrics["test/accuracy"])
    assert entry.main([f"reference={tmp_path / 'table.npz'}", f"runs_dir={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    assert "convnet_short: error in %" in printed and claims()[0]["statement"] in printed
    (tmp_path / "other.npz").write_bytes(b"no table")
    with pytest.raises(UserError, match="not a table of the benchmark"):
        read_table(tmp_path / "other.npz")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *((["norm=rms", word], "frozen") for word in ("lr=0.1", "replicas=2", "model.width=8")),
        (["nrm=rms"], "nrm=rms: unknown key; did you mean norm?"),
        (["norm=rms,layer"], "an entry is one norm"),
        (["dry_run=true"], "an entry is one norm"),
        (["norm=rms", "workloads=[nowhere]"], "the reference has convnet"),
        (["reference=nowhere", "norm=rms"], "shipped are benchmark1"),
        (["reference=benchmark0", "norm=rms"], "experiment=benchmark0/convnet"),
        (["workloads=[vit]"], "nothing reads it without norm"),
        (["norm=no_module_of_this.Norm"], "there is no module"),
    ],
)
def test_an_entry_that_breaks_the_rules_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert entry.main(words) == 2
    assert message in capsys.readouterr().err


def test_the_shipped_table_is_of_the_rules_that_are_shipped():
    path = table.shipped_path("benchmark1")
    shipped = read_table(path)
    assert shipped.about["rules"] == digest() and path.stat().st_size < 2_000_000
    for name, recipe in recipes().items():
        norms = {norm.partition(" ")[0] for norm in shipped.norms_of(name)}
        assert norms == set(recipe.norms), name
