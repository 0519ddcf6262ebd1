"""Whole trainings: steps, replicas, ghost batches, data, start-up, a study and its report.

normexp is measured through its command line, in this process or in one of its own. The competitors
are a loop written by hand and Lightning's automatic optimization.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache, partial
from io import StringIO
from itertools import product
from pathlib import Path

import numpy as np
import pytorch_lightning as pl
import torch
from bench_measure import Bench, Row, alternate, milliseconds, ratio, run_python
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset, default_collate
from torchvision import transforms

from normexp.batching.speed import suitable_threads
from normexp.data import Augmentation, Data, Examples
from normexp.data.batches import TrainingBatches
from normexp.data.images import load_digits
from normexp.records.result import Result, Status, write_result
from normexp.report import main as write_report
from normexp.train import main as train

NEVER = 10**6  # epochs between validations, steps between records: only training is timed
LR = 0.1
STEPS = {2: 1200, 16: 800, 128: 240}  # of a timed training, by batch size
ELEMENTS_PER_SAMPLE = 16 * 8 * 8 + 2 * 32 * 4 * 4  # values that reach the convnet's norms


def seconds_per_step(num_steps: int, run: Callable[[], object]) -> float:
    """Wall time of an optimizer step of the training `run`, without the first quarter of the steps.

    Adds the times of several trainings of `num_steps`; optimizers are tried before: no training.
    """
    first = max(1, num_steps // 4)
    ends: dict[torch.optim.Optimizer, list[float]] = {}

    def on_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        own = ends.setdefault(optimizer, [])
        if torch.cuda.is_available() and len(own) + 1 in (num_steps, first):
            torch.cuda.synchronize()
        own.append(time.perf_counter())

    hook = register_optimizer_step_post_hook(on_step)
    try:
        run()
    finally:
        hook.remove()
    per_training = np.array([own for own in ends.values() if len(own) == num_steps])
    return float((per_training[:, -1] - per_training[:, first - 1]).sum() / (num_steps - first))


def ours(
    bench: Bench, num_steps: int, *words: str, replicas: int = 1, log_every: int = NEVER
) -> float:
    """Wall time of an optimizer step of all replicas, through the whole command.

    Raises:
        RuntimeError: the command failed; says what it printed.
    """
    trainer = [] if any(word.startswith("trainer=") for word in words) else ["trainer=cpu"]
    runs_dir = tempfile.mkdtemp(dir=bench.folder)
    options = [f"steps={num_steps}", f"replicas={replicas}", "workers=0", f"runs_dir={runs_dir}"]
    options += [f"val_every_epochs={NEVER}", f"log_every={log_every}"]

    def run() -> None:
        with quiet() as printed:
            code = train([*trainer, *words, *options])
        if code != 0:
            raise RuntimeError(f"{' '.join(words)}: exit code {code}\n{printed.getvalue()[-4000:]}")

    return seconds_per_step(num_steps, run)


@contextmanager
def quiet() -> Iterator[StringIO]:
    """Keeps what is printed inside the block from the terminal; yields it."""
    with redirect_stdout(StringIO()) as printed, redirect_stderr(printed):
        yield printed


def build_network(width: int = 16) -> nn.Module:
    """model=convnet on digits, in plain PyTorch."""

    def block(before: int, after: int) -> list[nn.Module]:
        conv = nn.Conv2d(before, after, 3, padding=1, bias=False)
        return [conv, nn.BatchNorm2d(after), nn.ReLU()]

    first, second, third = block(1, width), block(width, 2 * width), block(2 * width, 2 * width)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10)]
    return nn.Sequential(*first, nn.MaxPool2d(2), *second, *third, *head)


def build_optimizer(network: nn.Module) -> torch.optim.Optimizer:
    """optim=sgd: weight decay on weights, not on norms and biases."""
    vectors = [p for p in network.parameters() if p.ndim == 1]
    weights = [p for p in network.parameters() if p.ndim > 1]
    groups = [{"params": weights, "weight_decay": 5e-4}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr=LR, momentum=0.9, nesterov=True, fused=True)


def lr_factor(step: int, num_steps: int) -> float:
    """Linear warm-up over a tenth of the steps, then a cosine."""
    warm_up = round(0.1 * num_steps)
    share = (step - warm_up) / (num_steps - warm_up)
    return (step + 1) / warm_up if step < warm_up else (1 + math.cos(math.pi * share)) / 2


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Normalised training images and targets."""
    data = load_digits(val_fraction=0.1, split_seed=0, augmentation=None)
    train_split = data.train.gather(torch.arange(len(data.train)))
    return data.model_inputs(train_split["inputs"]), train_split["targets"]


