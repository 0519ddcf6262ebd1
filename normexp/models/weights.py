"""Weights that a network starts from: a file, or a name that torchvision or timm downloads."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from normexp.errors import UserError, first_line
from normexp.models.surgery import Surgery, shorten

Values = dict[str, Tensor]
Download = Callable[[str], tuple[str, Callable[[], Values]]]
LEAST_TAKEN = 0.1  # of the network's parameters; fewer are no start, but another network's
INNER = ("state_dict", "model", "model_state_dict")  # where a checkpoint has its weights


@dataclass(frozen=True)
class Weights:
    """Weights to start from, read when they are first needed.

    Attributes:
        name: the value of `model.weights`.
        digest: of the file, or the name that identifies a download.
        read: returns the tensors by name.
    """

    name: str
    digest: str
    read: Callable[[], Values]

    @cached_property
    def values(self) -> Values:
        return self.read()

    def loading(self, network: nn.Module) -> Loading:
        return Loading(self, _without_prefix(self.values, network.state_dict()))


@dataclass
class Loading:
    """Copies weights into one network, before and after its norms are replaced.

    Attributes:
        taken: names of the network's tensors that hold a value from the file.
        used: names of the file's tensors that were copied.
        unfit: by the name of a tensor whose namesake in the file has another shape, both shapes.
    """

    weights: Weights
    values: Values
    taken: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    unfit: dict[str, str] = field(default_factory=dict)

    @torch.no_grad()
    def into(self, network: nn.Module) -> None:
        """Copies every value that fits a tensor of the same name."""
        for name, tensor in network.state_dict().items():
            value = self.values.get(name)
            if value is None or name in self.used:
                continue
            if value.ndim == tensor.ndim == 4 and (value.shape[1], tensor.shape[1]) == (3, 1):
                value = value.sum(dim=1, keepdim=True)  # a grey image is three equal colours
            if value.shape == tensor.shape:
                tensor.copy_(value)
                self.taken.add(name)
                self.used.add(name)
                self.unfit.pop(name, None)
            else:
                self.unfit[name] = f"{name} is {_size(tensor)}, in the file {_size(value)}"

    def follow(self, surgery: Surgery) -> None:
        """Updates `taken` and `used` after norms were replaced."""
        moved = {new for new, old in surgery.carried.items() if old in self.taken}
        self.taken = (self.taken - set(surgery.carried.values())) | moved
        self.used -= set(surgery.dropped)

    def check(self, network: nn.Module) -> None:
        """Raises UserError if hardly a parameter of the network has a value of the file."""
        parameters = dict(network.named_parameters())
        if len(self.taken & set(parameters)) < LEAST_TAKEN * len(parameters):
            reason = next(iter(self.unfit.values()), "")
            theirs, ours = (", ".join([*names][:2]) for names in (self.values, parameters))
            example = reason or f"it has {theirs}, and the model {ours}"
            raise UserError(f"model.weights={self.weights.name} does not fit the model: {example}")

    def notes(self, network: nn.Module) -> Iterator[str]:
        """Yields log lines: what was loaded, what was not, and what the file has in excess."""
        parameters = dict(network.named_parameters())
        loaded = sum(p.numel() for name, p in parameters.items() if name in self.taken)
        total = sum(p.numel() for p in parameters.values())
        yield f"model.weights={self.weights.name}: {loaded:,} of {total:,} parameters are loaded"
        if self.unfit:
            yield f"other shapes, not loaded: {', '.join(self.unfit.values())}"
        fresh = [name for name in network.state_dict() if name not in self.taken]
        if fresh:
            yield f"not loaded: {shorten(fresh)}"
        beyond = [name for name in self.values if name not in self.used and name not in self.unfit]
        if beyond:
            yield f"in the file, but not in the model: {shorten(beyond)}"
        unread = [name for name in beyond if name.endswith(("weight", "bias"))]
        if len(unread) > len(parameters) / 4:
            yield (
                f"{len(unread)} weights of the file have no place in the model: is "
                f"model.weights={self.weights.name} of a larger network?"
            )
        drawn = [name for name in parameters if name not in self.taken]
        rest = f", and the first values of {shorten(drawn)}" if drawn else ""
        yield (
            "every seed starts from these weights; a seed draws the order of the data, "
            f"augmentation and dropout{rest}"
        )


def open_weights(name: str, download: Download | None) -> Weights:
    """The weights in the file `name`, or else the download of that name.

    Args:
        download: returns the identity of the named weights and a function that reads them; raises
            UserError for an unknown name. None: the model has no named weights.
    """
    path = Path(name)
    if path.is_file():
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
        return Weights(name, digest, lambda: read_values(path))
    if download is None or path.suffix or len(path.parts) > 1:
        kind = "is a folder" if path.is_dir() else "does not exist"
        raise UserError(
            f"model.weights={name} {kind}; name a file of weights, a state_dict or safetensors"
        )
    digest, read = download(name)
    return Weights(name, digest, read)


def read_values(path: Path) -> Values:
    """Reads the tensors of a safetensors file, or of a state_dict that torch.save wrote.

    The state_dict may be inside a checkpoint. Only tensors and plain values are unpickled.
    """
    key = f"model.weights={path}"
    if path.suffix == ".safetensors":
        if find_spec("safetensors") is None:
            raise UserError(f"{key} needs the package safetensors; pip install safetensors")
        from safetensors.torch import load_file as load
    else:
        load = partial(torch.load, map_location="cpu", weights_only=True)
    try:
        content: Any = load(path)
    except UnpicklingError as error:
        raise UserError(
            f"{key} is no file of weights, or holds a whole module; save its state_dict, as in "
            "torch.save(model.state_dict(), FILE)"
        ) from error
    except Exception as error:  # torch and safetensors raise many kinds
        why = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(
            f"{key} is neither a state_dict that torch.save wrote nor safetensors ({why})"
        ) from error
    for inner in INNER:
        if isinstance(content, Mapping) and isinstance(content.get(inner), Mapping):
            content = content[inner]
    named = content if isinstance(content, Mapping) else {}
    values = {str(name): value for name, value in named.items() if isinstance(value, Tensor)}
    if not values:
        raise UserError(f"{key} holds no tensors by name; name the file of a state_dict")
    return values


def _without_prefix(values: Values, network_state: Mapping[str, Tensor]) -> Values:
    """Strips a common prefix, such as `module.`, if more names then match the network's."""
    first = next(iter(network_state), "")
    ends = sorted({name.removesuffix(first) for name in values if name.endswith(f".{first}")})
    best = max(
        ["", *ends], key=lambda prefix: sum(prefix + name in values for name in network_state)
    )
    return {name.removeprefix(best): value for name, value in values.items()}


def _size(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"
