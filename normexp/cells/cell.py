"""A cell made ready: its parts built, probed and named, before anything is trained or written."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from torch import nn

from normexp.batching.replicas import suitable_threads
from normexp.batching.sizes import Sizes
from normexp.build import (
    NetworkBuilder,
    build_data,
    build_network,
    build_norm,
    build_optimizer,
    check_trainer,
)
from normexp.cells.plan import Plan, check_norm_batch_size, num_devices_of, plan_training
from normexp.checks.preflight import Traits, check_optimizer, examine
from normexp.checks.sites import name_some
from normexp.config.rules import as_typed
from normexp.data.dataset import Data
from normexp.errors import UserError
from normexp.norms.adapt import first_line
from normexp.norms.factory import NormFactory
from normexp.norms.slots import PLACES, SLOTS, changed, without_place
from normexp.records.identity import canonical, cell_id, source_digest
from normexp.training.evaluation import EvaluationPlan
from normexp.training.optim import parameter_groups

GROUPS = ("norm", "model", "data", "optim")
# Ways of saying what `Plan` has worked out; the identity holds what came out of them.
SPOKEN = ("epochs", "steps", "samples", "lr_rule", "base_batch_size")


def identity_of(
    cfg: DictConfig, data: Data, plan: Plan, slots: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that defines a training, for `records.canonical`: derived values, not spellings.

    Holds a digest of the data and of a custom module's source, so an edited one is a new cell.

    Args:
        slots: the slots that the model uses and that are not as they are unset, resolved.
    """
    config = plain(cfg)
    for part in _parts_with_target(config):
        digest = _source_digest_of(part["_target_"])
        if digest is not None:
            part["source_digest"] = digest
    config["data"]["digest"] = data.digest
    config = {key: value for key, value in config.items() if key not in (*SPOKEN, *SLOTS)}
    for key in SLOTS:
        config["norm"].pop(key, None)
    config |= slots
    config |= {"num_steps": plan.num_steps, "lr": plan.lr}
    # How many groups devices split statistics into: a share of a forward is a ghost sub-batch.
    config["norm_batch_size"] = plan.sizes.norm_batch_size
    if config.get("matmul_precision") == "high":  # as it was before there was a choice
        config.pop("matmul_precision")
    config["optim"].pop("default_lr")
    if plan.optimizer_momentum is not None:
        config["optim"]["momentum"] = plan.optimizer_momentum
    config["norm"].pop("half_life", None)
    if plan.norm_momentum is not None:
        config["norm"]["momentum"] = plan.norm_momentum
    return config


def record_of(
    cfg: DictConfig, choices: Mapping[str, str], plan: Plan, identity: dict[str, Any]
) -> dict[str, Any]:
    """Plain values for result.json: names as typed, sizes as trained, the whole identity below."""
    spoken = ("batch_size", "micro_batch_size", "lr_rule", "eps", "drop_last")
    return {
        **{group: choices[group] for group in GROUPS},
        **{key: cfg[key] for key in spoken},
        "norm_batch_size": plan.sizes.norm_batch_size,
        "devices": num_devices_of(cfg),
        "split": plan.sizes.label,
        "epochs": plan.num_steps / plan.steps_per_epoch,
        "num_steps": plan.num_steps,
        "lr": plan.lr,
        "max_grad_norm": cfg.max_grad_norm,
        "precision": cfg.trainer.precision,
        "matmul_precision": cfg.get("matmul_precision", "high"),
        "identity": identity,
    }


