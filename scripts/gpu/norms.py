"""Time and memory of norms: forward and backward, on maps in both layouts and on tokens.

    python scripts/gpu/norms.py gpu|cpu

Appends a line per row to $OUT/norms.jsonl: microseconds (median), and MiB that a forward keeps for
its backward beside its output.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from normexp.norms.build import build_norm
from normexp.training.config.compose import compose_config

OUT = Path(os.environ.get("OUT", "."))
DEADLINE = float(os.environ.get("DEADLINE", "inf"))  # in seconds since 1970
TORCHS = "custom norm._target_=torch.nn."
OF_MAPS = ["batch", "group", "layer", "instance", "rms", "frn", "evonorm_s0", "salu", "derf", "dyt"]
OF_MAPS += [f"{TORCHS}BatchNorm2d", f"{TORCHS}GroupNorm norm.num_groups=32"]
OF_TOKENS = ["layer", "rms", "one_plus_rms", "derf", "dyt", "batch", "salu", "rep_batch"]
OF_TOKENS += [f"{TORCHS}LayerNorm", f"{TORCHS}RMSNorm"]
MAPS, TOKENS = (256, 64, 32, 32), (32, 1024, 768)


def measure(norm: nn.Module, x: Tensor) -> dict[str, float]:
    gradient = torch.randn_like(x)

    def step() -> None:
        norm(x).backward(gradient)
        x.grad = None

    with torch.autocast(x.device.type, torch.bfloat16):
        for _ in range(3):  # compiles, chooses kernels
            step()
        timer = Timer("step()", globals={"step": step})
        found = {"us": 1e6 * timer.blocked_autorange(min_run_time=0.2).median}
        if x.is_cuda:
            before = torch.cuda.memory_allocated()
            output = norm(x)
            found["MiB"] = (torch.cuda.memory_allocated() - before - output.nbytes) / 2**20
    return found


def main(device: str) -> None:
    name = "cuda" if device == "gpu" else "cpu"
    cases = [(words, MAPS, is_last) for words in OF_MAPS for is_last in (False, True)]
    cases += [(words, TOKENS, True) for words in OF_TOKENS]
    if device == "cpu":
        cases = [cases[0], cases[2], cases[-2]]
    for compiled, (words, shape, is_last) in product((False, True), cases):
        if time.time() > DEADLINE - 10:
            return
        sizes = shape if device == "gpu" else (4, *shape[1:])
        x = torch.randn(sizes, device=name, dtype=torch.bfloat16)
        if len(shape) == 4 and is_last:
            x = x.to(memory_format=torch.channels_last)
        row: dict[str, Any] = {"norm": words, "shape": sizes, "last": is_last, "compiled": compiled}
        try:
            factory = build_norm(compose_config([*f"norm={words}".split(), "trainer=cpu"]))
            norm = factory(shape[1]) if len(shape) == 4 else factory.tokens(shape[-1])
            norm.to(name).train()
            torch.compiler.reset()
            row |= measure(torch.compile(norm) if compiled else norm, x.requires_grad_())
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:200]
        print(row, flush=True)
        with open(OUT / "norms.jsonl", "a") as file:
            print(json.dumps(row), file=file)


if __name__ == "__main__":
    main(sys.argv[1])
