"""Which cause carries a loss at a small norm batch size."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from synthetic_study import answers_of, report_of, write_sizes

from normexp.reporting.causes import CAUSES
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
        ((0.05, 0.05, 0.0), "Seeds cannot tell what carries the loss of batch at"),
        ((0.05, 0.05, 0.05), "No single cause carries the loss of batch at"),
        ((0.0, 0.0, 0.0), "No loss of batch at norm batch size 2 to explain"),
    ],
)
def test_a_cause_is_named_only_where_seeds_show_it(tmp_path: Path, terms, words: str):
    write_study(tmp_path, *terms)
    (sentence,) = cause_of(tmp_path)
    assert sentence.startswith(words)
    assert ("carries the loss" in sentence) == any(terms)
    assert sentence in str(to_json(report_of(tmp_path))["sections"])
    if not any(terms):
        return
    for name, term in zip(CAUSES, terms, strict=True):
        number = r"(-?[0-9.]+) \[(-?[0-9.]+), (-?[0-9.]+)\] points"
        shown = re.search(f"{name} {number}|{name} carries .*?: {number}", sentence, re.IGNORECASE)
        assert shown is not None, name
        value, low, high = (float(text) for text in shown.groups() if text)
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
