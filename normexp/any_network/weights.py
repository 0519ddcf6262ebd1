"""Weights that a network starts from: a file, or a name that torchvision or timm downloads."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor, nn
from torch.serialization import get_unsafe_globals_in_checkpoint

from normexp.errors import UserError, one_line
from normexp.norms.site import named_sites, names_as_built
from normexp.words import name_some

Values = dict[str, Tensor]
Download = Callable[[str], tuple[str, Callable[[], Values]]]


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

    def load(self, network: nn.Module, say: Callable[[str], None]) -> Values:
        """Loads what fits a network; returns the values that do not.

        Norms and the last layer keep their own values where the file has none that fit.

        Args:
            say: logs what was loaded, what was not, and what the file has in excess.

        Raises:
            UserError: any other parameter of the network has no value that fits in the file, or
                the file has weights for several such networks.
        """
        names = names_as_built(network)
        prefixes = _find_prefixes(self.values, names.values())
        unloaded, unused = load_fitting(network, _without_prefix(self.values, prefixes[0]))
        parameters = dict(network.named_parameters())
        missing: dict[str, str] = {}
        state = network.state_dict()
        loaded = {tensor.data_ptr() for name, tensor in state.items() if name not in unloaded}
        for name, tensor in state.items():
            is_tied = tensor.data_ptr() in loaded
            is_count = not tensor.is_floating_point()  # of batches
            if name in unloaded and not is_tied and not is_count:
                missing[name] = f"{names[name]} {unloaded[name]}"
        may_start_anew = _may_start_anew(network)
        key = f"model.weights={self.name}"
        for name, reason in missing.items():
            if name in parameters and name not in may_start_anew:
                num_loaded = len(parameters.keys() - missing.keys())
                raise UserError(
                    f"{key} does not fit the model: {num_loaded} of its {len(parameters)} "
                    f"parameters are in the file, which has {', '.join([*self.values][:2])}; "
                    f"{reason}, and only norms and the last layer may be missing"
                )
        if len(prefixes) > 1:
            raise UserError(
                f"{key} holds weights for several networks of this kind, named "
                f"{', '.join(f'{prefix}*' for prefix in prefixes)}; save one of them alone"
            )
        total = sum(parameter.numel() for parameter in parameters.values())
        num_missing = sum(parameters[name].numel() for name in missing.keys() & parameters.keys())
        but = f"; not loaded: {name_some(missing.values())}" if missing else ""
        say(
            f"{key}: {total - num_missing:,} of {total:,} parameters are loaded{but}; "
            "every seed starts from them"
        )
        if extra := name_some(name for name in unused if name not in names.values()):
            say(f"in the file, but not in the model: {extra}")
        return unused


def load_fitting(network: nn.Module, values: Values) -> tuple[dict[str, str], Values]:
    """Loads the values whose names, of the network as built, and shapes fit.

    Returns:
        the network's own names that got no value, each with the reason, and the values that were
        not loaded.
    """
    names = names_as_built(network)
    fitting: Values = {}
    unloaded: dict[str, str] = {}
    unused = dict(values)
    for name, tensor in network.state_dict().items():
        value = values.get(names[name])
        if value is None:
            unloaded[name] = "is not in the file"
            continue
        if value.ndim == tensor.ndim == 4 and (value.shape[1], tensor.shape[1]) == (3, 1):
            value = value.sum(dim=1, keepdim=True)  # a grey image is three equal colours
        if misfit := _misfit(tensor, value):
            unloaded[name] = misfit
        else:
            fitting[name] = value
            unused.pop(names[name], None)
    network.load_state_dict(fitting, strict=False)
    return unloaded, unused


def _misfit(tensor: Tensor, value: Tensor) -> str:
    """Why a value of a file cannot be loaded into a tensor; "" if it can."""
    if value.shape != tensor.shape:
        return f"is {_size(tensor)}, in the file {_size(value)}"
    if value.layout != torch.strided or value.is_meta:
        return f"is in the file as {value.layout} on {value.device}, must be dense"
    if tensor.is_floating_point() and not value.is_floating_point():
        return f"is {tensor.dtype}, in the file {value.dtype}"
    return "holds NaN in the file" if value.isnan().any() else ""


def _size(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape))


def _may_start_anew(network: nn.Module) -> set[str]:
    """The names of the parameters of norms and of heads.

    A norm is a site, or has only vectors. A head is the last module with a matrix, or is linear
    with a row for each output; a convolution may have as many channels by chance.
    """
    sites = tuple(f"{path}." for path, _ in named_sites(network))
    last, num_outputs = None, 0
    for module in network.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.ndim > 1:
                last, num_outputs = module, len(parameter)
    names: set[str] = set()
    for path, module in network.named_modules():
        parameters = dict(module.named_parameters(path, recurse=False))
        is_norm = all(p.ndim < 2 for p in parameters.values())
        is_head = all(p.ndim < 3 and p.shape[:1] == (num_outputs,) for p in parameters.values())
        if is_norm or is_head or module is last or f"{path}.".startswith(sites):
            names |= parameters.keys()
    return names


def open_weights(name: str, path: Path, download: Download | None) -> Weights:
    """The weights in a file, or else the download of that name.

    Args:
        name: the value of `model.weights`.
        path: of the file that it names, if it names one.
        download: returns the identity of the named weights and a function that reads them; raises
            UserError for an unknown name. None: the model has no named weights.
    """
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

    Tensors in nested mappings, as in checkpoints, are named by all of their keys. Only tensors and
    plain values are unpickled.
    """
    key = f"model.weights={path}"
    try:
        with path.open("rb") as file:  # whatever its name
            is_safetensors = file.read(9).endswith(b"{")  # a header in JSON, behind its length
            file.seek(0)
            content: Any = (
                _load_safetensors(path)
                if is_safetensors
                else torch.load(file, map_location="cpu", weights_only=True)
            )
    except UserError:
        raise
    except Exception as error:  # torch and safetensors raise many kinds
        why = one_line(error)
        if isinstance(error, UnpicklingError):
            objects = get_unsafe_globals_in_checkpoint(path) if is_zipfile(path) else ()
            why = f"only tensors are read, and it holds {name_some(objects) or 'other objects'}"
        raise UserError(
            f"{key} holds neither a state_dict, as torch.save(model.state_dict(), FILE) writes it, "
            f"nor safetensors ({why})"
        ) from error
    values = dict(_named_tensors(content))
    if not values:
        raise UserError(f"{key} holds no tensors by name; name the file of a state_dict")
    return values


