"""A whole study through the command line, against the runs of somebody who has only Lightning."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator

from bench_engine import make_cell
from bench_measure import Bench, Row, run_python
from bench_steps import plain_lightning

NORMS = ("batch", "layer", "instance", "group")
NORM_BATCH_SIZES = (2, 4, 8, 16, 32, 128)
BATCH_SIZE, SEEDS = 128, 8


def study(bench: Bench) -> Iterator[Row]:
    """Ours is run from the first to the last result; theirs is a sample, extrapolated.

    Both have one worker process. Sample: steps of batch norm at each norm batch size as gradient
    accumulation, in Lightning's loop as a Trainer has it by default, without validation. Times
    steps, norms and seeds; the imports of each of their processes are counted once for every run
    in another row.
    """
    epochs = 1 if bench.quick else 12
    ours, num_cells = _ours(bench, epochs, workers=1)
    cell = make_cell(f"batch_size={BATCH_SIZE}", f"epochs={epochs}")
    steps, sample = cell.plan.num_steps, 12 if bench.quick else 40
    sampled = {}
    for size in NORM_BATCH_SIZES:
        part = make_cell(f"batch_size={BATCH_SIZE}", f"steps={sample}")
        rounds = [
            plain_lightning(part, accumulate=BATCH_SIZE // size, folder=bench.folder)
            for _ in range(3)
        ]
        sampled[size] = statistics.median(rounds)
    theirs = sum(sampled.values()) * steps * len(NORMS) * SEEDS
    distinct = (sum(sampled.values()) + 3 * sampled[BATCH_SIZE]) * steps * SEEDS
    what = f"study: 4 norms x 6 norm batch sizes x 8 seeds, {epochs} epochs"
    note = (
        f"ours {ours:.0f} s for {num_cells} distinct cells; Lightning {theirs:.0f} s by "
        f"extrapolation of {sample} steps at each size ({distinct:.0f} s where its "
        "user knows which cells are alike)"
    )
    yield Row(what, "Lightning, a run each", theirs / ours, 20, ">=", note=note)
    yield Row(what, "Lightning, distinct cells only", distinct / ours)
    spread, _ = _ours(bench, epochs, workers=os.cpu_count() or 1)
    yield Row(what, "the same with a worker for each core", ours / spread)
    runs = len(NORMS) * len(NORM_BATCH_SIZES) * SEEDS
    imports, _ = run_python("-c", "import torch, pytorch_lightning")
    yield Row(what, "Lightning, a process each", (theirs + runs * imports) / ours)


def _ours(bench: Bench, epochs: int, workers: int) -> tuple[float, int]:
    runs_dir = bench.folder / f"study-{workers}"
    words = [
        *("-m", "normexp.train", "-m", "trainer=cpu", f"norm={','.join(NORMS)}"),
        f"norm_batch_size={','.join(map(str, NORM_BATCH_SIZES))}",
        *(f"batch_size={BATCH_SIZE}", f"epochs={epochs}", f"replicas={SEEDS}", "study=bench"),
        *(f"workers={workers}", f"runs_dir={runs_dir}"),
    ]
    seconds, _ = run_python(*words)
    results = list(runs_dir.glob("bench/*/seed-*/result.json"))
    cells = {path.parents[1] for path in results}
    assert len(results) == SEEDS * len(cells) > 0, "a run of the study failed"
    return seconds, len(cells)


MEASUREMENTS = {"study": study}
