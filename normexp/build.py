"""From config to objects: the one place that instantiates what a config names."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn

from normexp.batching.draws import derive_seed
from normexp.batching.sizes import Sizes
from normexp.data.dataset import Data, validate
from normexp.errors import UserError
from normexp.norms.contract import NormFactory
from normexp.norms.foreign import bind_eps, foreign_factory

logger = logging.getLogger(__name__)

# Keys of a norm's YAML that speak to the model or to us; everything else goes to the norm.
RESERVED_NORM_KEYS = ("view",)
# Keys of an optimizer's YAML that speak to the training.
RESERVED_OPTIM_KEYS = ("default_lr", "decay_norm", "schedule", "warmup", "weight_decay")


def build_data(cfg: DictConfig) -> Data:
    """The data set that `data` names, checked and on the CPU."""
    data = _instantiate(cfg.data, "data")
    if not isinstance(data, Data):
        raise UserError(f"data._target_={cfg.data._target_} returned no normexp.data.Data")
    validate(data)
    return data


def build_norm(cfg: DictConfig, sizes: Sizes) -> NormFactory:
    """The factory that builds the norm of every site."""
    plain = _plain(cfg.norm)
    reserved = {key: plain.pop(key) for key in RESERVED_NORM_KEYS if key in plain}
    view = reserved.get("view", "token")
    if view not in ("token", "sequence"):
        raise UserError(f"norm.view={view} is neither token nor sequence")
    make = _instantiate(OmegaConf.create({**plain, "_partial_": True}), "norm")
    target = str(plain["_target_"])
    if target.startswith("normexp.norms."):
        make = bind_eps(make, cfg.eps)
    else:
        make = foreign_factory(make, target=target, eps=cfg.eps)
    return NormFactory(make, view=view, norm_batch_size=sizes.norm_batch_size)


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


def build_optimizer(cfg: DictConfig) -> Callable[..., torch.optim.Optimizer]:
    """The optimizer that `optim` names, still to be given its parameters and learning rate."""
    plain = _plain(cfg.optim)
    knobs = {key: value for key, value in plain.items() if key not in RESERVED_OPTIM_KEYS}
    return _instantiate(OmegaConf.create(knobs), "optim")


def _instantiate(cfg: Any, key: str) -> Any:
    """Hydra's instantiate, with a user's mistake in one line."""
    if OmegaConf.is_missing(cfg, "_target_"):
        raise UserError(f"{key}._target_ is not set; give a dotted path, {key}._target_=pkg.Name")
    try:
        return instantiate(cfg, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, UserError):
            raise cause from None
        reason = str(error).splitlines()[0]
        raise UserError(f"{key}._target_={cfg._target_}: {reason}") from error


def _plain(cfg: DictConfig) -> dict[str, Any]:
    plain = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _name(cfg: DictConfig) -> str:
    return str(cfg._target_).rpartition(".")[2]
