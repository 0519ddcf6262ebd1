"""What starts in a process of its own: --help, a config error, the first step, peak memory."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from bench_measure import Bench, Row, alternate, milliseconds, ratio, run_python

FIRST_STEP = """
import os, sys, time
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

def ended(*_):
    print("first step", time.time())
    sys.stdout.flush()
    os._exit(0)

register_optimizer_step_post_hook(ended)
from normexp.train import main
main(sys.argv[1:])
"""

# Not the kernel's own peak: the imports pass through more memory than a small training ever holds.
PEAK_MEMORY = """
import sys, threading, time
from normexp.train import main
import torch, pytorch_lightning

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])

peak = before = resident()

def watch():
    global peak
    while True:
        peak = max(peak, resident())
        time.sleep(0.002)

threading.Thread(target=watch, daemon=True).start()
code = main(sys.argv[1:])
print("peak", before, peak)
sys.exit(code)
"""


def light(bench: Bench) -> Iterator[Row]:
    arms = {
        "torch": lambda: run_python("-c", "import torch")[0],
        "--help": lambda: run_python("-m", "normexp.train", "--help")[0],
        "error": lambda: run_python("-m", "normexp.train", "norm=nrom")[0],
    }
    times = alternate(arms, bench.rounds(9))
    for name, what in (("--help", "--help"), ("error", "a config error")):
        note = f"{milliseconds(times, name)}, import {milliseconds(times, 'torch')}"
        yield Row(what, "import torch", ratio(times, name, "torch"), 0.5, note=note)


def start_up(bench: Bench) -> Iterator[Row]:
    def first_step() -> float:
        runs_dir = f"runs_dir={bench.folder}/start-up-{time.time_ns()}"
        started = time.time()
        _, printed = run_python("-c", FIRST_STEP, "norm=batch", "trainer=cpu", runs_dir)
        return float(printed.split("first step")[1].split()[0]) - started

    arms = {
        "first step": first_step,
        "imports": lambda: run_python("-c", "import torch, pytorch_lightning")[0],
    }
    times = alternate(arms, bench.rounds(7))
    beyond = statistics.median(
        a - b for a, b in zip(times["first step"], times["imports"], strict=True)
    )
    note = f"first step after {statistics.median(times['first step']):.2f} s"
    yield Row("start-up of the default run", "imports", beyond, 2.0, unit=" s", note=note)


def memory(bench: Bench) -> Iterator[Row]:
    if not Path("/proc/self/statm").exists():  # Linux alone
        return
    for batch_size in (2, 128):
        peaks = {}
        for count in (1, 16):
            words = [
                *("norm=batch", "trainer=cpu", f"replicas={count}", f"batch_size={batch_size}"),
                *("epochs=1", "stack=true", f"runs_dir={bench.folder}/memory-{batch_size}-{count}"),
            ]
            printed = run_python("-c", PEAK_MEMORY, *words)[1].split("peak")[-1].split()
            pages = [int(value) for value in printed]  # before and at the peak
            peaks[count] = [value * os.sysconf("SC_PAGE_SIZE") / 2**20 for value in pages]  # MiB
        grown = {count: after - before for count, (before, after) in peaks.items()}
        note = (
            f"whole process {peaks[16][1]:.0f} and {peaks[1][1]:.0f} MiB, "
            f"above the imports {grown[16]:.0f} and {grown[1]:.0f} MiB"
        )
        what = f"peak memory of 16 stacked replicas, batch {batch_size}"
        yield Row(what, "one replica", peaks[16][1] / peaks[1][1], note=note)
        yield Row(f"{what}, above the imports", "one replica", grown[16] / max(grown[1], 1))


MEASUREMENTS = {"light": light, "start-up": start_up, "memory": memory}
