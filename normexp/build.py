"""Builds objects from a config; nothing else instantiates the targets that a config names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
import yaml
from hydra.utils import get_object
from torch import Tensor, nn

from normexp.batching.copies import copied
from normexp.batching.draws import derive_seed
from normexp.batching.processes import is_synchronized
from normexp.batching.replicas import suitable_threads
from normexp.checks.card import Card, measure_card
from normexp.checks.network import PROBE_SAMPLES
from normexp.config import identity
from normexp.config.compose import shipped_config, shipped_defaults, shipped_values
from normexp.config.schema import Index, check_value
from normexp.config.sizes import Sizes
from normexp.config.slots import SLOTS, resolve
from normexp.config.spec import CellSpec
from normexp.config.target import Target, read_target
from normexp.config.words import as_typed
from normexp.data.dataset import Data, describe_copies, limit_train, validate
from normexp.errors import UserError
from normexp.models import packages
from normexp.models.common import refuse_misfit
from normexp.models.recognise import Recognition, recognise
from normexp.models.surgery import check_formulas, replace_norms
from normexp.models.weights import Weights, load_fitting, open_weights
from normexp.norms.adapt import foreign_factory
from normexp.norms.factory import AsBuilt, NormFactory, is_shipped
from normexp.norms.running import NUM_TRAINING_STEPS
from normexp.training.recipe import Schedule, named_schedule, own_schedule

# Lightning takes seconds to import, and neither a card nor a reloaded network needs it.
if TYPE_CHECKING:
    from pytorch_lightning.callbacks import Callback
    from pytorch_lightning.loggers import Logger

logger = logging.getLogger(__name__)

# Keys of a norm's YAML for the model or for normexp; all others are passed to the norm.
RESERVED_NORM_KEYS = ("at", "view", "layout", "half_life", "mixes_samples", "synchronized", *SLOTS)
# Keys of a model's YAML for normexp; all others are passed to the model.
RESERVED_MODEL_KEYS = ("weights", "replace")
# Keys of an optimizer's YAML for the training; all others are passed to the optimizer.
RESERVED_OPTIM_KEYS = (
    *("default_lr", "decay_norm", "decay_bias", "schedule", "warmup", "weight_decay"),
)
# Models whose `model.name` also names weights that their package downloads.
NAMED_WEIGHTS: dict[str, Callable[[str, str], Any]] = {
    "normexp.models.packages.build_torchvision_model": packages.torchvision_weights,
    "normexp.models.packages.build_timm_model": packages.timm_weights,
}
# Arguments from a training, for a norm that is built outside one.
NO_TRAINING = {"num_training_steps": NUM_TRAINING_STEPS}


def build_data(values: Mapping[str, Any]) -> Data:
    """The data set that the values of `data` name, checked, on the CPU.

    Two of them are normexp's own: the number of training samples to keep, `limit_train`, and the
    `order` of the samples within each batch.
    """
    values = dict(values)
    limit, order = values.pop("limit_train", None), values.pop("order", None)
    data = read_target(values, "data").make(Data)
    data = data if order is None else replace(data, order=order)
    validate(data)
    if limit is not None:
        data = limit_train(data, limit, values.get("split_seed", 0))
    for line in describe_copies(data):
        logger.warning(line)
    return data


def load_data(spec: CellSpec) -> Data:
    """The data set of a cell, see `build_data`; cached, so do not write to its tensors."""
    return _load_data(yaml.safe_dump(spec.config["data"]))


@lru_cache(maxsize=2)  # data sets kept in memory at once
def _load_data(values: str) -> Data:
    return build_data(yaml.safe_load(values))


@contextmanager
def keeping_data() -> Iterator[None]:
    """Caches data sets for the cells inside the block; the next command reads them again."""
    try:
        yield
    finally:
        _load_data.cache_clear()


def build_norm(
    config: Mapping[str, Any],
    sizes: Sizes,
    data: Data,
    *,
    num_steps: int = NUM_TRAINING_STEPS,
    momentum: float | None = None,
) -> NormFactory:
    """The factory that builds the norm of every site, and the parts around it that slots set.

    Args:
        config: of a cell: its norm, eps and slots.
        num_steps: of the training.
        momentum: of running averages, if the norm sets a half-life instead.
    """
    length = data.input_shape[-1]  # of a text, for a norm that keeps state per position
    available = {"num_training_steps": num_steps, "num_positions": length}
    return norm_factory(config, available, sizes.norm_batch_size, momentum)


def norm_factory(
    config: Mapping[str, Any],
    available: Mapping[str, Any] = NO_TRAINING,
    norm_batch_size: int | None = None,
    momentum: float | None = None,
) -> NormFactory:
    """The factory of `build_norm`, for any network.

    Args:
        available: arguments from the training, for a norm whose signature names them.
    """
    target, reserved = norm_target(config["norm"], available, momentum=momentum)
    view = reserved.get("view", "token")
    if view not in ("token", "sequence"):
        raise UserError(f"norm.view={view}: must be token or sequence")
    fixed = _changed_settings(config) | ({"momentum"} if momentum is not None else set())
    keeps_norms = target.call.func is AsBuilt
    if keeps_norms and fixed:
        key = "eps" if "eps" in fixed else "norm.half_life"
        raise UserError(f"{key} has no effect on norm=as_built, which keeps the norms as they are")

    @cache
    def build(settings: tuple[tuple[str, Any], ...]) -> Callable[[int], nn.Module]:
        values = dict(settings)
        eps = values.pop("eps", config["eps"])
        known = {key: value for key, value in values.items() if key in target.arguments}
        make = partial(target.call, **known) if known else target.call
        if not is_shipped(target.path):
            layout = reserved.get("layout")
            return foreign_factory(make, target=target.path, eps=eps, layout=layout)
        shipped = replace(target, call=make).filled_in({"eps": eps})
        return partial(shipped.make, nn.Module)

    def make_norm(num_features: int, **settings: Any) -> nn.Module:
        kept = {key: value for key, value in settings.items() if key not in fixed}
        return build(tuple(sorted(kept.items())))(num_features)

    at = {
        glob: norm_factory({**config, "norm": _shipped_norm(name)}, available, norm_batch_size)
        for glob, name in (reserved.get("at") or {}).items()
    }
    if not keeps_norms:
        build(())  # refuses a wrong knob before the model is built
    return NormFactory(
        make_norm,
        view=view,
        norm_batch_size=norm_batch_size,
        slots=resolve({slot: config[slot] for slot in SLOTS}, reserved),
        keeps_norms=keeps_norms,
        at=at,
    )


def _shipped_norm(name: str) -> dict[str, Any]:
    values = shipped_defaults("norm", name)
    if values is None:
        raise UserError(
            f"norm.at={{...:{name}}}: no such norm; python -m normexp.train --help lists all"
        )
    return values


def _changed_settings(config: Mapping[str, Any]) -> set[str]:
    """Those of eps, momentum and affine whose values differ from the shipped ones."""
    values = config["norm"]
    shipped = shipped_values("norm", values["_target_"]) or {}
    typed = values.keys() & {"eps", "momentum", "affine"}
    changed = {key for key in typed if key not in shipped or values[key] != shipped[key]}
    return changed | ({"eps"} if config["eps"] != shipped_config()["eps"] else set())


def norm_target(
    values: Mapping[str, Any],
    available: Mapping[str, Any] = NO_TRAINING,
    *,
    momentum: float | None = None,
) -> tuple[Target, dict[str, Any]]:
    """The norm with the knobs of its YAML, and the YAML's reserved keys.

    Args:
        values: of the group `norm`.
        available: arguments from the training, for a norm whose signature names them.
        momentum: of running averages, if the norm sets a half-life instead.
    """
    values = dict(values)
    reserved = {key: values.pop(key) for key in RESERVED_NORM_KEYS if key in values}
    if momentum is not None:
        values["momentum"] = momentum
    return read_target(values, "norm").filled_in(available), reserved


@suitable_threads()
def measure_norm(name: str, config: Mapping[str, Any], *, contract_only: bool = False) -> Card:
    """The card of a norm, see `measure_card`."""
    target, reserved = norm_target(config["norm"])
    return measure_card(
        target.call,
        name=name,
        target=target.path,
        eps=config["eps"],
        sees_texts=reserved.get("view") == "sequence",
        contract_only=contract_only,
    )


@dataclass(frozen=True)
class NetworkBuilder:
    """Builds the network of one seed: the same initial weights for every norm.

    Attributes:
        target: returns the network.
        norm: builds its norms.
        takes_norm: `target` has an argument `norm`; otherwise the norms of its network are
            replaced.
        classes: names of the classes that `norm` replaces; empty: all recognised norms.
        weights: the weights that every seed starts from.
        example: arguments of a forward, to recognise the norms that are replaced.
        recognised: the norms, found in the network of the first seed.
        logged: messages logged so far; networks of other seeds would only repeat them.
    """

    target: Target
    norm: NormFactory | None = None
    takes_norm: bool = False
    classes: Sequence[str] = ()
    weights: Weights | None = None
    example: tuple[Any, ...] = ()
    recognised: list[Recognition] = field(default_factory=list)
    logged: set[str] = field(default_factory=set)

    def __call__(self, seed: int) -> nn.Module:
        """Builds the network of a seed. Raises UserError if the model's code returns no module."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "init"))
            with self.target.explaining_errors():  # also of a module that cannot be copied
                # A copy: a target may reuse modules, and networks must not share any.
                norm = {"norm": self.norm} if self.takes_norm else {}
                network = copied(self.target.filled_in(norm).make(nn.Module))
            self._finish(network)
        return network

    def unsplit(self) -> NetworkBuilder:
        """A builder whose norms do not divide a forward pass into sub-batches."""
        assert self.norm is not None
        return replace(self, norm=self.norm.unsplit())

    def _finish(self, network: nn.Module) -> None:
        """Loads weights and replaces norms; what only the new norms have is loaded afterwards."""
        if self.norm and self.takes_norm:
            self.norm.put_norms(network)
        rest = self.weights.load(network, self._say) if self.weights else {}
        if not self.takes_norm:
            network.register_forward_hook(_take_scores)
        if self.norm and not self.takes_norm:
            if not self.recognised:
                self.recognised.append(recognise(network, self.example, {}))
                if not self.norm.keeps_norms:
                    check_formulas(network, self.recognised[0], self.example, {})
            only = tuple(self.classes) or None
            surgery = replace_norms(network, self.norm, self.recognised[0], only)
            for note in surgery.notes():
                self._say(note)
            load_fitting(network, rest)

    def _say(self, note: str) -> None:
        if note not in self.logged:
            self.logged.add(note)
            logger.info(note)


