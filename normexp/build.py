"""From config to objects: the one place that instantiates what a config names."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from lightning_fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from torch import nn

from normexp.batching.draws import derive_seed
from normexp.batching.processes import spans_devices
from normexp.batching.sizes import Sizes
from normexp.data.dataset import Data, validate
from normexp.errors import UserError
from normexp.norms.adapt import adapt, foreign_factory
from normexp.norms.factory import NormFactory
from normexp.norms.slots import SLOTS, resolve
from normexp.training.fit import quiet_lightning

logger = logging.getLogger(__name__)
logging.getLogger("hydra").addHandler(logging.NullHandler())  # it logs what it raises as well

# Keys of a norm's YAML that speak to the model or to us; everything else goes to the norm.
RESERVED_NORM_KEYS = ("view", "half_life", *SLOTS)
# Keys of an optimizer's YAML that speak to the training.
RESERVED_OPTIM_KEYS = ("default_lr", "decay_norm", "schedule", "warmup", "weight_decay")


def check_trainer(cfg: DictConfig) -> None:
    """Refuses GPUs that are not there, and what Lightning's Trainer refuses."""
    accelerator = cfg.trainer.accelerator
    if accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise UserError(
            f"trainer.accelerator={accelerator}: there is no CUDA GPU on this machine; "
            "try trainer=cpu, or trainer=auto, which takes what is there"
        )
    if accelerator == "mps":
        raise UserError(
            "trainer.accelerator=mps: sums over a data set are in float64, which mps lacks; "
            "try trainer=cpu"
        )
    _check_devices(cfg)
    one_device = {"devices": 1, "num_nodes": 1, "strategy": "auto"}  # the others are its like
    try:
        with quiet_lightning():
            options = _plain(cfg.trainer) | one_device
            pl.Trainer(logger=False, enable_checkpointing=False, **options)
    except (MisconfigurationException, ImportError, ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"trainer: {str(error).splitlines()[0]}") from error


def _check_devices(cfg: DictConfig) -> None:
    """Refuses more GPUs than this node has."""
    devices, accelerator = cfg.trainer.devices, cfg.trainer.accelerator
    if devices == 1 or accelerator == "cpu":
        return
    count = torch.cuda.device_count()
    if torch.cuda.is_available() and devices > count:
        raise UserError(
            f"trainer.devices={devices}: this machine has {count} GPU{'s' if count > 1 else ''}; "
            f"try trainer.devices={count} or trainer.accelerator=cpu"
        )


def synchronized(cfg: DictConfig) -> bool:
    """Whether the norm says of itself that it takes statistics over all devices."""
    try:
        return spans_devices(get_object(cfg.norm._target_))
    except Exception:  # whatever importing somebody's module raises: `build_norm` tells it
        return False


def build_data(cfg: DictConfig) -> Data:
    """The data set that `data` names, checked and on the CPU."""
    data = _instantiate(cfg.data, "data")
    if not isinstance(data, Data):
        raise UserError(f"data._target_={cfg.data._target_} returned no normexp.data.Data")
    validate(data)
    return data


def build_norm(
    cfg: DictConfig, sizes: Sizes, data: Data, *, momentum: float | None = None
) -> NormFactory:
    """The factory that builds the norm of every site and what its slots put around it.

    Args:
        momentum: of running averages, where the config gives a half-life in its place.
    """
    make, reserved = norm_maker(cfg, momentum=momentum)
    view = reserved.get("view", "token")
    if view not in ("token", "sequence"):
        raise UserError(f"norm.view={view} is neither token nor sequence")
    target = str(cfg.norm["_target_"])
    make = _with_num_positions(make, data)
    factory = adapt if target.startswith("normexp.norms.") else foreign_factory
    build = factory(make, target=target, eps=cfg.eps)

    def isolated(num_features: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):  # a norm's draws must not move the weights' draws
            return build(num_features)

    return NormFactory(
        isolated,
        view=view,
        norm_batch_size=sizes.norm_batch_size,
        slots=resolve(cfg, reserved),
    )


