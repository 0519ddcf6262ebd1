"""Builds objects from a config; nothing else instantiates the targets that a config names."""

from __future__ import annotations

import copy
import inspect
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.callbacks import Callback, EarlyStopping
from pytorch_lightning.loggers import Logger
from torch import nn

from normexp.batching.draws import derive_seed
from normexp.batching.processes import spans_devices
from normexp.batching.sizes import Sizes
from normexp.config.compose import shipped_config, shipped_defaults, shipped_targets
from normexp.config.rules import INDEX, as_typed, check_value, suggest
from normexp.config.spec import one_line
from normexp.data.dataset import Data, limit_train, validate
from normexp.errors import UserError
from normexp.models import timm, torchvision
from normexp.models.surgery import replace_norms
from normexp.models.weights import Download, Weights, open_weights
from normexp.norms.adapt import adapt, foreign_factory
from normexp.norms.factory import NormFactory
from normexp.norms.running import NUM_TRAINING_STEPS
from normexp.norms.slots import SLOTS, resolve
from normexp.records.identity import place_of
from normexp.training.callbacks import check_callback
from normexp.training.schedule import Schedule, named_schedule, own_schedule

logger = logging.getLogger(__name__)
logging.getLogger("hydra").addHandler(logging.NullHandler())  # it also logs what it raises

# Keys of a norm's YAML for the model or for normexp; all others are passed to the norm.
RESERVED_NORM_KEYS = ("view", "half_life", *SLOTS)
# Keys of a model's YAML for normexp; all others are passed to the model.
RESERVED_MODEL_KEYS = ("weights", "replace")
# Keys of an optimizer's YAML for the training; all others are passed to the optimizer.
RESERVED_OPTIM_KEYS = (
    *("default_lr", "decay_norm", "decay_bias", "schedule", "warmup", "weight_decay"),
)
# Models whose `model.name` also names weights that their package downloads.
NAMED_WEIGHTS: dict[str, Callable[[str, str], Any]] = {
    "normexp.models.torchvision.build_torchvision_model": torchvision.named_weights,
    "normexp.models.timm.build_timm_model": timm.named_weights,
}
OUTPUTS = ("logits", "out")  # where the scores are, in a model that returns more than a tensor


def build_data(cfg: DictConfig) -> Data:
    """The data set that `data` names, checked, on the CPU, with `data.limit_train` samples."""
    values, target = plain(cfg.data), cfg.data._target_
    limit = values.pop("limit_train", None)
    make = _maker(values, "data")
    data = _call(make, f"data._target_={target}")
    if not isinstance(data, Data):
        kind = type(data).__name__
        raise UserError(f"data._target_={target} returned a {kind}, not a normexp.data.Data")
    validate(data)
    return data if limit is None else limit_train(data, limit, values.get("split_seed", 0))


def build_norm(
    cfg: DictConfig,
    sizes: Sizes,
    data: Data,
    *,
    num_steps: int = NUM_TRAINING_STEPS,
    momentum: float | None = None,
) -> NormFactory:
    """The factory that builds the norm of every site, and the parts around it that slots set.

    Args:
        num_steps: of the training.
        momentum: of running averages, if the config sets norm.half_life instead.
    """
    make, reserved = norm_maker(cfg, num_steps=num_steps, momentum=momentum)
    view = reserved.get("view", "token")
    if view not in ("token", "sequence"):
        raise UserError(f"norm.view={view}: must be token or sequence")
    # The length of a text sample, for a norm that keeps state per position.
    make = _offer(make, {"num_positions": data.input_shape[-1]})
    target = str(cfg.norm["_target_"])
    factory = adapt if target.startswith("normexp.norms.") else foreign_factory
    fixed = _settings_of(cfg) | ({"momentum"} if momentum is not None else set())

    @cache
    def build(settings: tuple[tuple[str, Any], ...]) -> Callable[[int], nn.Module]:
        values = dict(settings)
        eps = values.pop("eps", cfg.eps)
        known = _arguments_of(make)
        knobs = {key: value for key, value in values.items() if key in known}
        return factory(partial(make, **knobs) if knobs else make, target=target, eps=eps)

    def make_norm(num_features: int, **settings: Any) -> nn.Module:
        kept = {key: value for key, value in settings.items() if key not in fixed}
        return build(tuple(sorted(kept.items())))(num_features)

    build(())  # refuses a wrong knob before the model is built
    return NormFactory(
        make_norm, view=view, norm_batch_size=sizes.norm_batch_size, slots=resolve(cfg, reserved)
    )


