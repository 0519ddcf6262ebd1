"""How fast normexp is, as it is typed: its cost over that of a loop by hand, or of Lightning.

    python scripts/bench.py                          every row
    python scripts/bench.py --only step --quick      one section, fewer and shorter rounds
    python scripts/bench.py --against ../before      each row also against another checkout
    python scripts/bench.py --device gpu             on a GPU; skipped where there is none

Every measurement is a process of its own, whose command takes the cores and threads that it takes
from a user, and the candidates of a row take turns. A row is the median of the ratios of one round,
so that a slow minute of the machine affects both sides: of seconds of CPU cores, and of the clock.
Aims are about cores, which other programs disturb less; on a GPU about the clock. An aim is the
largest ratio, or from `>=` the smallest.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

CHECKOUT = Path(__file__).resolve().parents[1]
WATCHED = "NORMEXP_BENCH"  # in the environment: steps of a timed training, and where times go
NEVER = 10**6  # epochs between validations, steps between records: only training is timed
STEPS = {2: 1200, 16: 800, 128: 240}  # of a timed training, by batch size
LR, WIDTH = 0.1, 16
NORMS, NORM_BATCH_SIZES, SEEDS = ("batch", "layer", "instance", "group"), (2, 4, 8, 16, 32, 128), 8


# --- Candidates: each trains in a process of its own, in an empty folder -------------------------


def train_by_normexp(device: str, num_steps: str, replicas: str, *words: str) -> None:
    """Trains by the whole command, which sets the environment before it imports torch."""
    from normexp.train import main

    budget = [f"steps={num_steps}", f"val_every_epochs={NEVER}", f"log_every={NEVER}"]
    code = main(["norm=batch", *budget, f"replicas={replicas}", f"trainer={device}", *words])
    assert code == 0, f"{words} failed"


def train_by_hand(device: str, num_steps: str, size: str) -> None:
    """A loop over data in memory, as one writes it without a framework.

    Like Lightning's, on one thread, which is fastest for so small a network.
    """
    import torch
    from torch.nn.functional import cross_entropy

    torch.set_num_threads(1)
    network, (inputs, targets) = build_network().to(torch_name(device)), digits(device)
    optimizer = build_optimizer(network)

    def batches() -> Iterator[torch.Tensor]:
        while True:
            order = torch.randperm(len(inputs), device=inputs.device)
            yield from order.split(int(size))[: len(inputs) // int(size)]

    for step, chosen in zip(range(int(num_steps)), batches(), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = LR * lr_factor(step, int(num_steps))
        optimizer.zero_grad()
        cross_entropy(network(inputs[chosen]), targets[chosen]).backward()
        optimizer.step()


def train_by_lightning(device: str, num_steps: str, size: str, accumulate: str = "1") -> None:
    """Lightning's automatic loop, as its tutorial has it."""
    import pytorch_lightning as pl
    import torch
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = build_network()

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            loss = cross_entropy(self.network(batch[0]), batch[1])
            self.log("train/loss", loss)
            return loss

        def configure_optimizers(self):
            optimizer = build_optimizer(self.network)
            factor = torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: lr_factor(step, int(num_steps))
            )
            return [optimizer], [{"scheduler": factor, "interval": "step"}]

    micro = int(size) // int(accumulate)
    loader = DataLoader(TensorDataset(*digits("cpu")), micro, shuffle=True, drop_last=True)
    pl.Trainer(
        accelerator=device,
        max_steps=int(num_steps),
        max_epochs=-1,
        accumulate_grad_batches=int(accumulate),
    ).fit(Module(), loader)


CANDIDATES: dict[str, Callable[..., None]] = {
    "normexp": train_by_normexp,
    "hand": train_by_hand,
    "lightning": train_by_lightning,
}


