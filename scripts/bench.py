"""How fast normexp is: its time over that of a loop by hand, of Lightning, of another checkout.

    python scripts/bench.py                          every row
    python scripts/bench.py --only step --quick      one section, fewer and shorter rounds
    python scripts/bench.py --against ../before      each row also against another checkout
    python scripts/bench.py --device gpu             on a GPU; skipped where there is none

Every measurement is a process of its own, and the candidates of a row take turns. A row is the
median of the ratios of one round, so that a slow minute of the machine affects both sides.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
NEVER = 10**6  # epochs between validations, steps between records: only training is timed
STEPS = {2: 1200, 16: 800, 128: 240}  # of a timed training, by batch size
LR, WIDTH = 0.1, 16
NORMS, NORM_BATCH_SIZES, SEEDS = ("batch", "layer", "instance", "group"), (2, 4, 8, 16, 32, 128), 8


# --- Candidates: each runs in a process of its own and returns seconds ---------------------------


def train_by_normexp(device: str, num_steps: str, replicas: str, *words: str) -> float:
    """Seconds of an optimizer step of all replicas, through the whole command."""
    from normexp.train import main

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            options = [f"steps={num_steps}", f"replicas={replicas}", f"trainer={device}"]
            options += [f"val_every_epochs={NEVER}", f"log_every={NEVER}", "workers=0"]
            code = main(["norm=batch", *options, f"runs_dir={folder}", *words])
            assert code == 0, f"{words} failed"

    return seconds_per_step(int(num_steps), run)


def train_by_hand(device: str, num_steps: str, size: str) -> float:
    """Seconds per step of a loop over data in memory, as one writes it without a framework.

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

    def run() -> None:
        for step, chosen in zip(range(int(num_steps)), batches(), strict=False):
            for group in optimizer.param_groups:
                group["lr"] = LR * lr_factor(step, int(num_steps))
            optimizer.zero_grad()
            cross_entropy(network(inputs[chosen]), targets[chosen]).backward()
            optimizer.step()

    return seconds_per_step(int(num_steps), run)


def train_by_lightning(device: str, num_steps: str, size: str, accumulate: str = "1") -> float:
    """Seconds per optimizer step of Lightning's automatic loop, as its tutorial has it."""
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
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator=device,
            max_steps=int(num_steps),
            max_epochs=-1,
            accumulate_grad_batches=int(accumulate),
            default_root_dir=folder,
        )
        return seconds_per_step(int(num_steps), lambda: trainer.fit(Module(), loader))


def train_study(device: str, epochs: str, workers: str) -> float:
    """Seconds of the study of all norms at all norm batch sizes, from the first to the last run."""
    from normexp.train import main

    sizes = ",".join(map(str, NORM_BATCH_SIZES))
    words = ["-m", f"norm={','.join(NORMS)}", f"norm_batch_size={sizes}", "batch_size=128"]
    words += [f"epochs={epochs}", f"replicas={SEEDS}", f"trainer={device}", f"workers={workers}"]
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        assert main([*words, f"runs_dir={folder}"]) == 0, "a run of the study failed"
        return time.perf_counter() - started


CANDIDATES: dict[str, Callable[..., float]] = {
    "normexp": train_by_normexp,
    "hand": train_by_hand,
    "lightning": train_by_lightning,
    "study": train_study,
}


def seconds_per_step(num_steps: int, run: Callable[[], object]) -> float:
    """Wall time of an optimizer step of the training `run`, without the first quarter of the steps.

    Adds the times of several trainings of `num_steps`; steps that try an optimizer do not count.
    """
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

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
    trainings = [own for own in ends.values() if len(own) == num_steps]
    return sum(own[-1] - own[first - 1] for own in trainings) / (num_steps - first)


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

    from normexp.data.images import load_digits

    data = load_digits(val_fraction=0.1, split_seed=0, augmentation=None).to(torch_name(device))
    split = data.train.gather(torch.arange(len(data.train)))
    return data.model_inputs(split["inputs"]), split["targets"]


# --- Measuring in turn ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """What to measure on, how much of it, and another checkout to compare with."""

    device: str
    quick: bool
    against: Path | None

    def measure(self, candidate: str, *words: object, checkout: Path = CHECKOUT) -> float:
        """Seconds, by a new process whose normexp is that of `checkout`."""
        environment = os.environ | {"PYTHONPATH": str(checkout)}
        line = [sys.executable, __file__, "--measure", candidate, self.device, *map(str, words)]
        done = subprocess.run(
            line, env=environment, cwd=checkout, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(line)}: {done.stderr[-2000:]}")
        return float(done.stdout.split()[-1])

    def in_turn(self, **arms: tuple[object, ...]) -> dict[str, list[float]]:
        """Seconds of each arm in each round, in reverse in every second round.

        With `against`, what normexp does is also measured there, as the arm `NAME before`.
        """
        runs = {name: (CHECKOUT, words) for name, words in arms.items()}
        if self.against:
            ours = {name: words for name, words in arms.items() if words[0] in ("normexp", "study")}
            runs |= {f"{name} before": (self.against, words) for name, words in ours.items()}
        times: dict[str, list[float]] = {name: [] for name in runs}
        for index in range(3 if self.quick else 9):
            for name in list(runs)[:: 1 if index % 2 == 0 else -1]:
                checkout, (candidate, *words) = runs[name]
                times[name].append(self.measure(str(candidate), *words, checkout=checkout))
        return times