def _settings_of(cfg: DictConfig) -> set[str]:
    """Those of eps, momentum and affine that the config sets to other values than the shipped."""
    shipped: Mapping[str, Any] = {}
    if choice := shipped_targets("norm").get(cfg.norm["_target_"]):
        shipped = shipped_defaults("norm", choice.partition("/")[2]) or {}
    changed = {key for key in ("eps", "momentum", "affine") if key in cfg.norm}
    changed = {key for key in changed if key not in shipped or cfg.norm[key] != shipped[key]}
    return changed | ({"eps"} if cfg.eps != shipped_config()["eps"] else set())


def norm_maker(
    cfg: DictConfig, *, num_steps: int = NUM_TRAINING_STEPS, momentum: float | None = None
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A partial that makes a norm, with the knobs of its YAML, and its reserved keys."""
    values = plain(cfg.norm)
    reserved = {key: values.pop(key) for key in RESERVED_NORM_KEYS if key in values}
    if momentum is not None:
        values["momentum"] = momentum
    make = _instantiate({**values, "_partial_": True}, "norm")
    return _offer(make, {"num_training_steps": num_steps}), reserved  # for ramps and warm-ups


@dataclass(frozen=True)
class NetworkBuilder:
    """Builds the network of one seed: the same initial weights for every norm.

    Attributes:
        make: returns the network.
        target: its name, for messages.
        norm: replaces the norms of the network; None if `make` builds them.
        replace: names of the classes that `norm` replaces; None for all that are recognised.
        weights: the weights that every seed starts from.
        told: what the log has, since the networks of a cell differ in their draws alone.
    """

    make: Callable[..., nn.Module]
    target: str
    norm: NormFactory | None = None
    replace: tuple[str, ...] | None = None
    weights: Weights | None = None
    told: set[str] = field(default_factory=set)

    @property
    def weights_digest(self) -> str | None:
        return None if self.weights is None else self.weights.digest

    def __call__(self, seed: int) -> nn.Module:
        """Raises UserError if the model's own code fails, or makes something else."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "init"))
            network = _call(self.make, f"model._target_={self.target}")
            if not isinstance(network, nn.Module):
                kind = type(network).__name__
                raise UserError(f"model._target_={self.target} made a {kind}, not an nn.Module")
            network = copy.deepcopy(network)  # modules that `make` reuses stay apart
            self._finish(network)
        return network

    def _finish(self, network: nn.Module) -> None:
        """Loads weights and replaces norms: weights of the network as its authors build it fit
        before, those of a recorded run after.
        """
        notes: list[str] = []
        loading = self.weights.loading(network) if self.weights else None
        if loading:
            loading.into(network)
        if self.norm:
            surgery = replace_norms(network, self.norm, self.replace)
            network.register_forward_hook(_take_scores)
            notes += surgery.notes()
            if loading:
                loading.follow(surgery)
                loading.into(network)
        if loading:
            loading.check(network)
            notes += loading.notes(network)
        for note in notes:
            if note not in self.told:
                self.told.add(note)
                logger.info(note)


def build_network(cfg: DictConfig, norm: NormFactory, data: Data) -> NetworkBuilder:
    """The model that `model` names, called with the data facts in its signature.

    A model with the argument `norm` builds its norms from it; in any other they are replaced.
    """
    values, target = plain(cfg.model), str(cfg.model["_target_"])
    name, classes = (values.pop(key, None) for key in RESERVED_MODEL_KEYS)
    make = _maker(values, "model")
    bound = make.keywords if isinstance(make, partial) else {}
    names = _arguments_of(make) - set(bound)
    weights = None if name is None else open_weights(name, _download_of(target, values))
    if "norm" not in names:
        make = _offer(make, _facts_of(data) | _aliases_of(data))
        return NetworkBuilder(make, target, norm, tuple(classes) if classes else None, weights)
    if classes:
        raise UserError(
            f"model.replace={as_typed(classes)}: this model builds its norms from its argument "
            "`norm`; nothing is replaced"
        )
    if ("vocab_size" in names) != (data.vocab_size is not None):
        fits = "text data such as data=manual" if "vocab_size" in names else "a text model"
        model = target.rpartition(".")[2]
        raise UserError(f"model={model} does not fit data={data.name}; try {fits}")
    return NetworkBuilder(_offer(make, {"norm": norm} | _facts_of(data)), target, weights=weights)


def _facts_of(data: Data) -> dict[str, Any]:
    return {
        "input_shape": data.input_shape,
        "num_outputs": data.num_outputs,
        "vocab_size": data.vocab_size,
        "block_size": data.input_shape[0],
    }


def _aliases_of(data: Data) -> dict[str, Any]:
    """The names by which networks of other libraries ask for the facts."""
    channels = {"in_channels": data.input_shape[0], "in_chans": data.input_shape[0]}
    return {"num_classes": data.num_outputs} | (channels if len(data.input_shape) == 3 else {})


def _download_of(target: str, values: Mapping[str, Any]) -> Download | None:
    find = NAMED_WEIGHTS.get(target)
    return None if find is None else partial(find, values["name"])


def _take_scores(_: nn.Module, __: Any, output: Any) -> Any:
    """The scores in an output of several values, such as those of transformers."""
    return next((getattr(output, name) for name in OUTPUTS if hasattr(output, name)), output)


def build_optimizer(
    cfg: DictConfig, *, momentum: float | None = None
) -> Callable[..., torch.optim.Optimizer]:
    """The optimizer that `optim` names, to be called with parameters and a learning rate.

    Raises:
        UserError: a knob that it does not take.
    """
    values = plain(cfg.optim)
    for key in RESERVED_OPTIM_KEYS:
        values.pop(key, None)
    if momentum is not None:
        values["momentum"] = momentum
    return _maker(values, "optim")


def build_schedule(cfg: DictConfig, num_steps: int) -> Schedule:
    """The schedule that `schedule` names; without one, that of `optim.schedule`.

    Raises:
        UserError: a knob that it does not take, an error of its own code, or keys of both.
    """
    if cfg.get("schedule") is None:
        return named_schedule(cfg.optim.schedule, cfg.optim.warmup, num_steps)
    values = plain(cfg.schedule)
    monitor, target = values.pop("monitor", None), values["_target_"]
    make, name = _maker(values, "schedule"), f"schedule._target_={target}"
    own = make.func if isinstance(make, partial) else make
    if isinstance(own, type):  # a function gets the total by place
        make = _offer(make, {"total_steps": num_steps})
    return _call(partial(own_schedule, make, own, num_steps, monitor, name), name)


def build_callbacks(cfg: DictConfig, metrics: Sequence[str]) -> list[Callback]:
    """The callbacks that `callback` names, new ones: one with a `_target_`, or several by name.

    Args:
        metrics: of the validation, which a callback may monitor.
    """
    if cfg.get("callback") is None:
        return []
    values = plain(cfg.callback)
    parts = {"callback": values}
    if "_target_" not in values:
        parts = {f"callback.{name}": part for name, part in values.items()}
    callbacks = []
    for key, part in parts.items():
        if not isinstance(part, dict) or not isinstance(part.get("_target_"), str):
            raise UserError(f"{key}._target_ is missing: name a class, as in {EXAMPLE}")
        name = f"{key}._target_={part['_target_']}"
        callback = _call(_maker(part, key), name)
        check_callback(callback, name, metrics)
        if isinstance(callback, EarlyStopping):
            check_value(f"{key}.patience", callback.patience, INDEX, "validations")
        callbacks.append(callback)
    if not callbacks:
        raise UserError(f"callback._target_ is missing: name a class, as in {EXAMPLE}")
    return callbacks


EXAMPLE = "callback=custom callback._target_=my_package.MyCallback"


def synchronized(cfg: DictConfig) -> bool:
    """True if the norm declares that it computes its statistics over all devices."""
    try:
        return spans_devices(get_object(cfg.norm._target_))
    except Exception:  # a user's module may raise anything on import: `build_norm` reports it
        return False


def check_trainer(cfg: DictConfig) -> None:
    """Refuses GPUs that this machine lacks."""
    accelerator, devices = cfg.trainer.accelerator, cfg.trainer.devices
    count = torch.cuda.device_count()
    if accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise UserError(
            f"trainer.accelerator={accelerator}: this machine has no CUDA GPU; "
            "try trainer=cpu, or trainer=auto, which takes a GPU if there is one"
        )
    if accelerator != "cpu" and torch.cuda.is_available() and devices > max(count, 1):
        raise UserError(
            f"trainer.devices={devices}: this machine has {count} GPU{'s' if count > 1 else ''}; "
            f"try trainer.devices={count} or trainer.accelerator=cpu"
        )


def plain(cfg: DictConfig) -> dict[str, Any]:
    """A config as builtin values, resolved. Raises UserError for a `???` that is not set."""
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise UserError(f"{missing[0]} is not set; give {missing[0]}=...")
    values = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _arguments_of(make: Callable[..., Any]) -> set[str]:
    """Names of all arguments of a class, function or partial; `**` if it takes any other."""
    try:
        found = inspect.signature(make.func if isinstance(make, partial) else make).parameters
        return {"**" if p.kind is p.VAR_KEYWORD else name for name, p in found.items()}
    except (TypeError, ValueError):  # not callable, or written in C
        return set()


def _offer(make: Callable[..., Any], facts: Mapping[str, Any]) -> Callable[..., Any]:
    """`make` with the facts bound that its signature names and no knob has set."""
    bound = make.keywords if isinstance(make, partial) else {}
    names = _arguments_of(make) - set(bound)
    wanted = {name: fact for name, fact in facts.items() if name in names}
    return partial(make, **wanted) if wanted else make


def _maker(values: dict[str, Any], group: str) -> Callable[..., Any]:
    """A partial of the target with its knobs. Raises UserError for one that it does not take."""
    make, target = _instantiate({**values, "_partial_": True}, group), values["_target_"]
    names = _arguments_of(make)
    knobs = make.keywords if isinstance(make, partial) else {}
    unknown = [] if not names or "**" in names else sorted(set(knobs) - names)
    if unknown:
        hint = suggest(unknown[0], names) or f"it takes {', '.join(sorted(names)) or 'nothing'}"
        raise UserError(f"{group}.{unknown[0]}: {target} has no such argument; {hint}")
    return make


def _call(make: Callable[[], Any], what: str) -> Any:
    """Calls foreign code; its error becomes a UserError that names the line of the user's file."""
    try:
        return make()
    except UserError:
        raise
    except Exception as error:  # of any kind
        raise UserError(f"{what} fails: {one_line(error)}{place_of(error)}") from error


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
        name = target[len(parent) + 1 :]
        near = suggest(name, dir(sys.modules[parent]), most=3) if parent in sys.modules else ""
        reason = f"{parent} has no {name}" + (f"; {near}" if near else "")
    else:
        first = (str(cause).splitlines() or [""])[0]
        reason = f"importing it fails with {type(cause).__name__}: {first}"
    return f"{key}._target_={target}: {reason}"


def logger_maker(cfg: DictConfig) -> Callable[..., Any]:
    """What `logger.custom` names, with its knobs. Raises UserError for no logger, or a bad knob."""
    values = plain(cfg.logger.custom)
    values.pop("per")
    make = _maker(values, "logger.custom")
    own = make.func if isinstance(make, partial) else make
    if isinstance(own, type) and not issubclass(own, Logger):
        raise UserError(
            f"logger.custom._target_={values['_target_']} is no logger; name a class of "
            "pytorch_lightning.loggers, or a subclass of its Logger"
        )
    return make


def build_logger(cfg: DictConfig, place: Mapping[str, Any]) -> Logger:
    """A new instance of the logger that `logger.custom` names.

    Args:
        place: what its run is called and where it may write, given by name where its signature
            has the name and the config does not set it.

    Raises:
        UserError: an error of its own code, or no Lightning logger.
    """
    name = f"logger.custom._target_={cfg.logger.custom['_target_']}"
    own = _call(_offer(logger_maker(cfg), place), name)
    if not isinstance(own, Logger):
        raise UserError(f"{name} makes a {type(own).__name__}, not a pytorch_lightning Logger")
    return own