def norm_maker(
    cfg: DictConfig, *, momentum: float | None = None
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """What makes a norm, the knobs of its YAML bound, and the keys there that are not its own."""
    plain = _plain(cfg.norm)
    reserved = {key: plain.pop(key) for key in RESERVED_NORM_KEYS if key in plain}
    if momentum is not None:
        plain["momentum"] = momentum
    return _instantiate(OmegaConf.create({**plain, "_partial_": True}), "norm"), reserved


def _with_num_positions(make: Callable[..., Any], data: Data) -> Callable[..., Any]:
    """Binds the length of a text sample for a norm that keeps state per position."""
    target = make.func if isinstance(make, partial) else make
    bound = make.keywords if isinstance(make, partial) else {}
    try:
        names = inspect.signature(target).parameters
    except (TypeError, ValueError):  # no function, or written in C: `adapt` has the words for it
        return make
    if "num_positions" not in names or "num_positions" in bound:
        return make
    return partial(make, num_positions=data.input_shape[-1])


@dataclass(frozen=True)
class NetworkBuilder:
    """Builds one replica's network: the same seed gives the same initial weights for every norm."""

    make: Callable[..., nn.Module]
    arguments: dict[str, Any]

    def __call__(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "init"))
            return self.make(**self.arguments)


def build_network(cfg: DictConfig, norm: NormFactory, data: Data) -> NetworkBuilder:
    """The model that `model` names, given whichever of the facts below its signature names."""
    make = _instantiate(OmegaConf.merge(cfg.model, {"_partial_": True}), "model")
    offered = {
        "norm": norm,
        "input_shape": data.input_shape,
        "num_outputs": data.num_outputs,
        "vocab_size": data.vocab_size,
        "block_size": data.input_shape[0],
    }
    target = make.func if isinstance(make, partial) else make
    names = set(inspect.signature(target).parameters)
    if "norm" not in names:
        raise UserError(
            f"model._target_={cfg.model._target_} has no argument `norm`; "
            "a model receives the norm factory under that name"
        )
    if ("vocab_size" in names) != (data.vocab_size is not None):
        fits = "text data such as data=manual" if "vocab_size" in names else "a text model"
        raise UserError(f"model={_name(cfg.model)} does not fit data={data.name}; try {fits}")
    arguments = {name: value for name, value in offered.items() if name in names}
    return NetworkBuilder(make, arguments)


def build_optimizer(
    cfg: DictConfig, *, momentum: float | None = None
) -> Callable[..., torch.optim.Optimizer]:
    """The optimizer that `optim` names, still to be given its parameters and learning rate."""
    plain = _plain(cfg.optim)
    knobs = {key: value for key, value in plain.items() if key not in RESERVED_OPTIM_KEYS}
    if momentum is not None:
        knobs["momentum"] = momentum
    return _instantiate(OmegaConf.create(knobs), "optim")


def _instantiate(cfg: Any, key: str) -> Any:
    """Hydra's instantiate, with a user's mistake in one line."""
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise UserError(f"{missing[0]} is not set; give {missing[0]}=...")
    try:
        return instantiate(cfg, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, UserError):
            raise cause from None
        if isinstance(cause, ImportError):
            raise UserError(_why_no_import(cfg._target_, key, cause)) from error
        reason = str(cause or error).strip() or type(cause).__name__
        first, *rest = reason.splitlines()
        said = " ".join([first, *rest[:1]]) if first.endswith(":") else first
        raise UserError(f"{key}._target_={cfg._target_}: {said}") from error


def _why_no_import(target: str, key: str, error: ImportError) -> str:
    """In one line, from Hydra's error, whose cause is what importing the target raised."""
    cause = error.__cause__ or error
    package, parent = target.partition(".")[0], target.rpartition(".")[0]
    if isinstance(cause, ModuleNotFoundError) and cause.name == package:
        remedy = f"there is no module {package}; install it, or add its folder to PYTHONPATH"
    elif isinstance(cause, ModuleNotFoundError) and cause.name == target:
        remedy = f"{parent} has no {target[len(parent) + 1 :]}"
    else:
        said = (str(cause).splitlines() or [""])[0]
        remedy = f"importing it fails with {type(cause).__name__}: {said}"
    return f"{key}._target_={target}: {remedy}"


def _plain(cfg: DictConfig) -> dict[str, Any]:
    plain = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _name(cfg: DictConfig) -> str:
    return str(cfg._target_).rpartition(".")[2]