def train_by_hand(size: int, num_steps: int) -> float:
    """Seconds per step of a loop over data in memory, as one writes it without a framework."""
    network, (inputs, targets) = build_network(), digits()
    optimizer = build_optimizer(network)

    def batches() -> Iterator[Tensor]:
        while True:
            yield from torch.randperm(len(inputs)).split(size)[: len(inputs) // size]

    def run() -> None:
        losses = []
        for step, chosen in zip(range(num_steps), batches(), strict=False):
            for group in optimizer.param_groups:
                group["lr"] = LR * lr_factor(step, num_steps)
            optimizer.zero_grad()
            loss = cross_entropy(network(inputs[chosen]), targets[chosen])
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            if len(losses) == 10:
                torch.stack(losses).mean().item()
                losses = []

    with suitable_threads(size * ELEMENTS_PER_SAMPLE):
        return seconds_per_step(num_steps, run)


class LightningNetwork(pl.LightningModule):
    """The network as Lightning's tutorial has it."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.network = build_network()
        self.num_steps = num_steps

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        inputs, targets = batch
        loss = cross_entropy(self.network(inputs), targets)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = build_optimizer(self.network)
        schedule = LambdaLR(optimizer, lambda step: lr_factor(step, self.num_steps))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def train_by_lightning(size: int, num_steps: int, folder: Path, accumulate: int = 1) -> float:
    """Seconds per optimizer step of Lightning's automatic loop, which writes to `folder`.

    Args:
        accumulate: micro-batches per optimizer step.
    """
    options = {"max_steps": num_steps, "max_epochs": -1, "accumulate_grad_batches": accumulate}
    options |= {"default_root_dir": folder / "lightning", "enable_model_summary": False}
    loader = DataLoader(TensorDataset(*digits()), size // accumulate, shuffle=True, drop_last=True)
    with quiet(), suitable_threads(size // accumulate * ELEMENTS_PER_SAMPLE):
        module, trainer = LightningNetwork(num_steps), pl.Trainer(accelerator="cpu", **options)
        return seconds_per_step(num_steps, lambda: trainer.fit(module, loader))


def one_seed(bench: Bench) -> Iterator[Row]:
    for size in (2, 16, 128):
        steps, word = STEPS[size] // (4 if bench.quick else 1), f"batch_size={size}"
        arms = {
            "ours": partial(ours, bench, steps, word),
            "ours, recorded": partial(ours, bench, steps, word, log_every=10),
            "by hand": partial(train_by_hand, size, steps),
            "Lightning": partial(train_by_lightning, size, steps, bench.folder),
        }
        times = alternate(arms, bench.rounds(9))
        what, note = f"step, batch {size}, one seed", milliseconds(times, *arms)
        yield Row(what, "hand-written loop", ratio(times, "ours", "by hand"), 1.10, note=note)
        yield Row(what, "plain Lightning", ratio(times, "Lightning", "ours, recorded"), 1.7, ">=")


def replicas(bench: Bench) -> Iterator[Row]:
    for size, aim in ((2, 5.0), (16, 2.5), (128, 1.0)):
        num_steps = STEPS[size] // (16 if bench.quick else 4)
        train_some = partial(ours, bench, num_steps, f"batch_size={size}")
        arms = {"16": partial(train_some, replicas=16), "1": partial(train_some, replicas=1)}
        times = alternate(arms, bench.rounds(9))
        what, note = f"16 replicas, batch {size}", f"a step of {milliseconds(times, '16', '1')}"
        yield Row(what, "one after another", 16 * ratio(times, "1", "16"), aim, ">=", note=note)


def ghost(bench: Bench) -> Iterator[Row]:
    train_some = partial(ours, bench, 24 if bench.quick else 60, "batch_size=256")
    arms = {
        "ghost": partial(train_some, "norm_batch_size=2"),
        "accumulated": partial(train_some, "micro_batch_size=2"),
        "plain": train_some,
    }
    times = alternate(arms, bench.rounds(7))
    what, note = "norm batch 2 at batch 256", milliseconds(times, *arms)
    yield Row(what, "accumulation", ratio(times, "accumulated", "ghost"), 2.5, ">=", note=note)
    yield Row(what, "plain batch norm", ratio(times, "plain", "ghost"), 0.85, ">=")


def noise(num_images: int) -> Data:
    """Images of CIFAR's shape with crop and flip; also what data=custom takes."""
    images = torch.randint(0, 256, (num_images, 3, 32, 32), dtype=torch.uint8)
    split = Examples(images, torch.arange(num_images) % 10)
    facts = {"num_outputs": 10, "input_shape": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.25,) * 3}
    augmentation = Augmentation(crop_padding=4, flip=True, cutout=0)
    return Data("noise", "classification", *(split,) * 3, **facts, augmentation=augmentation)


