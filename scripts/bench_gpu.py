"""ResNet-20 on a GPU against hand-written loops and Lightning, norms against the copy bandwidth.

With `--smoke` everything is small and runs on a CPU, which shows that the rows can be measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from bench_measure import Bench, Row, alternate, ratio, run_python, timed
from bench_norms import torch_norm
from bench_training import LR, noise, ours, quiet
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from normexp.batching.sizes import Sizes
from normexp.build import build_norm
from normexp.config.compose import compose_config
from normexp.config.spec import norm_of
from normexp.train import main as train

Step = Callable[[], object]


def is_measured(bench: Bench) -> bool:
    return bench.smoke or torch.cuda.is_available()


def device_of(bench: Bench) -> str:
    return "cpu" if bench.smoke else "cuda"


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def words_for(bench: Bench) -> list[str]:
    """The command of a cell: bfloat16 on a GPU."""
    trainer = "trainer=cpu" if bench.smoke else "trainer=gpu"
    model = "convnet" if bench.smoke else "resnet20"
    custom = ["data=custom", "data._target_=bench_training.noise"]
    return [trainer, f"model={model}", *custom, f"data.num_images={images_of(bench)}"]


def images_of(bench: Bench) -> int:
    return 40 if bench.smoke else 8192


def batch_size_of(bench: Bench) -> int:
    return 8 if bench.smoke else 128


def num_steps_of(bench: Bench) -> int:
    return 4 if bench.smoke else 100 if bench.quick else 300


# --- A hand-written loop --------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        conv = partial(nn.Conv2d, kernel_size=3, padding=1, bias=False)
        self.conv1, self.norm1 = conv(before, width, stride=stride), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = conv(width, width), nn.BatchNorm2d(width)
        same = before == width
        self.shortcut = nn.Identity() if same else nn.Conv2d(before, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm1(self.conv1(x)).relu()
        return (self.norm2(self.conv2(out)) + self.shortcut(x)).relu()


def resnet20() -> nn.Module:
    """ResNet-20 in plain PyTorch."""
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    blocks, before = [], 16
    for width, stride in ((16, 1), (32, 2), (64, 2)):
        for index in range(3):
            blocks.append(Block(before, width, stride if index == 0 else 1))
            before = width
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def batches(bench: Bench) -> tuple[Tensor, Tensor]:
    """Normalized images and targets on the device."""
    data = noise(images_of(bench)).to(device_of(bench))
    every = data.train.gather(torch.arange(len(data.train)))
    return data.model_inputs(every["inputs"]), every["targets"]


def step_by_hand(bench: Bench, form: str) -> Step:
    """A step on data on the device: eager, compiled, or replayed as one CUDA graph (graphed)."""
    device, size = device_of(bench), batch_size_of(bench)
    network = resnet20().to(device, memory_format=torch.channels_last)
    lr: Any = torch.tensor(LR, device=device) if form == "graphed" else LR
    optimizer = torch.optim.SGD(
        network.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True
    )
    run = torch.compile(network, mode="reduce-overhead") if form == "compiled" else network
    inputs, targets = batches(bench)
    x = inputs[:size].to(memory_format=torch.channels_last).clone()
    y = targets[:size].clone()

    def autocast() -> Any:
        is_gpu = device == "cuda"
        return (
            torch.autocast(device, torch.bfloat16, cache_enabled=False) if is_gpu else nullcontext()
        )

    def take() -> None:
        optimizer.zero_grad(set_to_none=form != "graphed")
        with autocast():
            loss = cross_entropy(run(x), y)
        loss.backward()
        optimizer.step()

    def load() -> None:
        chosen = torch.randint(len(targets), (size,), device=device)
        x.copy_(inputs[chosen])
        y.copy_(targets[chosen])

    if form != "graphed":
        return lambda: (load(), take())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            take()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        take()
    return lambda: (load(), graph.replay())


def seconds_of(bench: Bench, step: Step) -> float:
    """Seconds per call of a step, after a warm-up."""
    num_steps = num_steps_of(bench)
    for _ in range(max(2, num_steps // 10)):
        step()
    wait()
    started = time.perf_counter()
    for _ in range(num_steps):
        step()
    wait()
    return (time.perf_counter() - started) / num_steps


class LightningResNet(pl.LightningModule):
    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        super().__init__()
        self.network = resnet20()
        self.images, self.targets = inputs, targets

    def training_step(self, chosen: Tensor, _: int) -> Tensor:
        loss = cross_entropy(self.network(self.images[chosen]), self.targets[chosen])
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        options = {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4, "fused": True}
        return torch.optim.SGD(self.parameters(), lr=LR, **options)


def seconds_by_lightning(bench: Bench) -> float:
    inputs, targets = batches(bench)
    steps = num_steps_of(bench)
    order = [torch.randint(len(targets), (batch_size_of(bench),)) for _ in range(steps)]
    ends: list[float] = []

    def on_step(*_: object) -> None:
        if len(ends) in (steps // 4, steps - 1):
            wait()
        ends.append(time.perf_counter())

    hook = register_optimizer_step_post_hook(on_step)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options |= {"enable_model_summary": False, "max_epochs": 1}
    options |= {"precision": "32-true" if bench.smoke else "bf16-mixed"}
    try:
        with quiet():
            trainer = pl.Trainer(accelerator="cpu" if bench.smoke else "gpu", devices=1, **options)
            trainer.fit(LightningResNet(inputs, targets), DataLoader(order, batch_size=None))
    finally:
        hook.remove()
    return (ends[steps - 1] - ends[steps // 4]) / (steps - 1 - steps // 4)


# A form of a step to the one measured before it that it is compared with, and the highest ratio.
STEP_RATIOS: dict[str, tuple[str, float | None]] = {
    "ours": ("hand-written, eager", None),
    "ours, 16 stacked": ("ours", 6.0),
    "ours, norm batch 2": ("ours", 1 / 0.9),
    "ours, compiled": ("hand-written, graphed", 1.1),
}


def gpu_steps(bench: Bench) -> Iterator[Row]:
    """Samples per second of all replicas together, and how much slower a step of ours is."""
    if not is_measured(bench):
        return
    size = batch_size_of(bench)
    words = [*words_for(bench), f"batch_size={size}"]
    train_some = partial(ours, bench, num_steps_of(bench), *words)
    arms: dict[str, tuple[int, Callable[[], float]]] = {}  # replicas, seconds of a step of all

    def add_by_hand(form: str) -> None:
        arms[f"hand-written, {form}"] = 1, lambda: seconds_of(bench, step_by_hand(bench, form))

    def add_ours(form: str, *options: str, count: int = 1) -> None:
        name = ", ".join(word for word in ("ours", form) if word)
        arms[name] = count, partial(train_some, *options, replicas=count)

    counts, norm_sizes = ((2,), (2,)) if bench.smoke else ((4, 16), (2, 8, 32))
    add_by_hand("eager")
    add_ours("")
    arms["Lightning"] = 1, partial(seconds_by_lightning, bench)
    for count in counts:
        add_ours(f"{count} stacked", "stack=true", count=count)
    add_ours(f"{counts[0]} in turn", "stack=false", count=counts[0])
    for norm_size in norm_sizes:
        add_ours(f"norm batch {norm_size}", f"norm_batch_size={norm_size}")
    if not bench.smoke:  # last those that compile for minutes
        add_by_hand("graphed")
        add_ours("compiled", "compile=true")
        add_ours("4 stacked, compiled", "compile=true", count=4)
        add_by_hand("compiled")
    seconds: dict[str, float] = {}
    for name, (count, run) in arms.items():
        what = f"step, batch {size}: {name}"
        try:
            times = [run() for _ in range(1 if bench.smoke else 3)]
        except Exception as error:  # one arm must not cost the session the others
            yield Row(what, "-", None, note=f"{type(error).__name__}: {str(error)[-300:]}")
            continue
        seconds[name] = statistics.median(times)
        note = f"{1000 * seconds[name]:.3g} ms, n = {len(times)}"
        yield Row(what, "-", count * size / seconds[name], unit=" samples/s", note=note)
        other, aim = STEP_RATIOS.get(name, ("", None))
        if other in seconds:
            yield Row(f"time of a step: {name}", other, seconds[name] / seconds[other], aim)


# --- Norms ----------------------------------------------------------------------------------------

# Large enough that a norm takes longer on the GPU than its launches take the CPU: 0.5 ms and more.
GPU_SHAPE, SMOKE_SHAPE = (256, 64, 64, 64), (4, 16, 4, 4)
TIMES_THROUGH_MEMORY = 5  # forward: read x, write y; backward: read x and dy, write dx
TORCH_NORMS: dict[str, Callable[[tuple[int, ...]], nn.Module]] = {
    "batch": partial(torch_norm, "BatchNorm"),
    "instance": partial(torch_norm, "InstanceNorm", affine=True),
    "group": lambda shape: nn.GroupNorm(8, shape[1]),
    "layer": lambda shape: nn.GroupNorm(1, shape[1]),
}
OTHER_NORMS = ("rms", "batch_renorm", "frn", "dyt", "evonorm_s0")


def forward_and_backward(norm: nn.Module, x: Tensor) -> Step:
    upstream = torch.randn_like(x)
    given = x.detach().requires_grad_()
    parameters = [given, *norm.parameters()]
    return lambda: torch.autograd.grad(norm(given), parameters, upstream, allow_unused=True)


def gpu_norms(bench: Bench) -> Iterator[Row]:
    """Forward and backward: torch's kernels, and the share of the bandwidth of a copy."""
    if not is_measured(bench):
        return
    device, shape = device_of(bench), SMOKE_SHAPE if bench.smoke else GPU_SHAPE
    repeats, rounds = (2, 2) if bench.smoke else (20, 5)

    def measured(step: Step) -> Callable[[], float]:
        def steps() -> None:
            for _ in range(repeats):
                step()
            wait()  # once: after each step it would count as the step's

        seconds = timed(steps)
        return lambda: seconds() / repeats

    block = torch.empty(2**10 if bench.smoke else 2**28, device=device)  # 1 GiB
    copies = alternate({"copy": measured(block.clone)}, rounds)["copy"]
    bandwidth = 2 * block.numel() * 4 / statistics.median(copies)
    yield Row("copy", "-", bandwidth / 1e9, unit=" GB/s")
    del block
    layouts = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}
    for layout, memory_format in layouts.items():
        for name in (*TORCH_NORMS, *OTHER_NORMS):
            spec = norm_of(compose_config([f"norm={name}"]))
            made = build_norm(spec, Sizes(shape[0]), noise(64))(shape[1]).to(device)
            x = torch.randn(shape, device=device).to(memory_format=memory_format)
            arms = {"ours": measured(forward_and_backward(made, x))}
            if name in TORCH_NORMS:
                theirs = TORCH_NORMS[name](shape).to(device)
                arms["torch"] = measured(forward_and_backward(theirs, x))
            times = alternate(arms, rounds)
            moved = TIMES_THROUGH_MEMORY * 4 * x.numel()
            share = moved / statistics.median(times["ours"]) / bandwidth
            what = f"norm={name}, {layout}, float32"
            yield Row(what, "bandwidth of a copy", share, 0.6, ">=", note=f"n = {rounds}")
            if "torch" in times:
                yield Row(what, "torch", ratio(times, "ours", "torch"), 1.05)


