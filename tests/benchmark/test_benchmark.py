"""The benchmark: its table, declared claims, and an entry from one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from normexp.benchmark import claims, main, table
from normexp.benchmark.claims import declared_claims, judge_claims
from normexp.benchmark.table import (
    WORKLOADS,
    Table,
    TableCell,
    digest,
    read_table,
    recipes,
    shipped_path,
    write_table,
)
from normexp.errors import UserError
from normexp.reporting.cells import build_cells
from normexp.reporting.metric import describe_metric
from normexp.reporting.slices import Grid

NUM_IMAGES = 500
SEEDS = tuple(range(8))
# Tuned means of the shipped table, images: accuracy in %.
TUNED = {
    ("convnet", "batch", 2): 97.403000,
    ("convnet", "batch", 32): 97.586429,
    ("convnet", "group", 32): 96.918571,
    ("vit", "layer", 32): 94.803000,
}


def cells(recipe: str, norm: str, error: float, size: int | None = None) -> list[TableCell]:
    """Runs of a norm whose error is lowest at the middle rate; images differ in difficulty."""
    made = []
    for place, lr in enumerate(recipes()[recipe].lrs):
        rng = np.random.default_rng([place, *map(ord, f"{recipe}{norm}{size}")])
        wrong = error + 0.1 * abs(place - 2)
        hard = np.random.default_rng(0).gamma(2.0, 0.5, NUM_IMAGES)  # the same for every norm
        is_right = rng.random((len(SEEDS), NUM_IMAGES)) > wrong * hard
        accuracy = is_right.mean(axis=1)
        mixes = size is not None or norm == "batch"
        about = {"mixes_samples": mixes, "chance": 0.1, "id": f"{norm}-{size}-{lr}"}
        metrics = {"val/accuracy": accuracy, "val/loss": 1 - accuracy, "test/accuracy": accuracy}
        lost = np.zeros(len(SEEDS), dtype=bool)
        samples = {"running": is_right}
        made.append(TableCell(recipe, norm, size, lr, about, SEEDS, lost, metrics, samples))
    return made


def convnet(batch_at_2: float) -> Table:
    """Batch norm at both sizes, layer and group norm, at both budgets."""
    made = []
    for recipe in ("convnet", "convnet_short"):
        made += [*cells(recipe, "batch", 0.05), *cells(recipe, "batch", batch_at_2, 2)]
        made += [*cells(recipe, "layer", 0.07), *cells(recipe, "group", 0.07)]
    about = {"benchmark": "benchmark1", "rules": digest(), "commits": ["c"], "time": "now"}
    return Table(about, tuple(made))


def tuned(shipped: Table, recipe: str, norm: str, size: int) -> Grid:
    known = build_cells(shipped.records([recipe]))
    own = [one for one in known if one.norm == norm]
    own = [one for one in own if not one.mixes_samples or one.norm_batch_size == size]
    return Grid(norm, sorted(own, key=lambda one: one.lr or 0.0), describe_metric("test/accuracy"))


def test_a_table_survives_its_file_and_unpacks_into_runs(tmp_path: Path):
    made = convnet(0.1)
    write_table(made, tmp_path / "table.npz")
    read = read_table(tmp_path / "table.npz")
    assert read.about == made.about and len(read.cells) == len(made.cells)
    for before, after in zip(made.cells, read.cells, strict=True):
        assert np.array_equal(before.samples["running"], after.samples["running"])
        assert np.allclose(before.metrics["test/accuracy"], after.metrics["test/accuracy"])
    runs = read.records(["convnet"]).runs
    assert len(runs) == 4 * 5 * len(SEEDS)
    metric = describe_metric("test/accuracy")
    assert all(len(run.samples(metric)) == NUM_IMAGES for run in runs)
    (tmp_path / "other.npz").write_bytes(b"no table")
    with pytest.raises(UserError, match="not a table of the benchmark"):
        read_table(tmp_path / "other.npz")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *((["norm=rms", word], "frozen") for word in ("lr=0.1", "replicas=2", "model.width=8")),
        (["norm=rms,layer"], "an entry is one norm"),
        (["dry_run=true"], "an entry is one norm"),
        (["norm=rms", "workloads=[nowhere]"], "the table has convnet"),
        (["reference=nowhere", "norm=rms"], "no such table; benchmark1"),
    ],
)
def test_an_entry_that_breaks_the_rules_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("batch_at_2", "outcome", "of_renorm"),
    [(0.3, "holds", "holds"), (0.05, "fails", "nothing to explain")],
)
def test_claims_are_judged_by_the_table(batch_at_2: float, outcome: str, of_renorm: str):
    made = convnet(batch_at_2)
    renorm = [
        one for name in ("convnet", "convnet_short") for one in cells(name, "batch_renorm", 0.05, 2)
    ]
    judged = {one.name: one for one in judge_claims(made.with_entry(renorm))}
    assert judged["batch_norm_falls"].outcome == outcome
    assert judged["batch_renorm"].outcome == of_renorm
    assert judged["ghost_batches"].outcome == "no runs"
    assert len(claims.claims_table([*judged.values()]).frame) > len(judged)


def test_the_shipped_table_is_of_the_rules_that_are_shipped():
    path = shipped_path("benchmark1")
    shipped = read_table(path)
    assert shipped.about["rules"] == digest() and path.stat().st_size < 2_000_000
    for name, recipe in recipes().items():
        own = {cell.norm.partition(" ")[0] for cell in shipped.cells if cell.recipe == name}
        assert own == set(recipe.norms), name
    for one in (one for claim in declared_claims() for one in claim["comparisons"]):
        for side in (one["first"], one["second"]):
            trained = recipes()[side.get("workload", one["workload"])].norms
            assert side["norm"].partition(" ")[0] in trained
    for (recipe, norm, size), expected in TUNED.items():
        assert tuned(shipped, recipe, norm, size).mean.estimate == pytest.approx(expected, abs=1e-5)
    assert {*WORKLOADS} <= {cell.recipe for cell in shipped.cells}


@pytest.mark.slow
def test_a_norm_is_entered_by_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    import normexp

    place = [f"runs_dir={tmp_path}", "workers=0"]
    normexp.run(["experiment=benchmark0/convnet", "norm=batch", "replicas=4", *place])
    table.main(tmp_path, tmp_path / "b0.npz", "benchmark0")
    assert main([f"reference={tmp_path / 'b0.npz'}", "norm=rms", *place]) == 0
    assert "batch" in capsys.readouterr().out
    assert (tmp_path / "benchmark0-rms" / "report" / "index.html").is_file()
