"""Rows that only a GPU can fill: resnet20 on noise of CIFAR's shape, norms against a copy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from bench_engine import make_cell, seconds_per_step
from bench_measure import Bench, Row, alternate
from bench_norms import SHAPES, make_norm
from PIL import Image

from normexp.config.help import group_choices

BATCH_SIZE = 256


def networks(bench: Bench) -> Iterator[Row]:
    """Samples per second of all replicas together, through the whole engine."""
    if not torch.cuda.is_available():
        return
    root = _noise(bench.folder / "noise", num_images=4096)
    data = ("data=image_folder", f"data.root={root}", f"data_dir={bench.folder}")
    common = ("trainer=gpu", "model=resnet20", *data, f"batch_size={BATCH_SIZE}")
    steps = f"steps={60 if bench.quick else 200}"
    for size in (2, 16, 128):
        yield _throughput(bench, f"norm batch {size}", 1, *common, steps, f"norm_batch_size={size}")
    for count in (1, 4, 16):
        yield _throughput(bench, f"{count} replicas", count, *common, steps)
    for switch in ("false", "true"):
        name = "compiled" if switch == "true" else "eager"
        yield _throughput(bench, name, 1, *common, steps, f"compile={switch}")


def _noise(root: Path, num_images: int) -> Path:
    """Images of ten classes as a folder, so that no network is needed."""
    pixels = torch.randint(0, 256, (num_images, 32, 32, 3), dtype=torch.uint8).numpy()
    for index, image in enumerate(pixels):
        split = "test" if index % 8 == 0 else "train"
        folder = root / split / f"class{index // 8 % 10}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{index}.png")
    return root


def _throughput(bench: Bench, name: str, num_replicas: int, *overrides: str) -> Row:
    cell, seeds = make_cell(*overrides), list(range(num_replicas))
    times = alternate({"step": lambda: seconds_per_step(bench, cell, seeds)}, bench.rounds(3, 1))
    rate = num_replicas * BATCH_SIZE / sorted(times["step"])[len(times["step"]) // 2]
    return Row(f"resnet20 on 32x32 noise, {name}", "-", rate, unit=" samples/s")


def bandwidth(bench: Bench) -> Iterator[Row]:
    """The least traffic of a forward and backward, five passes over x, as a share of a copy's."""
    if not torch.cuda.is_available():
        return
    shapes = [(8 * shape[0], *shape[1:]) for shape in SHAPES]
    for name in group_choices("norm"):
        if name == "custom":
            continue
        for shape in shapes:
            yield _share(bench, name, shape)


def _share(bench: Bench, name: str, shape: tuple[int, ...]) -> Row:
    what = f"norm {name} {shape}"
    x = torch.randn(shape, device="cuda", requires_grad=True)
    gradient, target = torch.randn_like(x), torch.empty_like(x)
    try:
        norm = make_norm(name, shape).cuda()
        norm(x).backward(gradient)
    except Exception as error:  # a norm of sequences alone, say: its own words
        return Row(what, "copy bandwidth", None, note=str(error).splitlines()[0])

    def step() -> None:
        x.grad = None
        norm(x).backward(gradient)

    arms = {"norm": _on_device(step), "copy": _on_device(lambda: target.copy_(gradient))}
    times = alternate(arms, bench.rounds(9))
    seconds = {arm: sorted(values)[len(values) // 2] for arm, values in times.items()}
    # Forward reads x and writes y; backward reads x and dy and writes dx; a copy has two passes.
    return Row(what, "copy bandwidth", 2.5 * seconds["copy"] / seconds["norm"])


def _on_device(run: Callable[[], object], repeats: int = 20) -> Callable[[], float]:
    def arm() -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / repeats

    return arm


MEASUREMENTS = {"gpu-networks": networks, "gpu-norms": bandwidth}
