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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from normexp.config.compose import compose_config
from normexp.norms.build import build_norm

OUT = Path(os.environ.get("OUT", "."))
DEADLINE = float(os.environ.get("DEADLINE", "inf"))  # in seconds since 1970
TORCHS = "norm=custom norm._target_=torch.nn."
OF_MAPS = (
    *("norm=batch", f"{TORCHS}BatchNorm2d", "norm=group", f"{TORCHS}GroupNorm norm.num_groups=32"),
    *("norm=layer", "norm=instance", "norm=rms", "norm=frn", "norm=evonorm_s0", "norm=salu"),
    *("norm=derf", "norm=dyt"),
)
OF_TOKENS = (
    *("norm=layer", f"{TORCHS}LayerNorm", "norm=rms", f"{TORCHS}RMSNorm", "norm=one_plus_rms"),
    *("norm=derf", "norm=dyt", "norm=batch", "norm=salu", "norm=rep_batch"),
)
MAPS, TOKENS = (256, 64, 32, 32), (32, 1024, 768)


def build(words: str, shape: tuple[int, ...], device: str) -> nn.Module:
    factory = build_norm(compose_config([*words.split(), "trainer=cpu"]))
    norm = factory(shape[1]) if len(shape) == 4 else factory.tokens(shape[-1])
    return norm.to(device).train()


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
            kept = torch.cuda.memory_allocated() - before - output.numel() * output.element_size()
            found["MiB"] = kept / 2**20
    return found


def main(device: str) -> None:
    name = "cuda" if device == "gpu" else "cpu"
    cases = [
        *((words, MAPS, layout) for words in OF_MAPS for layout in ("first", "last")),
        *((words, TOKENS, "last") for words in OF_TOKENS),
    ]
    if device == "cpu":
        cases = [cases[0], cases[2], cases[-3]]
    for is_compiled in (False, True):
        for words, shape, layout in cases:
            if time.time() > DEADLINE - 10:
                return
            sizes = shape if device == "gpu" else (4, *shape[1:])
            x = torch.randn(sizes, device=name, dtype=torch.bfloat16)
            if len(shape) == 4 and layout == "last":
                x = x.to(memory_format=torch.channels_last)
            row: dict[str, Any] = {
                "norm": words,
                "shape": sizes,
                "channels": layout,
                "compiled": is_compiled,
            }
            try:
                norm = build(words, sizes, name)
                torch.compiler.reset()
                row |= measure(torch.compile(norm) if is_compiled else norm, x.requires_grad_())
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:200]
            print(row, flush=True)
            with open(OUT / "norms.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
