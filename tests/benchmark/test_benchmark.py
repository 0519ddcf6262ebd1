"""The benchmark: its study of runs, declared claims, and an entry from one line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from normexp.benchmark import claims, main
from normexp.benchmark.claims import declared_claims, judge_claims
from normexp.benchmark.reference import WORKLOADS, Reference, read_reference
from normexp.cli import parse_command
from normexp.training.config.command import compose_cells
from normexp.training.records.archive import ArchivedCell, pack_study, write_archive
from normexp.training.records.journal import CommandEntry, Request, entry_line
from normexp.training.records.result import Measured, Result, Status
from normexp.verdicts.arm_at_size import ArmAtSize
from normexp.verdicts.arms import label_cells
from normexp.verdicts.cells import CellRuns, build_cells
from normexp.verdicts.metric import describe_metric

NUM_IMAGES = 500
SEEDS = range(8)
RATES = (0.03, 0.1, 0.3, 1.0, 3.0)
# Tuned means of the shipped runs, images: accuracy in %.
TUNED = {
    ("convnet", "batch", 2): 97.403000,
    ("convnet", "batch", 32): 97.586429,
    ("convnet", "group", 32): 96.918571,
    ("vit", "layer", 32): 94.803000,
}


def cells(
    recipe: str, norm: str, error: float, size: int = 32, best: int = 2
) -> list[ArchivedCell]:
    """Runs of a norm whose error is lowest at one of RATES; images differ in difficulty."""
    made = []
    for place, lr in enumerate(RATES):
        rng = np.random.default_rng([place, *map(ord, f"{recipe}{norm}{size}")])
        hard = np.random.default_rng(0).gamma(2.0, 0.5, NUM_IMAGES)  # the same for every norm
        wrong = (error + 0.1 * abs(place - best)) * hard
        is_right = rng.random((len(SEEDS), NUM_IMAGES)) > wrong
        groups = {"norm": norm, "model": "convnet", "data": "mnist5k", "optim": "sgd"}
        defines = {group: {"choice": choice} for group, choice in groups.items()}
        derived = {"batch_size": 32, "micro_batch_size": 32, "norm_batch_size": size, "lr": lr}
        derived["epochs"] = 6 if recipe.endswith("_short") else 18
        cell_id = f"{recipe}-{norm}-{size}-{lr}"
        results = []
        for right in is_right:
            accuracy = float(right.mean())
            names = ("val/accuracy", "test/accuracy")
            measured = Measured(
                dict.fromkeys(names, accuracy) | {"val/loss": 1 - accuracy},
                traits={"mixes_samples": norm.startswith("batch")},
                chance_accuracy=0.1,
            )
            seed = len(results)
            results.append(Result(cell_id, seed, Status.FINISHED, defines, derived, measured))
        samples = {seed: {"running": is_right[seed]} for seed in SEEDS}
        made.append(ArchivedCell(cell_id, results, samples))
    return made


def reference_of(path: Path, norms: Sequence[tuple[Any, ...]]) -> Reference:
    """The reference with these norms (the arguments of `cells`), at both budgets of the convnet."""
    lines, made = [], []
    for recipe in ("convnet", "convnet_short"):
        own = [cell for one in norms for cell in cells(recipe, *one)]
        asked = {cell.id: Request([cell.id], [*SEEDS]) for cell in own}
        words = ["normexp-train", f"experiment=benchmark1/{recipe}"]
        lines.append(entry_line(CommandEntry(recipe, words, "", asked)))
        made += own
    write_archive(path, "\n".join(lines), made)
    return read_reference(str(path))


def tuned(
    known: Sequence[CellRuns], norm: str, size: int, metric: str = "test/accuracy"
) -> ArmAtSize:
    own = [one for one in known if one.arm == norm]
    own = [one for one in own if not one.mixes_samples or one.norm_batch_size == size]
    own.sort(key=lambda one: one.tuned or 0.0)
    return ArmAtSize(norm, own, describe_metric(metric))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *((["norm=rms", word], "frozen") for word in ("lr=0.1", "replicas=2", "model.width=8")),
        (["norm=rms,layer", "workloads=[gpt]"], "an entry is one norm"),
        (["norm=rms", "workloads=[nowhere]"], "the reference has convnet"),
        (["reference=nowhere", "norm=rms"], "no such study; benchmark1"),
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
def test_claims_are_judged_by_the_runs(
    tmp_path: Path, batch_at_2: float, outcome: str, of_renorm: str
):
    norms = [("batch", 0.05, 32), ("batch", batch_at_2, 2), ("batch_renorm", 0.05, 2)]
    norms += [("layer", 0.1, 32), ("group", 0.1, 32)]
    judged = {one.name: one for one in judge_claims(reference_of(tmp_path / "own.zip", norms))}
    assert judged["batch_norm_falls"].outcome == outcome
    assert judged["batch_renorm"].outcome == of_renorm
    assert judged["ghost_batches"].outcome == "no runs"
    assert len(claims.claims_table([*judged.values()]).frame) > len(judged)


def test_a_claim_on_a_norm_whose_best_rate_is_at_the_edge_is_undecided(tmp_path: Path):
    norms = [("batch", 0.05, 32), ("batch", 0.3, 2, 4), ("layer", 0.1, 32), ("group", 0.1, 32)]
    judged = {one.name: one for one in judge_claims(reference_of(tmp_path / "own.zip", norms))}
    claim = judged["batch_norm_falls"]
    assert claim.outcome == "undecided" and {test.verdict for test in claim.tests} == {None}


def test_an_entry_stands_in_place_of_the_same_cells(tmp_path: Path):
    reference = reference_of(tmp_path / "own.zip", [("batch", 0.05, 32), ("layer", 0.1, 32)])
    before = reference.rows_of(["convnet"]).runs
    entry = [run for run in before if run.config["norm"] == "layer"][:3]
    after = reference.rows_of(["convnet"], entry).runs
    assert len(before) == 2 * len(RATES) * len(SEEDS)
    assert len(after) == len(before) - len(SEEDS) + len(entry)


@pytest.mark.slow
def test_the_shipped_runs_are_those_of_the_shipped_recipes():
    shipped = read_reference("benchmark1")
    path = Path(claims.__file__).with_name("benchmark1.zip")
    assert path.stat().st_size < 3_000_000 and shipped.workloads == [*WORKLOADS]
    known = {
        recipe: label_cells(build_cells(shipped.rows_of([recipe]))) for recipe in shipped.recipes
    }
    norms = {recipe: {cell.arm for cell in rows} for recipe, rows in known.items()}
    for one in (one for claim in declared_claims() for one in claim["comparisons"]):
        for side in (one["first"], one["second"]):
            assert side["norm"] in norms[side.get("workload", one["workload"])]
    for (recipe, norm, size), expected in TUNED.items():
        found = tuned(known[recipe], norm, size)
        assert found.mean.estimate == pytest.approx(expected, abs=1e-5)
    of_text = tuned(known["gpt"], "batch", 16, "test/bits_per_byte")
    assert of_text.outcomes.ndim == 2  # intervals of the GPTs are over test texts, too
    specs = compose_cells(parse_command(["experiment=benchmark1/convnet_batch_size"]))  # ids stand
    assert {spec.id for spec in specs} == shipped.recipes["convnet_batch_size"]


@pytest.mark.slow
def test_a_norm_is_entered_by_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    import normexp

    place = [f"runs_dir={tmp_path}", "workers=0"]
    normexp.run(["experiment=benchmark0/convnet", "norm=batch", "replicas=4", *place])
    pack_study(tmp_path / "benchmark0", tmp_path / "own.zip")
    assert main([f"reference={tmp_path / 'own.zip'}", "norm=rms", *place]) == 0
    assert "batch" in capsys.readouterr().out
    assert (tmp_path / "benchmark0-rms" / "report" / "index.html").is_file()
