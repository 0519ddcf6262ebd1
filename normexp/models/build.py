"""Builds the network that a config names, with its norms."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normexp.batching.copies import copied
from normexp.batching.draws import derive_seed
from normexp.config.target import Target, read_target
from normexp.config.words import as_typed
from normexp.data.dataset import Data
from normexp.errors import UserError
from normexp.models import packages
from normexp.models.common import refuse_misfit
from normexp.models.recognise import Recognition, recognise
from normexp.models.surgery import check_formulas, replace_norms
from normexp.models.weights import Weights, load_fitting, open_weights
from normexp.norms.factory import NormFactory

logger = logging.getLogger(__name__)

NUM_EXAMPLES = 4  # samples of the forward in which norms are recognised
# Models whose `model.name` also names weights that their package downloads.
NAMED_WEIGHTS: dict[str, Callable[[str, str], Any]] = {
    "normexp.models.packages.build_torchvision_model": packages.torchvision_weights,
    "normexp.models.packages.build_timm_model": packages.timm_weights,
}


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
    start, classes = values.pop("weights", None), values.pop("replace", None)
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
    shape, draws = (NUM_EXAMPLES, *data.input_shape), torch.Generator().manual_seed(0)
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