def _load_safetensors(path: Path) -> Values:
    if find_spec("safetensors") is None:
        raise UserError(f"model.weights={path} needs the package safetensors; install it by pip")
    from safetensors.torch import load_file

    return load_file(path)


def _named_tensors(content: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested mappings, with their keys joined by dots."""
    if isinstance(content, Tensor):
        yield prefix.removesuffix("."), content
    elif isinstance(content, Mapping):
        for key, value in content.items():
            if isinstance(key, str):  # those of an optimizer are numbers
                yield from _named_tensors(value, f"{prefix}{key}.")


def _find_prefixes(values: Values, names: Iterable[str]) -> list[str]:
    """Those with which the most of the network's names are in the file; "" if it has them as is."""
    counts = Counter({"": 0})
    for name in names:
        for key in values:
            if f".{key}".endswith(f".{name}"):
                counts[key.removesuffix(name)] += 1
    most = max(counts.values())
    best = sorted(prefix for prefix, count in counts.items() if count == most)
    return best if best[0] else [""]


def _without_prefix(values: Values, prefix: str) -> Values:
    """The values, without the prefix where a name has it; a name without it gives way."""
    others = {name: value for name, value in values.items() if not name.startswith(prefix)}
    own = {name: value for name, value in values.items() if name.startswith(prefix)}
    return others | {name.removeprefix(prefix): value for name, value in own.items()}