def build_network(values: Mapping[str, Any], norm: NormFactory, data: Data) -> NetworkBuilder:
    """A builder of the model that the values of `model` name, for a data set.

    A model with an argument `norm` builds its norms from it; in any other model they are replaced.
    """
    values = dict(values)
    start, classes = (values.pop(key, None) for key in RESERVED_MODEL_KEYS)
    target = read_target(values, "model")
    names = target.arguments - target.call.keywords.keys()
    find = NAMED_WEIGHTS.get(target.path)
    download = None if find is None else partial(find, values["name"])
    weights = None if start is None else open_weights(start, download)
    builder = partial(NetworkBuilder, weights=weights)
    available = {
        "input_shape": data.input_shape,
        "num_outputs": data.num_outputs,
        "vocab_size": data.vocab_size,
        "block_size": data.input_shape[0],
    }
    if norm.keeps_norms and "norm" in names:
        raise UserError(
            "norm=as_built keeps the norms of a network that has some, as model=torchvision, "
            f"model=timm or one of yours; {target.path} builds those that `norm` names"
        )
    if norm.at and "norm" not in names:
        raise UserError(f"norm.at: {target.path} does not build its norms from an argument `norm`")
    if "norm" not in names:  # other libraries have other names for the same arguments
        available["num_classes"] = data.num_outputs
        if len(data.input_shape) == 3:
            available |= dict.fromkeys(("in_channels", "in_chans"), data.input_shape[0])
        filled, example = target.filled_in(available), example_of(data)
        return builder(filled, norm, classes=classes or (), example=example)
    if classes:
        raise UserError(
            f"model.replace={as_typed(classes)}: this model builds its norms from its argument "
            "`norm`, so none can be replaced; drop the key"
        )
    refuse_misfit(target.call.func, names, data)
    return builder(target.filled_in(available), norm, takes_norm=True)