def watch(num_steps: int, path: Path) -> None:
    """Notes in a file what each training of `num_steps` costs this process.

    Leaves out the first quarter of the steps; steps that try an optimizer do not count. Waits until
    the command imports torch, since a measurement must not import it earlier than a user's command.
    """
    while "torch" not in sys.modules:
        time.sleep(0.01)
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    first = max(1, num_steps // 4)
    counts: dict[torch.optim.Optimizer, int] = {}
    begun: dict[torch.optim.Optimizer, Cost] = {}

    def on_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        counts[optimizer] = count = counts.get(optimizer, 0) + 1
        if count not in (first, num_steps):
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = np.array([time.process_time(), time.perf_counter()])
        before = begun.setdefault(optimizer, now)
        if count == num_steps:
            cores, clock = (now - before) / (num_steps - first)
            with path.open("a") as file:
                file.write(f"{os.getpid()} {cores} {clock}\n")

    register_optimizer_step_post_hook(on_step)


def torch_name(device: str) -> str:
    return "cuda" if device == "gpu" else device


def build_network():
    """model=convnet on digits, in plain PyTorch."""
    from torch import nn

    def block(before: int, after: int) -> list[nn.Module]:
        conv = nn.Conv2d(before, after, 3, padding=1, bias=False)
        return [conv, nn.BatchNorm2d(after), nn.ReLU()]

    layers = [*block(1, WIDTH), nn.MaxPool2d(2), *block(WIDTH, 2 * WIDTH)]
    layers += [*block(2 * WIDTH, 2 * WIDTH), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(2 * WIDTH, 10))


def build_optimizer(network):
    """optim=sgd: weight decay on weights, not on norms and biases."""
    import torch

    vectors = [p for p in network.parameters() if p.ndim == 1]
    weights = [p for p in network.parameters() if p.ndim > 1]
    groups = [{"params": weights, "weight_decay": 5e-4}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr=LR, momentum=0.9, nesterov=True, fused=True)


def lr_factor(step: int, num_steps: int) -> float:
    """Linear warm-up over a tenth of the steps, then a cosine."""
    warm_up = max(1, round(0.1 * num_steps))
    share = (step - warm_up) / (num_steps - warm_up)
    return (step + 1) / warm_up if step < warm_up else (1 + math.cos(math.pi * share)) / 2


def digits(device: str):
    """Normalised training images and targets."""
    import torch

    from normexp.training.data.images import load_digits

    data = load_digits(val_fraction=0.1, split_seed=0, augmentation=None).to(torch_name(device))
    split = data.train.gather(torch.arange(len(data.train)))
    return data.model_inputs(split["inputs"]), split["targets"]


# --- Measuring in turn ---------------------------------------------------------------------------


Cost = np.ndarray  # seconds of all CPU cores together, and by the clock


def read_costs(path: Path) -> Cost:
    """A step of all trainings that `watch` saw, of which each process ran its share."""
    processes, *costs = np.loadtxt(path, ndmin=2).T
    cores, clock = map(sum, costs)
    return np.array([cores, clock / len(set(processes))])


def cost_so_far() -> Cost:
    """Of the processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return np.array([used.ru_utime + used.ru_stime, time.perf_counter()])


@dataclass(frozen=True)
class Bench:
    """What to measure on, how much of it, and another checkout to compare with."""

    device: str
    quick: bool
    against: Path | None

    def measure(self, candidate: str, *words: object, checkout: Path = CHECKOUT) -> Cost:
        """The cost of a step, or of a whole `command` or `import`, in `checkout`."""
        with tempfile.TemporaryDirectory() as folder:
            # A folder of its own for locks, too: no command waits for one outside the benchmark.
            own = {"PYTHONPATH": str(checkout), "XDG_RUNTIME_DIR": folder}
            line = [sys.executable, __file__, "--measure", candidate, self.device]
            if candidate == "command":
                line = [sys.executable, "-m", "normexp.train", f"trainer={self.device}"]
            elif candidate == "import":
                line, words = [sys.executable, "-c"], (f"import {', '.join(map(str, words))}",)
            else:
                own[WATCHED] = f"{words[0]} {folder}/costs"
            line += map(str, words)
            before = cost_so_far()
            done = subprocess.run(
                line, env=os.environ | own, cwd=folder, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise RuntimeError(f"{' '.join(line)}: {done.stderr[-2000:]}")
            whole = cost_so_far() - before
            is_whole = candidate in ("command", "import")
            return whole if is_whole else read_costs(Path(folder, "costs"))

    def in_turn(self, **arms: tuple[object, ...]) -> dict[str, list[Cost]]:
        """Costs of each arm in each round, in reverse in every second round.

        With `against`, what normexp does is also measured there, as the arm `NAME before`.
        """
        runs = {name: (CHECKOUT, words) for name, words in arms.items()}
        if self.against:
            ours = {
                name: words for name, words in arms.items() if words[0] in ("normexp", "command")
            }
            runs |= {f"{name} before": (self.against, words) for name, words in ours.items()}
        costs: dict[str, list[Cost]] = {name: [] for name in runs}
        for index in range(3 if self.quick else 9):
            for name in list(runs)[:: 1 if index % 2 == 0 else -1]:
                checkout, (candidate, *words) = runs[name]
                costs[name].append(self.measure(str(candidate), *words, checkout=checkout))
        return costs


def rows_of(what: str, costs: dict[str, list[Cost]], *pairs: tuple[str, str, str]) -> Iterator[str]:
    """A row for each (above, below, aim), and one for each arm that was measured before as well."""
    middles = {name: 1000 * np.median(values, axis=0) for name, values in costs.items()}
    shown = [f"{name} {cores:.3g} ({clock:.3g})" for name, (cores, clock) in middles.items()]
    note = f"n = {len(next(iter(costs.values())))}, ms of cores (by the clock): {', '.join(shown)}"
    before = [(name.removesuffix(" before"), name, "<= 1.05") for name in costs if "before" in name]
    for above, below, aim in (*pairs, *before):
        ratios = np.divide(costs[above], costs[below])  # (rounds, 2)
        cores, clock = np.median(ratios, axis=0)
        aimed = f" (aim {aim})" if aim else ""
        ratio = f"{cores:5.2f} of {below}{aimed}, by the clock {clock:.2f}"
        yield f"{f'{what}: {above}':<42} {ratio}  # {note}"


def start(bench: Bench) -> Iterator[str]:
    """A command that hardly trains, against the imports that it cannot do without."""
    costs = bench.in_turn(
        start=("command", "norm=group", "steps=10"),
        imports=("import", "torch", "torchvision", "pytorch_lightning"),
    )
    yield from rows_of("a command of 10 steps", costs, ("start", "imports", ""))


def step(bench: Bench) -> Iterator[str]:
    for size, aim in ((2, "<= 1.05"), (16, "<= 1.10"), (128, "<= 1.05")):
        steps = STEPS[size] // (4 if bench.quick else 1)
        costs = bench.in_turn(
            normexp=("normexp", steps, 1, f"batch_size={size}"),
            hand=("hand", steps, size),
            lightning=("lightning", steps, size),
        )
        pairs = ("normexp", "hand", aim), ("lightning", "normexp", "")
        yield from rows_of(f"step at batch {size}", costs, *pairs)


def replicas(bench: Bench) -> Iterator[str]:
    for size, aim in ((2, "<= 2.5"), (16, ""), (128, "")):
        steps, word = STEPS[size] // (16 if bench.quick else 4), f"batch_size={size}"
        costs = bench.in_turn(all=("normexp", steps, 16, word), one=("normexp", steps, 1, word))
        yield from rows_of(f"16 seeds at batch {size}", costs, ("all", "one", aim))


def ghost(bench: Bench) -> Iterator[str]:
    steps, word = 24 if bench.quick else 60, "batch_size=256"
    costs = bench.in_turn(
        split=("normexp", steps, 1, word, "norm_batch_size=2"),
        accumulated=("normexp", steps, 1, word, "micro_batch_size=2"),
        plain=("normexp", steps, 1, word),
    )
    pairs = ("plain", "split", ">= 0.85"), ("accumulated", "split", "")
    yield from rows_of("norm batch 2 at batch 256", costs, *pairs)


def study(bench: Bench) -> Iterator[str]:
    """Our command with its imports and evaluations, against the steps of Lightning run by run.

    Lightning: a few steps at each size, times steps, norms, seeds. A norm batch size is gradient
    accumulation there.
    """
    epochs, sample = (1, 12) if bench.quick else (12, 40)
    steps = epochs * (1294 // 128) * SEEDS * len(NORMS)
    sampled = [bench.measure("lightning", sample, 128, 128 // size) for size in NORM_BATCH_SIZES]
    theirs = steps * np.sum(sampled, axis=0)
    sizes = ",".join(map(str, NORM_BATCH_SIZES))
    grid = ["-m", f"norm={','.join(NORMS)}", f"norm_batch_size={sizes}", "batch_size=128"]
    costs = bench.in_turn(study=("command", *grid, f"epochs={epochs}", f"replicas={SEEDS}"))
    costs["Lightning"] = [theirs] * len(costs["study"])
    what = f"{len(NORMS)} norms x {len(NORM_BATCH_SIZES)} sizes x {SEEDS} seeds"
    yield from rows_of(what, costs, ("Lightning", "study", ">= 6"))


SECTIONS = {"start": start, "step": step, "replicas": replicas, "ghost": ghost, "study": study}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=SECTIONS, action="append", help="a section; repeatable")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--against", type=Path, metavar="PATH", help="another checkout")
    parser.add_argument("--measure", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        candidate, *words = options.measure
        CANDIDATES[candidate](*words)
        return 0
    if options.device == "gpu":
        import torch

        if not torch.cuda.is_available():
            print("every row of --device gpu is skipped: there is no GPU")
            return 0
    print(f"# {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    against = options.against and options.against.resolve()
    bench = Bench(options.device, options.quick, against)
    for name in options.only or SECTIONS:
        for row in SECTIONS[name](bench):
            print(row, flush=True)
    return 0


if WATCHED in os.environ:  # also in workers, which multiprocessing lets import this file
    steps_watched, place = os.environ[WATCHED].split(" ", 1)
    threading.Thread(target=watch, args=(int(steps_watched), Path(place)), daemon=True).start()

if __name__ == "__main__":
    sys.exit(main())