def pipeline(bench: Bench) -> Iterator[Row]:
    """Crop and flip, against torchvision's transforms in two worker processes."""
    num_images, size = 4096 if bench.quick else 12800, 128
    data = noise(num_images)
    batches = TrainingBatches(data, [0], size, drop_last=True)
    epochs = iter(range(10**6))
    pictures = data.train.inputs.permute(0, 2, 3, 1).numpy()
    crop, flip = transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()
    scaled = [transforms.ToTensor(), transforms.Normalize(data.mean, data.std)]
    transform = transforms.Compose([transforms.ToPILImage(), crop, flip, *scaled])
    loader = DataLoader(
        list(zip(pictures, data.train.targets.tolist(), strict=True)),
        batch_size=size,
        shuffle=True,
        drop_last=True,
        num_workers=2,
        persistent_workers=True,
        collate_fn=lambda batch: default_collate([(transform(x), y) for x, y in batch]),
    )

    def ours() -> float:
        started, first = time.perf_counter(), next(epochs) * batches.steps_per_epoch
        for step in range(first, first + batches.steps_per_epoch):
            batches.chunk(step, 1)
        return time.perf_counter() - started

    def theirs() -> float:
        iterator = iter(loader)
        next(iterator)  # the workers are up
        started = time.perf_counter()
        for _ in iterator:
            pass
        return (time.perf_counter() - started) * len(loader) / (len(loader) - 1)

    times = alternate({"ours": ours, "theirs": theirs}, bench.rounds(7))
    rates = {name: num_images / statistics.median(own) for name, own in times.items()}
    note = ", ".join(f"{name} {rate / 1000:.3g}k images/s" for name, rate in rates.items())
    what, gain = "data with crop and flip, batch 128", ratio(times, "theirs", "ours")
    yield Row(what, "torchvision, 2 workers", gain, 6, ">=", note=note)


IMPORTS = ("-c", "import torch, pytorch_lightning")
# Ends after the first optimizer step; torch is imported where the command imports it.
FIRST_STEP = """
import os, sys, time
from normexp.config import grid
from normexp.config.process import importing_torch
from normexp.train import main

def compose_cells(command, compose=grid.compose_cells):
    cells = compose(command)
    with importing_torch():
        import normexp.cells.run
        from torch.optim.optimizer import register_optimizer_step_post_hook as on_step
    on_step(lambda *_: (print("first step", time.time(), flush=True), os._exit(0)))
    return cells

grid.compose_cells = compose_cells
main(sys.argv[1:])
"""


def light(bench: Bench) -> Iterator[Row]:
    entry = ("-m", "normexp.train")
    arms = {
        "import": lambda: run_python("-c", "import torch")[0],
        "--help": lambda: run_python(*entry, "--help")[0],
        "a config error": lambda: run_python(*entry, "norm=nrom", expected=2)[0],
    }
    times = alternate(arms, bench.rounds(9))
    for name in ("--help", "a config error"):
        note = milliseconds(times, name, "import")
        yield Row(name, "import torch", ratio(times, name, "import"), 0.5, note=note)


def start_up(bench: Bench) -> Iterator[Row]:
    def first_step() -> float:
        runs_dir = f"runs_dir={tempfile.mkdtemp(dir=bench.folder)}"
        started = time.time()
        _, printed = run_python("-c", FIRST_STEP, "norm=batch", "trainer=cpu", runs_dir)
        return float(printed.split("first step")[1].split()[0]) - started

    arms = {"first step": first_step, "imports": lambda: run_python(*IMPORTS)[0]}
    times = alternate(arms, bench.rounds(7))
    note, found = milliseconds(times, *arms), ratio(times, "first step", "imports")
    yield Row("first step of the default run", "import torch, Lightning", found, 1.3, note=note)


# Seconds of preparing a cell on fake images of CIFAR-10's size, without imports.
PREPARE = """
import sys, time
import normexp.build as build
from normexp.cells import cell
from normexp.config.compose import compose_cell
from normexp.config.spec import CellSpec
sys.path.insert(0, "scripts")
from bench_training import noise

data, spec = noise(5000), CellSpec(*compose_cell(sys.argv[1:]))
cell.load_data = lambda _: data
started = time.perf_counter()
cell.prepare_cell(spec)
print(time.perf_counter() - started)
"""