# --- Workers and a profile ------------------------------------------------------------------------


def gpu_workers(bench: Bench) -> Iterator[Row]:
    """Wall time of a study of four cells by several workers on one device."""
    if not is_measured(bench):
        return
    steps = 4 if bench.smoke else 200
    size = batch_size_of(bench)
    words = [*words_for(bench), "norm=batch,group,layer,instance", f"batch_size={size}"]
    first: float | None = None
    for count in (2,) if bench.smoke else (1, 2, 4):
        runs_dir = bench.folder / f"workers-{count}"
        options = [f"workers={count}", f"steps={steps}", "replicas=1", f"runs_dir={runs_dir}"]
        code = "import sys; sys.path.insert(0, 'scripts'); from normexp.train import main; "
        code += "sys.exit(main(sys.argv[1:])) if __name__ == '__main__' else None"
        seconds, _ = run_python("-c", code, "-m", *words, *options)
        done = len(list(runs_dir.rglob("result.json")))
        first = first or seconds
        note = f"{done} of 4 runs, n = 1"
        yield Row(f"study of 4 cells, {count} workers", "-", seconds, unit=" s", note=note)
        if first != seconds:
            yield Row(f"study of 4 cells, {count} workers", "1 worker", first / seconds)


PROFILED = 20  # optimizer steps


