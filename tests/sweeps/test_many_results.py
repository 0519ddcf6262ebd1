"""A study of 5,000 results is listed and read in seconds."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

import normexp
from normexp.records.history import CellEntry, CommandEntry, append_entries
from normexp.records.paths import seed_dir
from normexp.records.result import Result
from normexp.status import main

NUM_CELLS, SEEDS = 1250, range(4)
LIMIT = 30.0  # seconds for each; measured: 4 and 3 on one busy core


def write_study(study: Path) -> None:
    entries = []
    metrics = {f"{part}/{name}": 0.5 for part in ("val", "test") for name in ("loss", "accuracy")}
    for number in range(NUM_CELLS):
        lr = 0.1 + number
        cell_id = f"batch-convnet-digits-b32-lr{lr}"
        config = {"norm": "batch", "batch_size": 32, "lr": lr, "num_steps": 600}
        for seed in SEEDS:
            run_dir = seed_dir(study / cell_id, seed)
            run_dir.mkdir(parents=True)
            result = Result(cell_id, seed, "finished", config, metrics, {"python": "3"})
            (run_dir / "result.json").write_text(json.dumps(result.to_dict()))
        (study / cell_id / "stacks" / "0-3").mkdir(parents=True)
        entry = CellEntry(f"{number:016}", f"norm=batch lr={lr}", list(SEEDS))
        entries += [entry, CellEntry(entry.digest, entry.title, entry.seeds, cell_id)]
    asked = {entry.digest: entry.seeds for entry in entries}
    append_entries(study, [*entries, CommandEntry(["normexp-train", "-m"], "0" * 16, asked)])


@pytest.mark.slow
def test_five_thousand_results_take_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_study(tmp_path / "s")
    began = time.monotonic()
    assert main(["study=s", f"runs_dir={tmp_path}"]) == 0
    assert "5000 runs of 1250 cells: 5000 finished" in capsys.readouterr().out
    listed = time.monotonic()
    assert len(normexp.load_study("s", tmp_path)) == 5000
    assert max(listed - began, time.monotonic() - listed) < LIMIT
