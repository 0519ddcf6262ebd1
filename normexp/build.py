"""Builds objects from a config; nothing else instantiates the targets that a config names."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Mapping
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

logging.getLogger("hydra").addHandler(logging.NullHandler())  # it also logs what it raises

# Keys of a norm's YAML for the model or for normexp; all others are passed to the norm.
RESERVED_NORM_KEYS = ("view", "half_life", *SLOTS)
# Keys of an optimizer's YAML for the training; all others are passed to the optimizer.
RESERVED_OPTIM_KEYS = ("default_lr", "decay_norm", "schedule", "warmup", "weight_decay")


def build_data(cfg: DictConfig) -> Data:
    """The data set that `data` names, checked, on the CPU."""
    data = _instantiate(plain(cfg.data), "data")
    if not isinstance(data, Data):
        raise UserError(f"data._target_={cfg.data._target_} did not return a normexp.data.Data")
    validate(data)
    return data


def build_norm(
    cfg: DictConfig, sizes: Sizes, data: Data, *, momentum: float | None = None
) -> NormFactory:
    """The factory that builds the norm of every site, and the parts around it that slots set.

    Args:
        momentum: of running averages, if the config sets norm.half_life instead.
    """
    make, reserved = norm_maker(cfg, momentum=momentum)
    view = reserved.get("view", "token")
    if view not in ("token", "sequence"):
        raise UserError(f"norm.view={view}: must be token or sequence")
    # The length of a text sample, for a norm that keeps state per position.
    make = _offer(make, {"num_positions": data.input_shape[-1]})
    target = str(cfg.norm["_target_"])
    factory = adapt if target.startswith("normexp.norms.") else foreign_factory
    build = factory(make, target=target, eps=cfg.eps)

    def build_apart(num_features: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):  # a norm's draws must not shift the weights' draws
            return build(num_features)

    return NormFactory(
        build_apart,
        view=view,
        norm_batch_size=sizes.norm_batch_size,
        slots=resolve(cfg, reserved),
    )


def norm_maker(
    cfg: DictConfig, *, momentum: float | None = None
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A partial that makes a norm, with the knobs of its YAML, and its reserved keys."""
    values = plain(cfg.norm)
    reserved = {key: values.pop(key) for key in RESERVED_NORM_KEYS if key in values}
    if momentum is not None:
        values["momentum"] = momentum
    return _instantiate({**values, "_partial_": True}, "norm"), reserved


@dataclass(frozen=True)
class NetworkBuilder:
    """Builds the network of one seed: the same initial weights for every norm."""

    make: Callable[..., nn.Module]

    def __call__(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "init"))
            return copy.deepcopy(self.make())  # modules that `make` reuses stay apart


def build_network(cfg: DictConfig, norm: NormFactory, data: Data) -> NetworkBuilder:
    """The model that `model` names, called with the norm and the data facts in its signature."""
    make = _instantiate({**plain(cfg.model), "_partial_": True}, "model")
    names = _arguments_of(make)
    target = str(cfg.model["_target_"])
    if "norm" not in names:
        raise UserError(
            f"model._target_={target} has no argument `norm`; "
            "a model receives the norm factory under that name"
        )
    if ("vocab_size" in names) != (data.vocab_size is not None):
        fits = "text data such as data=manual" if "vocab_size" in names else "a text model"
        name = target.rpartition(".")[2]
        raise UserError(f"model={name} does not fit data={data.name}; try {fits}")
    facts = {
        "norm": norm,
        "input_shape": data.input_shape,
        "num_outputs": data.num_outputs,
        "vocab_size": data.vocab_size,
        "block_size": data.input_shape[0],
    }
    return NetworkBuilder(_offer(make, facts))


def build_optimizer(
    cfg: DictConfig, *, momentum: float | None = None
) -> Callable[..., torch.optim.Optimizer]:
    """The optimizer that `optim` names, to be called with parameters and a learning rate."""
    values = plain(cfg.optim)
    for key in RESERVED_OPTIM_KEYS:
        values.pop(key, None)
    if momentum is not None:
        values["momentum"] = momentum
    return _instantiate(values, "optim")