def gpu_profile(bench: Bench) -> Iterator[Row]:
    """Kernels, GPU time and CPU time of a step, of 20 steps in the middle of a training."""
    if not is_measured(bench):
        return
    for count in (2,) if bench.smoke else (1, 5):
        trained = _profile(bench, count)
        for what, value, unit in trained:
            note = f"mean of {PROFILED} steps"
            yield Row(f"profile, {count} seeds: {what} per step", "-", value, unit=unit, note=note)


def _profile(bench: Bench, count: int) -> list[tuple[str, float, str]]:
    activities = [ProfilerActivity.CPU]
    if not bench.smoke:
        activities.append(ProfilerActivity.CUDA)
    size, first = batch_size_of(bench), 10
    profiler = profile(activities=activities)
    num_steps = {"done": 0}
    clock = {"started": 0.0, "ended": 0.0}

    def on_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if sum(p.numel() for group in optimizer.param_groups for p in group["params"]) < 1000:
            return  # an optimizer that is tried before the training
        num_steps["done"] += 1
        if num_steps["done"] == first:
            wait()
            clock["started"] = time.perf_counter()
            profiler.start()
        elif num_steps["done"] == first + PROFILED:
            wait()
            clock["ended"] = time.perf_counter()
            profiler.stop()

    hook = register_optimizer_step_post_hook(on_step)
    runs_dir = bench.folder / f"profile-{count}"
    options = [f"steps={first + PROFILED + 2}", f"replicas={count}", "workers=0"]
    options += [f"batch_size={size}", f"runs_dir={runs_dir}"]
    try:
        with quiet() as printed:
            code = train([*words_for(bench), *options])
    finally:
        hook.remove()
    if code != 0 or not clock["ended"]:
        raise RuntimeError(f"the profiled training ended with {code}\n{printed.getvalue()[-2000:]}")
    events = profiler.key_averages()
    table = events.table(sort_by="self_cpu_time_total" if bench.smoke else "self_cuda_time_total")
    folder = bench.out or bench.folder
    (folder / f"profile-{count}.txt").write_text(table)
    launches = sum(event.count for event in events if "LaunchKernel" in event.key)
    on_gpu = sum(event.self_device_time_total for event in events) / 1000
    wall = 1000 * (clock["ended"] - clock["started"])
    return [
        ("launches", launches / PROFILED, ""),
        ("GPU time", on_gpu / PROFILED, " ms"),
        ("CPU time", sum(event.self_cpu_time_total for event in events) / 1000 / PROFILED, " ms"),
        ("wall time", wall / PROFILED, " ms"),
    ]


SECTIONS = {  # the longest last: a session may end before it does
    "gpu-profile": gpu_profile,
    "gpu-norms": gpu_norms,
    "gpu-workers": gpu_workers,
    "gpu-steps": gpu_steps,
}