@dataclass(frozen=True)
class Row:
    """A ratio of times, and the largest (or, from above 1, the smallest) that is aimed at."""

    what: str
    against: str
    ratio: float
    aim: str = ""
    note: str = ""

    def __str__(self) -> str:
        aim = f" (aim {self.aim})" if self.aim else ""
        return f"{self.what:<42} {self.ratio:5.2f} of {self.against}{aim}  # {self.note}"


def rows_of(
    what: str, times: dict[str, list[float]], *pairs: tuple[str, str, str]
) -> Iterator[Row]:
    """A row for each (above, below, aim), and one for each arm that was measured before as well."""
    middle = {name: statistics.median(values) for name, values in times.items()}
    note = ", ".join(f"{name} {1000 * value:.3g} ms" for name, value in middle.items())
    before = [(name.removesuffix(" before"), name, "<= 1.05") for name in times if "before" in name]
    for above, below, aim in (*pairs, *before):
        ratios = [a / b for a, b in zip(times[above], times[below], strict=True)]
        yield Row(f"{what}: {above}", below, statistics.median(ratios), aim, note)


def step(bench: Bench) -> Iterator[Row]:
    for size, aim in ((2, "<= 1.05"), (16, "<= 1.10"), (128, "<= 1.05")):
        steps = STEPS[size] // (4 if bench.quick else 1)
        times = bench.in_turn(
            normexp=("normexp", steps, 1, f"batch_size={size}"),
            hand=("hand", steps, size),
            lightning=("lightning", steps, size),
        )
        pairs = ("normexp", "hand", aim), ("lightning", "normexp", "")
        yield from rows_of(f"step at batch {size}", times, *pairs)


def replicas(bench: Bench) -> Iterator[Row]:
    for size, aim in ((2, "<= 3.0"), (16, ""), (128, "")):
        steps, word = STEPS[size] // (16 if bench.quick else 4), f"batch_size={size}"
        times = bench.in_turn(stacked=("normexp", steps, 16, word), one=("normexp", steps, 1, word))
        yield from rows_of(f"16 seeds at batch {size}", times, ("stacked", "one", aim))


def ghost(bench: Bench) -> Iterator[Row]:
    steps, word = 24 if bench.quick else 60, "batch_size=256"
    times = bench.in_turn(
        split=("normexp", steps, 1, word, "norm_batch_size=2"),
        accumulated=("normexp", steps, 1, word, "micro_batch_size=2"),
        plain=("normexp", steps, 1, word),
    )
    pairs = ("plain", "split", ">= 0.85"), ("accumulated", "split", "")
    yield from rows_of("norm batch 2 at batch 256", times, *pairs)


def study(bench: Bench) -> Iterator[Row]:
    """Our study, against Lightning run by run: a few steps at each size, times steps, norms, seeds.

    A norm batch size is gradient accumulation there.
    """
    epochs, sample = (1, 12) if bench.quick else (12, 40)
    steps = epochs * (1294 // 128) * SEEDS * len(NORMS)
    theirs = sum(
        steps * bench.measure("lightning", sample, 128, 128 // size) for size in NORM_BATCH_SIZES
    )
    times = bench.in_turn(study=("study", epochs, 1))
    times["Lightning"] = [theirs] * len(times["study"])
    what = f"{len(NORMS)} norms x {len(NORM_BATCH_SIZES)} sizes x {SEEDS} seeds"
    yield from rows_of(what, times, ("Lightning", "study", ">= 6"))


SECTIONS = {"step": step, "replicas": replicas, "ghost": ghost, "study": study}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=SECTIONS, action="append", help="a section; repeatable")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--against", type=Path, metavar="PATH", help="another checkout")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the rows there")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        candidate, *words = options.measure
        with redirect_stdout(sys.stderr):
            seconds = CANDIDATES[candidate](*words)
        print(seconds)
        return 0
    import torch

    if options.device == "gpu" and not torch.cuda.is_available():
        print("every row of --device gpu is skipped: there is no GPU")
        return 0
    load = os.getloadavg()[0]
    print(f"# {os.cpu_count()} cores, {torch.get_num_threads()} threads, load {load:.1f}")
    against = options.against and options.against.resolve()
    bench = Bench(options.device, options.quick, against)
    rows: list[Row] = []
    for name in options.only or SECTIONS:
        for row in SECTIONS[name](bench):
            print(row, flush=True)
            rows.append(row)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
