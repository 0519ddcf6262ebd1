"""What a benchmark trains, read from its recipes in conf/experiment/<benchmark>.

A recipe is a workload at one budget. `convnet` is the long budget of a workload and `convnet_short`
its short one, where norms are ranked; others, such as `gpt_alpha`, belong to claims alone.
`benchmark0` tries the rules in a minute and decides nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from normexp.config.help import conf_dir

BENCHMARK = "benchmark1"
WORKLOADS = ("convnet", "vit", "encoder", "gpt")
REFERENCES = {"convnet": "batch", "vit": "layer", "encoder": "layer", "gpt": "layer"}


@dataclass(frozen=True)
class WorkloadRecipe:
    """A workload at one budget.

    study: the folder of its runs
    epochs, steps: the budget, one of the two
    width: of the model; None: the model's default
    """

    name: str
    study: str
    batch_size: int
    epochs: float | None
    steps: int | None
    width: int | None
    num_seeds: int
    norms: tuple[str, ...]
    norm_batch_sizes: tuple[int, ...]
    rates: tuple[float, ...]
    alphas: tuple[float, ...]

    @property
    def workload(self) -> str:
        return self.name.partition("_")[0]

    @property
    def is_ranked(self) -> bool:
        """Whether norms are ranked there; other recipes belong to claims alone."""
        return _is_ranked(self.name)

    @property
    def place(self) -> tuple[int, str]:
        """In the order of workloads, the long budget first."""
        return WORKLOADS.index(self.workload), self.name

    @property
    def reference(self) -> str:
        """The norm whose tuned error the others are divided by."""
        return REFERENCES[self.workload]

    def trains(self, config: Mapping[str, Any]) -> bool:
        """True for a cell of this recipe, from the `config` of its results."""
        if config.get("batch_size") != self.batch_size:
            return False
        if self.epochs is not None and config.get("epochs") != self.epochs:
            return False
        if self.steps is not None and config.get("num_steps") != self.steps:
            return False
        if not self.is_ranked and config.get("norm") not in self.norms:
            return False  # it belongs to one claim; an alpha of 1, say, is no sign of DyT
        values = config.get("recipe") or {}
        if self.width is not None and (values.get("model") or {}).get("width") != self.width:
            return False
        return not self.alphas or (values.get("norm") or {}).get("alpha_init") in self.alphas


@cache
def recipes(benchmark: str = BENCHMARK) -> Mapping[str, WorkloadRecipe]:
    """By name; those of one claim come first, since a cell belongs to the first that trains it."""
    read = [_read(name, values) for name, values in _rules(benchmark).items()]
    return {one.name: one for one in sorted(read, key=lambda one: (not one.alphas, one.name))}


@cache
def claims() -> list[dict[str, Any]]:
    """The declared claims; conf/experiment/claims.yaml explains their keys."""
    text = (conf_dir() / "experiment" / "claims.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)["claims"]


@cache
def digest(benchmark: str = BENCHMARK) -> str:
    """12 hex digits over the rules of entries: values of the ranked recipes, without comments."""
    rules = {name: values for name, values in _rules(benchmark).items() if _is_ranked(name)}
    text = json.dumps(rules, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _rules(benchmark: str) -> dict[str, Any]:
    files = sorted((conf_dir() / "experiment" / benchmark).glob("*.yaml"))
    return {file.stem: yaml.safe_load(file.read_text(encoding="utf-8")) for file in files}


def _is_ranked(name: str) -> bool:
    workload = name.partition("_")[0]
    return name in (workload, f"{workload}_short")


def recipe_at(workload: str, budget: str) -> str:
    """The name of the recipe of a workload at the `long` or `short` budget."""
    short = f"{workload}_short"
    return short if budget == "short" and short in recipes() else workload


def _read(name: str, values: Mapping[str, Any]) -> WorkloadRecipe:
    params = values["hydra"]["sweeper"]["params"]

    def listed(key: str) -> list[str]:
        return [word for word in str(params.get(key, "")).replace(",", " ").split() if word]

    return WorkloadRecipe(
        name=name,
        study=values["study"],
        batch_size=values["batch_size"],
        epochs=values.get("epochs"),
        steps=values.get("steps"),
        width=values.get("model", {}).get("width"),
        num_seeds=values["replicas"],
        norms=tuple(listed("norm")),
        norm_batch_sizes=tuple(int(size) for size in listed("norm_batch_size")),
        rates=tuple(float(rate) for rate in listed("lr")),
        alphas=tuple(float(alpha) for alpha in listed("norm.alpha_init")),
    )
