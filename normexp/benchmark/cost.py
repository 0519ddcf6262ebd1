"""What a norm costs: time of a training step and bytes kept for the backward, beside batch norm's.

Both networks are of a workload of the benchmark and train in one process, in turns, so that a
loaded machine slows both alike.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle

from torch import nn

from normexp.batching.replicas import InTurn, model_arguments
from normexp.batching.speed import suitable_threads
from normexp.benchmark.protocol import recipes
from normexp.benchmark.table import Cost, Table
from normexp.build import keeping_data, load_data
from normexp.cells.cell import make_builder, make_recipe
from normexp.checks.agreement import kept_for_backward
from normexp.checks.probe import fixed_draws
from normexp.checks.sites import probe_batch
from normexp.cli import parse_command
from normexp.config.grid import compose_cells
from normexp.data.batches import TrainingBatches
from normexp.data.dataset import Data
from normexp.norms.site import named_sites
from normexp.records.environment import describe_environment
from normexp.training.evaluation import criterion_of
from normexp.training.recipe import Recipe
from normexp.training.step import StepGradient

BASELINE = "batch"
ROUNDS = 40  # each times both networks
STEPS = 4  # of a network in a round
NUM_BATCHES = 8  # kept in memory


class _TimedTraining:
    """The training steps of one network, and the bytes that its forward keeps per sample."""

    def __init__(self, benchmark: str, workload: str, norm_words: Sequence[str]) -> None:
        rate = recipes(benchmark)[workload].rates[0]  # the smallest: no divergence
        words = [f"experiment={benchmark}/{workload}", f"lr={rate:g}", "norm_batch_size=null"]
        [spec] = compose_cells(parse_command([*words, "replicas=1", *norm_words]))
        data = load_data(spec)
        recipe = make_recipe(spec, data)
        network = make_builder(spec, recipe, data)(0).train()
        self.kept = backward_bytes(network, data, recipe)
        replicas = InTurn([network], has_foreign_draws=False)
        self.optimizer = recipe.build_optimizer(replicas)
        self.gradient = StepGradient(replicas, criterion_of(data).loss, recipe.sizes, [0])
        batches = TrainingBatches(data, [0], recipe.sizes.batch_size, drop_last=True)
        self.batches = cycle(batches.chunk(0, min(NUM_BATCHES, batches.steps_per_epoch)))
        self.num_done = 0

    def seconds(self, num_steps: int = STEPS) -> float:
        """Wall time of that many steps."""
        start = time.perf_counter()
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            self.gradient.add(self.num_done, next(self.batches))
            self.optimizer.step()
            self.num_done += 1
        return time.perf_counter() - start


def measure_costs(
    benchmark: str,
    workload: str,
    norms: Mapping[str, Sequence[str]],
    rounds: int = ROUNDS,
) -> Iterator[tuple[str, Cost]]:
    """The cost of each norm in the network of a workload, at the full batch.

    norms: by label, the words of each norm, --config-dir included
    """
    with suitable_threads(0), keeping_data():
        baseline = _TimedTraining(benchmark, workload, [f"norm={BASELINE}"])
        for label, words in norms.items():
            training = _TimedTraining(benchmark, workload, words)
            for warmed_up in (training, baseline):
                warmed_up.seconds()
            ratios = []
            for turn in range(rounds):
                first, second = (training, baseline) if turn % 2 else (baseline, training)
                seconds = {first: first.seconds(), second: second.seconds()}
                ratios.append(seconds[training] / seconds[baseline])
            yield label, Cost(statistics.median(ratios), training.kept / baseline.kept)


def machine() -> str:
    """The processor and the version of torch, with which costs are stored."""
    environment = describe_environment()
    return f"{environment.get('cpu', 'unknown CPU')}, torch {environment['torch']}, one thread"


def with_costs(table: Table, known: Table | None = None) -> Table:
    """A table of shipped norms with the cost of each at the long budgets.

    known: a table whose costs are kept if they were measured on this machine
    """
    old_costs = known.costs if known and known.about.get("machine") == machine() else {}
    costs: dict[str, dict[str, Cost]] = {}
    for workload, recipe in table.recipes.items():
        norms = table.norms_of(workload)
        if workload != recipe.workload or not norms:
            continue
        old = old_costs.get(workload, {})
        missing = {norm: [f"norm={norm}"] for norm in norms if norm not in old}
        if missing:
            print(f"{workload}: measuring the cost of {len(missing)} norms", flush=True)
            measured = dict(measure_costs(table.about["benchmark"], workload, missing))
            old = {**old, **measured}
        costs[workload] = {norm: old[norm] for norm in norms}
    return replace(table, about={**table.about, "machine": machine()}, costs=costs)


def backward_bytes(network: nn.Module, data: Data, recipe: Recipe) -> int:
    """Bytes that a forward of the network keeps for its backward, per sample, in float32."""
    count = min(recipe.sizes.micro, 8)
    network = copy.deepcopy(network).train()
    for _, site in named_sites(network):
        site.norm_batch_size = None
    with fixed_draws():
        return kept_for_backward(network, *model_arguments(probe_batch(data, count))) // count
