"""Builds the network that a config names, with its norms."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normexp.any_network.recognise import Recognition
from normexp.any_network.replace import find_norms
from normexp.any_network.split import Split, try_split
from normexp.any_network.surgery import put_sites
from normexp.any_network.trial import Inputs
from normexp.any_network.weights import Weights, load_fitting, open_weights
from normexp.errors import UserError
from normexp.norms.factory import NormFactory
from normexp.training.batching.copies import copied
from normexp.training.batching.draws import derive_seed
from normexp.training.config.keys import separate
from normexp.training.config.target import Target, read_target
from normexp.training.data.dataset import Data
from normexp.training.models import packages
from normexp.training.records.files import read_path
from normexp.words import as_typed

logger = logging.getLogger(__name__)

NUM_EXAMPLES = 4  # samples of the forward in which norms are recognised
# Models whose `model.name` also names weights that their package downloads.
NAMED_WEIGHTS: dict[str, Callable[[str, str], Any]] = {
    "normexp.training.models.packages.build_torchvision_model": packages.torchvision_weights,
    "normexp.training.models.packages.build_timm_model": packages.timm_weights,
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
        example: arguments of a forward, to try the network on; None for a shipped model, where the
            first axis of every site counts samples.
        recognised: the norms, found in the network of the first seed.
        splits: where its sites find their samples, tried in the network of the first seed.
        logged: messages logged so far; networks of other seeds would only repeat them.
    """

    target: Target
    norm: NormFactory
    takes_norm: bool = False
    classes: Sequence[str] = ()
    weights: Weights | None = None
    example: tuple[Any, ...] | None = None
    recognised: list[Recognition] = field(default_factory=list)
    splits: list[Split] = field(default_factory=list)
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
        return network.train()  # which may keep some norms in evaluation mode

    def unsplit(self) -> NetworkBuilder:
        """A builder whose norms do not divide a forward pass into sub-batches."""
        return replace(self, norm=self.norm.unsplit(), splits=[])

    def _finish(self, network: nn.Module) -> None:
        """Loads weights and replaces norms, then loads what only the new norms have."""
        if self.norm.at:
            self.norm.put_norms(network)
        unloaded = self.weights.load(network, self._say) if self.weights else {}
        if self.example is None:
            return
        inputs = Inputs(self.example, {})
        network.register_forward_hook(_take_scores)
        if not self.takes_norm:
            self._replace_norms(network, inputs)
            load_fitting(network, unloaded)
        if not self.splits:
            self.splits.append(try_split(network, inputs))
        for note in self.splits[0].notes:
            self._say(note)
        self.splits[0].install(network)

    def _replace_norms(self, network: nn.Module, inputs: Inputs) -> None:
        notes: list[str] = []
        if not self.recognised:
            recognition, notes = find_norms(network, self.norm, inputs)
            self.recognised.append(recognition)
        surgery = put_sites(network, self.norm, self.recognised[0], self.classes or None)
        for note in (*surgery.notes(), *notes):
            self._say(note)

    def _say(self, note: str) -> None:
        if note not in self.logged:
            self.logged.add(note)
            logger.info(note)


def build_network(values: Mapping[str, Any], norm: NormFactory, data: Data) -> NetworkBuilder:
    """A builder of the model that the values of `model` name, for a data set.

    A model with an argument `norm` builds its norms from it; in any other model they are replaced.
    """
    own, knobs = separate("model", values)
    start, classes = own.get("weights"), own.get("replace") or ()
    target = read_target(knobs, "model")
    names = target.arguments - target.call.keywords.keys()
    find = NAMED_WEIGHTS.get(target.path)
    download = None if find is None else partial(find, knobs["name"])
    weights = None
    if start is not None:
        weights = open_weights(start, read_path("model.weights", start), download)
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
        filled = target.filled_in(available)
        return NetworkBuilder(
            filled, norm, classes=classes, weights=weights, example=example_of(data)
        )
    if classes:
        raise UserError(
            f"model.replace={as_typed(classes)}: this model builds its norms from its argument "
            "`norm`, so none can be replaced; drop the key"
        )
    _refuse_misfit(target.call.func, names, data)
    filled = target.filled_in(available)
    example = None if target.path.startswith("normexp.training.models.") else example_of(data)
    return NetworkBuilder(filled, norm, takes_norm=True, weights=weights, example=example)


def _refuse_misfit(model: Any, names: Collection[str], data: Data) -> None:
    """Raises UserError if one of model and data is for texts alone, or the model's mask misfits.

    Args:
        model: its class, or a function that returns it.
        names: of its arguments; a model that reads texts takes `vocab_size`.
    """
    reads_text = "vocab_size" in names
    is_text = data.vocab_size is not None
    fits = reads_text == is_text
    mask = None
    if hasattr(model, "forward"):  # a function has none, and may return any model
        mask = inspect.signature(model.forward).parameters.get("mask")
        lacks_mask = data.has_mask is True and mask is None
        needs_mask = mask is not None and mask.default is mask.empty
        if is_text and (lacks_mask or (needs_mask and data.has_mask is False)):
            fits = False
    if fits:
        return
    if not reads_text:
        remedy = "model=text_encoder" if data.has_mask else "model=gpt"
    else:
        remedy = "data=manual" if mask is None else "data=langid"
    raise UserError(
        f"model={getattr(model, '__name__', model)} does not fit data={data.name}; try {remedy}"
    )


def example_of(data: Data) -> tuple[Tensor, ...]:
    """Random arguments of a forward on a data set, whose samples may be gone."""
    shape = (NUM_EXAMPLES, *data.input_shape)
    draws = torch.Generator().manual_seed(0)
    if data.vocab_size is None:
        return (torch.randn(shape, generator=draws),)
    tokens = torch.randint(data.vocab_size, shape, generator=draws)
    if data.task == "language_modeling" or data.has_mask is False:
        return (tokens,)
    return tokens, torch.ones_like(tokens, dtype=torch.bool)


def _take_scores(_: nn.Module, __: Any, output: Any) -> Any:
    """The scores in an output of several values, as of transformers or of torchvision."""
    for name in ("logits", "out"):
        if isinstance(output, Mapping) and name in output:
            return output[name]
        if hasattr(output, name):
            return getattr(output, name)
    return output