def example_of(data: Data) -> tuple[Tensor, ...]:
    """Random arguments of a forward on a data set, whose samples may be gone."""
    shape, draws = (PROBE_SAMPLES, *data.input_shape), torch.Generator().manual_seed(0)
    if data.vocab_size is None:
        return (torch.randn(shape, generator=draws),)
    tokens = torch.randint(data.vocab_size, shape, generator=draws)
    if data.task == "language_modeling":
        return (tokens,)
    is_gone = getattr(data.train, "inputs", tokens).ndim == 1  # see `without_samples`
    has_mask = is_gone or getattr(data.train, "mask", None) is not None
    return (tokens, torch.ones_like(tokens, dtype=torch.bool)) if has_mask else (tokens,)


def _take_scores(_: nn.Module, __: Any, output: Any) -> Any:
    """The scores in an output of several values, such as those of transformers."""
    for name in ("logits", "out"):
        if isinstance(output, Mapping) and name in output:
            return output[name]
        if hasattr(output, name):
            return getattr(output, name)
    return output


def build_optimizer(
    values: Mapping[str, Any], *, momentum: float | None = None
) -> Callable[..., torch.optim.Optimizer]:
    """The optimizer that `optim` names, to be called with parameters and a learning rate.

    Args:
        values: of the group `optim`.
        momentum: in place of that among the values.

    Raises:
        UserError: a knob that it does not take.
    """
    values = {key: value for key, value in values.items() if key not in RESERVED_OPTIM_KEYS}
    if momentum is not None:
        values["momentum"] = momentum
    target = read_target(values, "optim")
    target.require(1, "lr", "weight_decay")
    return target.call


