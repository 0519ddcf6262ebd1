"""Which cause carries a loss at a small norm batch size."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from synthetic_study import answers_of, report_of, write_sizes

from normexp.records.metrics import MetricsWriter
from normexp.reporting.causes import CAUSES
from normexp.reporting.charts import Figure
from normexp.reporting.publish import draw
from normexp.reporting.report import to_json

SEEDS = 8


def write_study(root: Path, noise: float, share: float, averages: float, spread: float = 0.002):
    """Batch norm at 2 and 128, which loses by each cause; evaluated as `normexp.evaluate` does."""
    rng = np.random.default_rng(1)

    def drawn(level: float) -> np.ndarray:
        return level + rng.normal(0, spread, SEEDS)

    share_of = {128: drawn(0.9), 2: drawn(0.9 - noise)}
    precise_of = {128: share_of[128], 2: share_of[2] - drawn(share)}
    running_of = {128: precise_of[128], 2: precise_of[2] - drawn(averages)}
    cells = write_sizes(root, {size: dict(enumerate(v)) for size, v in running_of.items()})
    for size, cell in zip(running_of, cells, strict=True):
        for seed in range(SEEDS):
            content = {
                "asked": {"precise": 64, "own_share": 64},
                "precise": {"test/accuracy": precise_of[size][seed]},
                "own_share": {"test/accuracy": share_of[size][seed]},
            }
            (cell / f"seed-{seed}" / "evaluation.json").write_text(json.dumps(content))


def cause_of(root: Path) -> list[str]:
    (answer,) = answers_of(root)
    return [claim.text for claim in answer.sentences if claim.kind == "cause"]


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ((0.1, 0.0, 0.0), "Training noise "),
        ((0.0, 0.1, 0.0), "Own share "),
        ((0.02, 0.01, 0.1), "Running averages "),
        ((0.05, 0.05, 0.0), "Training noise and own share take part in the loss of batch at"),
        ((0.05, 0.05, 0.05), "No single cause carries the loss of batch at"),
        ((0.0, 0.0, 0.0), "No loss of batch at norm batch size 2 to explain"),
    ],
)
def test_a_cause_is_named_only_where_seeds_show_it(tmp_path: Path, terms, words: str):
    write_study(tmp_path, *terms)
    (sentence,) = cause_of(tmp_path)
    assert sentence.startswith(words)
    assert ("carries" in sentence) == any(terms)
    report = report_of(tmp_path)
    assert sentence in str(to_json(report)["sections"])
    if not any(terms):
        return
    headline = report.sections[0].headline
    assert headline is not None and "batch loses" in headline.claim and words in headline.claim
    assert "own share: in training a sample shapes its own" in headline.details
    if words == "Training noise ":
        assert "against training noise: another learning rate" in headline.details
    for name, term in zip(CAUSES, terms, strict=True):
        shown = re.search(rf"{name} (-?[0-9.]+) \[(-?[0-9.]+), (-?[0-9.]+)\]", sentence)
        assert shown is not None, name
        value, low, high = map(float, shown.groups())
        assert value == pytest.approx(100 * term, abs=0.4) and low < value < high


def test_without_records_the_sentence_is_the_commands_that_add_them(tmp_path: Path):
    write_study(tmp_path, 0.1, 0.0, 0.0)
    files = [*tmp_path.glob("synthetic/*/seed-*/evaluation.json")]
    for file in files:
        file.unlink()
    (sentence,) = cause_of(tmp_path)
    for cell in tmp_path.glob("synthetic/batch*"):
        command = f"normexp.evaluate run={cell} 'evaluate_with=[running,precise,own_share]'"
        assert command in sentence
    for file in files:  # they were typed, and gave nothing
        file.write_text(json.dumps({"asked": {"precise": 64, "own_share": 64}}))
    assert not cause_of(tmp_path)


def figures_of(root: Path) -> dict[str, Figure]:
    return {figure.kind: figure for figure in draw(report_of(root)).figures}


def record(root: Path, size: int, rows: dict[str, float]) -> None:
    for run in root.glob(f"synthetic/batch*-n{size}/seed-*"):
        with MetricsWriter(run / "metrics.csv") as writer:
            for step in (10, 20):
                writer.add(step, step // 10, step * 128, rows)


def test_two_sizes_stand_beside_each_other_once_their_groups_were_recorded(tmp_path: Path):
    write_study(tmp_path, 0.1, 0.0, 0.0)
    for size in (2, 128):
        record(tmp_path, size, {"train/grad_norm": 1.0})
    kinds = {"group_scatter", "averages_distance", "gradient_and_rate"}
    assert not figures_of(tmp_path).keys() & kinds
    for size, scatter in ((2, 0.7), (128, 0.1)):
        names = ("mean_scatter", "var_scatter", "mean_distance", "var_distance", "effective_lr")
        record(tmp_path, size, {f"diagnostics/block.norm1/{name}": scatter for name in names})
    figures = figures_of(tmp_path)
    assert figures.keys() >= kinds
    table = figures["group_scatter"].table
    shown = table[table["panel"] == "means of groups"].set_index("series")["mean"]
    expected = {"norm batch size 2": 0.7, "norm batch size 128": 0.1, "2, expected from 128": 0.8}
    assert shown.to_dict() == pytest.approx(expected)  # 0.1 sqrt(128 / 2)
    curves = figures["gradient_and_rate"].table
    assert set(curves["panel"]) == {"gradient norm", "effective learning rate"}
    assert set(curves["samples"]) == {1280, 2560} and set(curves["n"]) == {SEEDS}