def probes(bench: Bench) -> Iterator[Row]:
    """Preparing a resnet20 cell: its probes, which every first training of a norm waits for."""
    words = ("model=resnet20", "batch_size=128", "trainer=cpu", f"runs_dir={bench.folder}")
    for norm in ("batch", "group"):
        printed = [
            float(run_python("-c", PREPARE, f"norm={norm}", *words)[1].split()[-1])
            for _ in range(bench.rounds(5))
        ]
        seconds = statistics.median(printed)
        yield Row(f"preparing a cell of resnet20, {norm}", "in seconds", seconds, 10, unit=" s")


NORMS = ("batch", "layer", "instance", "group")
NORM_BATCH_SIZES = (2, 4, 8, 16, 32, 128)
BATCH_SIZE, SEEDS = 128, 8


def study(bench: Bench) -> Iterator[Row]:
    """Our study from the first to the last result, against an extrapolated sample of Lightning.

    The sample is a few steps of batch norm at each norm batch size as gradient accumulation, with
    a Trainer's defaults and without validation, times steps, norms and seeds.
    """
    epochs, sample = (1, 12) if bench.quick else (12, 40)
    seconds, num_cells = run_study(bench, epochs, workers=1)
    spread, _ = run_study(bench, epochs, workers=os.cpu_count() or 1)
    steps = epochs * (len(digits()[1]) // BATCH_SIZE) * SEEDS * len(NORMS)
    theirs = 0.0
    for size in NORM_BATCH_SIZES:
        options = {"folder": bench.folder, "accumulate": BATCH_SIZE // size}
        rounds = [train_by_lightning(BATCH_SIZE, sample, **options) for _ in range(3)]
        theirs += steps * statistics.median(rounds)
    what = f"study: 4 norms x 6 norm batch sizes x 8 seeds, {epochs} epochs"
    note = (
        f"ours {seconds:.0f} s for {num_cells} distinct cells; Lightning {theirs:.0f} s by "
        f"extrapolation of {sample} steps at each size"
    )
    yield Row(what, "Lightning, a run each", theirs / seconds, 20, ">=", note=note)
    yield Row(what, "the same with a worker for each core", seconds / spread)


def run_study(bench: Bench, epochs: int, workers: int) -> tuple[float, int]:
    """Seconds of our study, and how many cells it has trained."""
    runs_dir = bench.folder / f"study-{workers}"
    words = ["trainer=cpu", f"norm={','.join(NORMS)}", f"batch_size={BATCH_SIZE}"]
    words += [f"norm_batch_size={','.join(map(str, NORM_BATCH_SIZES))}", f"epochs={epochs}"]
    words += [f"replicas={SEEDS}", "study=bench", f"workers={workers}", f"runs_dir={runs_dir}"]
    seconds, _ = run_python("-m", "normexp.train", "-m", *words)
    results = list(runs_dir.glob("bench/*/seed-*/result.json"))
    cells = {path.parents[1] for path in results}
    assert len(results) == SEEDS * len(cells) > 0, "a run of the study failed"
    return seconds, len(cells)


def report(bench: Bench) -> Iterator[Row]:
    """Computing time of the report of a large study: its page, figures and tables."""
    data_sets = 1 if bench.quick else 5
    random = np.random.default_rng(0)
    for data, norm, size in product(range(data_sets), range(10), (2, 4, 8, 32, 128)):
        config = {"norm": f"norm{norm}", "model": "resnet", "data": f"data{data}", "optim": "sgd"}
        config |= {"batch_size": 128, "norm_batch_size": size, "epochs": 3, "lr": LR}
        config |= {"mixes_samples": True, "recipe": {"norm": {"_target_": f"norm{norm}"}}}
        cell_id = f"{config['norm']}-{config['data']}-n{size}"
        for seed, accuracy in enumerate(random.normal(0.9, 0.01, SEEDS).tolist()):
            folder = bench.folder / "large" / cell_id / f"seed-{seed}"
            folder.mkdir(parents=True)
            metrics = {"test/accuracy": accuracy}
            write_result(folder, Result(cell_id, seed, Status.FINISHED, config, metrics, {}))
    started = time.process_time()  # of all threads
    with quiet():
        assert write_report(["study=large", f"runs_dir={bench.folder}"]) == 0
    seconds = time.process_time() - started
    yield Row(f"report of {400 * data_sets} runs", "-", seconds, 6 * data_sets, unit=" s")


SECTIONS = {
    "step": one_seed,
    "replicas": replicas,
    "ghost": ghost,
    "data": pipeline,
    "light": light,
    "start-up": start_up,
    "probes": probes,
    "study": study,
    "report": report,
}