def build_schedule(
    values: Mapping[str, Any] | None, num_steps: int, *, shape: str, warmup: float
) -> Schedule:
    """The schedule that `schedule` names; without one, a shape by name.

    Args:
        values: of the group `schedule`.
        shape, warmup: of the group `optim`.

    Raises:
        UserError: a knob that it does not take, or an error of its own code.
    """
    if values is None:
        return named_schedule(shape, warmup, num_steps)
    values = dict(values)
    monitor = values.pop("monitor", None)
    target = read_target(values, "schedule")
    if isinstance(target.call.func, type):  # a function gets step and total by position
        target = target.filled_in({"total_steps": num_steps})
    target.require(1 if isinstance(target.call.func, type) else 2)
    with target.explaining_errors():
        return own_schedule(target.call, target.call.func, num_steps, monitor, target.name)


def build_callbacks(values: Mapping[str, Any] | None, metrics: Sequence[str]) -> list[Callback]:
    """New instances of the callbacks in `callback`: one with a `_target_`, or several by name.

    Args:
        values: of the group `callback`.
        metrics: names of validation metrics that a callback may monitor.
    """
    if values is None:
        return []
    from pytorch_lightning.callbacks import Callback, EarlyStopping

    from normexp.training.fit import check_callback

    parts: Mapping[str, Any] = {"callback": values}
    if values and "_target_" not in values:
        parts = {f"callback.{name}": part for name, part in values.items()}
    callbacks = []
    for key, part in parts.items():
        target = read_target(part, key)
        callback = target.make(Callback)
        check_callback(callback, target.name, metrics)
        if isinstance(callback, EarlyStopping):
            check_value(f"{key}.patience", callback.patience, Index, "validations")
        callbacks.append(callback)
    return callbacks


def logger_targets(values: Mapping[str, Any]) -> dict[str, Target]:
    """What each logger names. Raises UserError for a knob that it does not take."""
    return {name: read_target(part, f"logger.{name}") for name, part in values.items() if part}


def build_loggers(values: Mapping[str, Any], available: Mapping[str, Any]) -> list[Logger]:
    """New loggers of one run; a training goes on if one fails.

    Args:
        values: of the group `logger`.
        available: names and folders of the run, passed where a signature has an argument of that
            name and the config does not set it.

    """
    from pytorch_lightning.loggers import Logger

    from normexp.training.trackers import Guarded

    loggers = list[Logger]()
    for name, target in logger_targets(values).items():
        target = target.filled_in({**available, "save_dir": f"{available['save_dir']}/{name}"})
        loggers.append(Guarded(target.key, partial(target.make, Logger)))
    return loggers


def synchronized(values: Mapping[str, Any]) -> bool:
    """True if the norm computes its statistics over all devices.

    As its YAML says (`synchronized`); a foreign norm may also say it by an attribute of that name.
    """
    from_config = identity.spans_devices(values)
    if from_config is not None:
        return from_config
    try:
        return is_synchronized(get_object(values["_target_"]))
    except Exception:  # a user's module may raise anything on import: `build_norm` reports it
        return False
