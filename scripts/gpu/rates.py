"""Images per second of whole trainings, as typed: seeds stacked or in turn, compiled or not.

    python scripts/gpu/rates.py gpu|cpu RUNS_DIR "WORDS OF ALL"

Appends a line per row to $OUT/rates.jsonl, and writes the words of the fastest form of the figure's
network to $OUT/form. `steady_ms` leaves out the first half, in which networks are compiled.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

from normexp.train import main
from normexp.training.module import TrainingModule

OUT, CIFAR = Path(os.environ.get("OUT", ".")), os.environ.get("CIFAR", "cifar10")
DEADLINE = float(os.environ.get("DEADLINE", "inf"))  # in seconds since 1970
IMAGES = f"data=image_folder data.root={CIFAR} batch_size=128 replicas=8 steps=120"
WIDE = f"model=small_resnet model.width=64 {IMAGES}"
NARROW = f"model=resnet20 {IMAGES}"
GPT = (
    "data=shakespeare data.block_size=256 model=gpt model.depth=6 model.width=384 "
    "model.num_heads=6 replicas=3 steps=50 batch_size=64"
)
TF32, BF16 = "trainer.precision=32-true", "trainer.precision=bf16-mixed"
FORMS = ["stack=true", "stack=false", "stack=true compile=true", "stack=false compile=true"]
ROWS = [
    f"norm=batch {WIDE} {TF32} stack=true",  # twice: the first also warms up
    *(f"norm=batch {WIDE} {TF32} {form}" for form in FORMS),
    *(f"norm=batch {WIDE} {BF16} {form}" for form in FORMS[2:]),
    *(f"norm=group {WIDE} {TF32} {form}" for form in FORMS[2:]),
    *(f"norm=batch norm_batch_size=2 {WIDE} {TF32} {form}" for form in FORMS[2:]),
    *(f"norm=batch {NARROW} {BF16} {form}" for form in FORMS[2:]),
    *(f"norm=layer {GPT} {BF16} {form}" for form in FORMS[2:]),
]
TINY = "steps=3 replicas=2 model.width=8 data.limit_train=256 data.val_fraction=0.01"
COMMON = "workers=0 save_weights=false val_every_epochs=1000 evaluate_with=[running] lr=0.1"


def timing_of(words: list[str], runs_dir: Path) -> dict[str, Any]:
    """Trains; returns the timing of its record, with `steady_ms`."""
    ends: list[tuple[int, float]] = []  # of the last training's chunks: steps and seconds so far
    take = TrainingModule.training_step

    def timed(module: TrainingModule, chunk: slice) -> None:
        take(module, chunk)
        if chunk.start == 0:
            ends.clear()
        ends.append((module.step, module.train_seconds))

    with mock.patch.object(TrainingModule, "training_step", timed):
        if code := main(words):
            return {"code": code}
    (steps, seconds), (all_steps, all_seconds) = ends[(len(ends) - 1) // 2], ends[-1]
    steady_ms = 1000 * (all_seconds - seconds) / max(all_steps - steps, 1)
    (path,) = list(runs_dir.rglob("seed-0/result.json"))
    return json.loads(path.read_text())["measured"]["timing"] | {"steady_ms": steady_ms}


def measure(device: str, runs_dir: Path, rows: list[str], words: str) -> dict[str, float]:
    """Images per second by row; a row that fails is left out."""
    rates = {}
    for number, row in enumerate(rows):
        if time.time() > DEADLINE - 10:
            break
        folder = runs_dir / str(number)
        line = f"{row} {COMMON} {words} {TINY if device == 'cpu' else ''} runs_dir={folder}"
        by_key = {word.split("=")[0]: word for word in line.split()}  # the last one counts
        try:
            timing = timing_of([*by_key.values()], folder)
        except Exception as error:
            timing = {"error": f"{type(error).__name__}: {error}"}
        with open(OUT / "rates.jsonl", "a") as file:
            file.write(json.dumps({"row": row, **timing}) + "\n")
        ms = timing.get("steady_ms", 0.0)
        rates[row] = timing["samples_per_second"] * timing["step_ms"] / ms if ms else 0.0
        print(f"== {rates[row]:>9,.0f} images/s, {ms:.2f} ms: {row}", flush=True)
    return rates


if __name__ == "__main__":  # workers import this file
    device, folder, words = sys.argv[1:]
    rates = measure(device, Path(folder), ROWS if device == "gpu" else ROWS[:3], words)
    by_form = {form: rates.get(f"norm=batch {WIDE} {TF32} {form}", 0.0) for form in FORMS}
    if any(by_form.values()):
        best = max(by_form, key=lambda form: by_form[form])
        # A training that replays keeps the GPU busy almost alone; otherwise several take turns.
        (OUT / "form").write_text(f"{best} workers={2 if 'compile' in best else 4}\n")