def _parts_with_target(tree: Any) -> Iterator[dict[str, Any]]:
    """Every mapping of a config, at any depth, that names something to build."""
    if isinstance(tree, dict):
        if isinstance(tree.get("_target_"), str):
            yield tree
        for value in tree.values():
            yield from _parts_with_target(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _parts_with_target(value)


def _source_digest_of(target: str) -> str | None:
    """Digest of the user's own file that a target comes from; None for installed packages."""
    try:
        file = inspect.getsourcefile(get_object(target))
    except TypeError:  # built in
        return None
    return None if file is None else source_digest(Path(file))


def plain(cfg: DictConfig) -> dict[str, Any]:
    """The config as builtin values, resolved."""
    values = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


MOST = 2  # data sets: the cells of a grid use them in turn

_kept: dict[str, Data] | None = None  # by config, the latest last; None outside of `keeping_data`


@contextmanager
def keeping_data() -> Iterator[None]:
    """`load_data` loads each data set once while inside. Files that change meanwhile go unseen."""
    global _kept
    before, _kept = _kept, {} if _kept is None else _kept
    try:
        yield
    finally:
        _kept = before


def load_data(cfg: DictConfig) -> Data:
    """The data set that `data` names, see `build_data`; nobody writes to its tensors."""
    if _kept is None:
        return build_data(cfg)
    name = json.dumps(OmegaConf.to_container(cfg.data, resolve=True), sort_keys=True, default=str)
    data = _kept.pop(name, None) or build_data(cfg)
    _kept[name] = data
    while len(_kept) > MOST:
        del _kept[next(iter(_kept))]
    return data


logger = logging.getLogger(__name__)


def plan_evaluation(cfg: DictConfig, sizes: Sizes, data: Data, traits: Traits) -> EvaluationPlan:
    """The plan that `evaluate_with` and its companions in `cfg` ask for.

    Raises:
        UserError: batch statistics of more samples than a split has, or of one value, or of a norm
            that reads later positions of a text through them.
    """
    asked = tuple(cfg.evaluate_with)
    batch_sizes: tuple[int, ...] = ()
    if "batch" in asked:
        batch_sizes = tuple(cfg.evaluate_batch_sizes or [sizes.norm])
        _check_batch_sizes(batch_sizes, data)
        _check_leak(traits)
        if traits.mixes_samples:
            _check_values(min(batch_sizes), traits)
        else:
            batch_sizes = ()
            logger.info("no batch statistics to evaluate with: the norm mixes no samples")
    return EvaluationPlan(
        statistics=asked,
        precise_samples=cfg.precise_samples,
        group_size=sizes.norm,
        batch_sizes=batch_sizes,
        every_epoch=cfg.evaluate_every_epoch,
    )


def _check_batch_sizes(batch_sizes: tuple[int, ...], data: Data) -> None:
    """Every split must fill at least one batch."""
    for split in ("val", "test"):
        num_samples = len(getattr(data, split))
        if max(batch_sizes) > num_samples:
            raise UserError(
                f"evaluate_batch_sizes: {max(batch_sizes)} is more than the {num_samples} samples "
                f"of {split}; try evaluate_batch_sizes=[{num_samples}] or less"
            )


def _check_leak(traits: Traits) -> None:
    if traits.leaks_future_in_training:
        raise UserError(
            "evaluate_with=batch: the statistics of a batch show this norm later positions of the "
            "text, so that no loss is a likelihood; try evaluate_with=[running,precise]"
        )


def _check_values(batch_size: int, traits: Traits) -> None:
    single = traits.single_valued(batch_size)
    if single:
        raise UserError(
            f"evaluate_batch_sizes={batch_size} leaves one value per statistic at "
            f"{name_some(single)}; try evaluate_batch_sizes=[{2 * batch_size}]"
        )


@dataclass(frozen=True)
class Cell:
    """Everything about a training but its seed, built and checked."""

    cfg: DictConfig
    id: str
    identity: dict[str, Any]  # canonical config, the content of the id's hash
    record: dict[str, Any]  # plain values that go into result.json
    plan: Plan
    data: Data
    build: NetworkBuilder
    traits: Traits
    evaluation: EvaluationPlan
    num_parameters: int

    @property
    def title(self) -> str:
        return f"{self.record['norm']} on {self.record['data']}"

    @property
    def study_dir(self) -> Path:
        return Path(self.cfg.runs_dir) / self.cfg.study

    @property
    def num_devices(self) -> int:
        """Devices that train this cell together, on all nodes."""
        return num_devices_of(self.cfg)

    @property
    def directory(self) -> Path:
        return self.study_dir / self.id

    @property
    def elements_per_forward(self) -> int:
        """Values that reach all sites of one replica in one forward pass."""
        return self.plan.sizes.micro * self.traits.elements_per_sample

    @property
    def invalid(self) -> str | None:
        """Why no number of this cell may be compared; None where all may."""
        leak = self.traits.leak
        return None if leak is None else f"leaks the future at {leak.where}"


@suitable_threads(0)  # probes are small: two threads wait for each other longer than they save
def prepare_cell(cfg: DictConfig, choices: Mapping[str, str]) -> Cell:
    """Builds and probes what `cfg` asks for; a user's mistake is raised here, before any work.

    Args:
        choices: the name chosen in each config group, for the record.
    """
    check_trainer(cfg)
    data = load_data(cfg)
    plan = plan_training(cfg, len(data.train))
    norm = build_norm(cfg, plan.sizes, data, momentum=plan.norm_momentum)
    build = build_network(cfg, norm, data)
    network = build(cfg.seed)
    _check_slots(cfg, norm, model=choices["model"])
    traits = examine(network, data, plan.sizes, drop_last=cfg.drop_last, allow_leak=cfg.allow_leak)
    if traits.mixes_samples:
        check_norm_batch_size(cfg, plan.sizes)
    _check_optimizer(cfg, plan, network)
    evaluation = plan_evaluation(cfg, plan.sizes, data, traits)
    if not traits.mixes_samples and norm.norm_batch_size is not None:
        norm.norm_batch_size = None
        logger.info("the norm mixes no samples: every norm_batch_size is this one cell")
    slots = changed(norm.slots, norm.used)
    identity = canonical(identity_of(cfg, data, plan, slots), mixes_samples=traits.mixes_samples)
    return Cell(
        cfg=cfg,
        id=cell_id(identity),
        identity=identity,
        record=record_of(cfg, choices, plan, identity) | slots | _record_of_traits(traits),
        plan=plan,
        data=data,
        build=build,
        traits=traits,
        evaluation=evaluation,
        num_parameters=sum(p.numel() for p in network.parameters()),
    )


def _check_slots(cfg: DictConfig, norm: NormFactory, *, model: str) -> None:
    """Refuses a slot of the config for which the built model has no place; notes one of the norm's.

    Raises:
        UserError: with the models that have one.
    """
    for key in without_place(cfg, norm.used):
        lacks, fits = PLACES[key]
        raise UserError(f"{key}={as_typed(cfg[key])}: model={model} has {lacks}; try {fits}")
    for key in without_place(cfg.norm, norm.used):
        lacks, _ = PLACES[key]
        value = as_typed(cfg.norm[key])
        logger.info("the norm's %s=%s is left out: model=%s has %s", key, value, model, lacks)


def _check_optimizer(cfg: DictConfig, plan: Plan, network: nn.Module) -> None:
    """Builds the optimizer as the training will, to see that it holds every parameter."""
    groups = parameter_groups(
        network, weight_decay=cfg.optim.weight_decay, decay_norm=cfg.optim.decay_norm
    )
    try:
        optimizer = build_optimizer(cfg, momentum=plan.optimizer_momentum)(groups, lr=plan.lr)
    except (TypeError, ValueError) as error:
        raise UserError(f"optim._target_={cfg.optim._target_}: {first_line(error)}") from error
    check_optimizer(network, optimizer)


def _record_of_traits(traits: Traits) -> dict[str, bool]:
    kept = (
        "mixes_samples",
        "mixes_samples_in_evaluation",
        "leaks_future",
        "leaks_future_in_training",
    )
    return {name: getattr(traits, name) for name in kept}