def synchronized(cfg: DictConfig) -> bool:
    """True if the norm declares that it computes its statistics over all devices."""
    try:
        return spans_devices(get_object(cfg.norm._target_))
    except Exception:  # a user's module may raise anything on import: `build_norm` reports it
        return False


def check_trainer(cfg: DictConfig) -> None:
    """Refuses GPUs that this machine lacks, and options that Lightning's Trainer refuses."""
    accelerator, devices = cfg.trainer.accelerator, cfg.trainer.devices
    count = torch.cuda.device_count()
    if accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise UserError(
            f"trainer.accelerator={accelerator}: this machine has no CUDA GPU; "
            "try trainer=cpu, or trainer=auto, which takes a GPU if there is one"
        )
    if accelerator == "mps":
        raise UserError(
            "trainer.accelerator=mps: sums over a data set are in float64, which mps lacks; "
            "try trainer=cpu"
        )
    if accelerator != "cpu" and torch.cuda.is_available() and devices > max(count, 1):
        raise UserError(
            f"trainer.devices={devices}: this machine has {count} GPU{'s' if count > 1 else ''}; "
            f"try trainer.devices={count} or trainer.accelerator=cpu"
        )
    one_device = {"devices": 1, "num_nodes": 1, "strategy": "auto"}  # all devices are alike
    try:
        with quiet_lightning():
            options = plain(cfg.trainer) | one_device
            pl.Trainer(logger=False, enable_checkpointing=False, **options)
    except (MisconfigurationException, ImportError, ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"trainer: {str(error).splitlines()[0]}") from error


def plain(cfg: DictConfig) -> dict[str, Any]:
    """A config as builtin values, resolved. Raises UserError for a `???` that is not set."""
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise UserError(f"{missing[0]} is not set; give {missing[0]}=...")
    values = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _arguments_of(make: Callable[..., Any]) -> set[str]:
    """Names of all arguments of a class, function or partial, the bound ones among them."""
    try:
        return set(inspect.signature(make.func if isinstance(make, partial) else make).parameters)
    except (TypeError, ValueError):  # not callable, or written in C
        return set()


def _offer(make: Callable[..., Any], facts: Mapping[str, Any]) -> Callable[..., Any]:
    """`make` with the facts bound that its signature names and no knob has set."""
    bound = make.keywords if isinstance(make, partial) else {}
    names = _arguments_of(make) - set(bound)
    wanted = {name: fact for name, fact in facts.items() if name in names}
    return partial(make, **wanted) if wanted else make


def _instantiate(values: dict[str, Any], key: str) -> Any:
    """Hydra's instantiate, with errors turned into a UserError of one line."""
    try:
        return instantiate(values, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, UserError):
            raise cause from None
        if isinstance(cause, ImportError):
            raise UserError(_explain_import(values["_target_"], key, cause)) from error
        reason = str(cause or error).strip() or type(cause).__name__
        first, *rest = reason.splitlines()
        message = " ".join([first, *rest[:1]]) if first.endswith(":") else first
        raise UserError(f"{key}._target_={values['_target_']}: {message}") from error


def _explain_import(target: str, key: str, error: ImportError) -> str:
    """Explains in one line why Hydra could not import a target."""
    cause = error.__cause__ or error
    package, parent = target.partition(".")[0], target.rpartition(".")[0]
    if isinstance(cause, ModuleNotFoundError) and cause.name == package:
        reason = f"there is no module {package}; install it, or add its folder to PYTHONPATH"
    elif isinstance(cause, ModuleNotFoundError) and cause.name == target:
        reason = f"{parent} has no {target[len(parent) + 1 :]}"
    else:
        first = (str(cause).splitlines() or [""])[0]
        reason = f"importing it fails with {type(cause).__name__}: {first}"
    return f"{key}._target_={target}: {reason}"
