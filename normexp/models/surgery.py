"""Puts sites in place of the norms of a network that was built without a norm factory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from normexp.batching.copies import copied
from normexp.config.slots import Slots
from normexp.errors import UserError
from normexp.models.formula import (
    COUNT,
    INITIAL_VALUES,
    TOLERANCE,
    DescribedNorm,
    NormDescription,
    is_close,
    tensors_of,
    values_of,
)
from normexp.models.recognise import LeftAlone, Recognition, run_network
from normexp.norms.contract import HasRamp, State
from normexp.norms.factory import NormFactory
from normexp.norms.site import Site, input_and_mask, named_sites
from normexp.words import format_count, name_some

FLOAT_TOLERANCE = 1e-3  # as TOLERANCE, for a network that does not run in float64
# Of torch's transformers: else they read the weights of a LayerNorm, and normalize by themselves.
FAST_PATHS = ("activation_relu_or_gelu", "use_nested_tensor")


class SiteWithTail(nn.Sequential):
    """A site, then the old norm's dropout and activation under the names that they had."""

    adds_level = "site"


@dataclass
class Surgery:
    """The record of what was replaced in a network.

    Attributes:
        left_alone: what may be norms but was not replaced, by path.
        keeps_norms: the old norms are inside of the sites.
        classes: the class of the old norm, by site.
        lost: old tensors that training had changed, and that have no place in the new norm.
        frozen: sites whose parameters require no gradient, like those of the old norm.
        unused_slots: what the norm's config puts around a norm, and this network does not have.
        unfrozen: sites that train where the network's own train() left the old norm in evaluation.
    """

    left_alone: Mapping[str, LeftAlone]
    keeps_norms: bool
    classes: dict[str, str] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    unused_slots: list[str] = field(default_factory=list)
    unfrozen: list[str] = field(default_factory=list)

    def notes(self) -> Iterator[str]:
        """Yields the lines of the log."""
        if self.classes:
            place = "around" if self.keeps_norms else "in place of"
            classes = _count_names(self.classes.values())
            sites = f"{format_count(len(self.classes), 'site')} {place} {classes}"
            yield f"{sites}: {name_some(self.classes)}"
        if left_alone := describe_left_alone(self.left_alone):
            yield f"left alone: {left_alone}"
        if self.lost:
            yield f"the new norm has no place for {name_some(self.lost)}"
        if self.unused_slots:
            slots = ", ".join(self.unused_slots)
            yield f"{slots} of the norm has no effect: the network is built without it"
        if self.frozen:
            yield f"parameters stay frozen at {name_some(self.frozen)}"
        if self.unfrozen:
            yield (
                f"the network trains with {name_some(self.unfrozen)} in evaluation mode, and the "
                "new norms train; norm=frozen keeps their statistics"
            )


def describe_left_alone(modules: Mapping[str, LeftAlone]) -> str:
    """`1 FilmNorm (it is called with a second input)`, for each module that resembles a norm."""
    candidates = [module for module in modules.values() if module.resembles_norm]
    return _count_names(f"{module.class_name} ({module.reason})" for module in candidates)


def replace_norms(
    network: nn.Module,
    factory: NormFactory,
    recognition: Recognition,
    only: Sequence[str] | None = None,
) -> Surgery:
    """Puts a site in place of every norm of `network`, in the layout of the old norm.

    Submodules keep their names and order. A norm that is used in several places becomes one site.
    Eps, momentum and affine of the old norm go to the factory; its gain, shift and running
    moments go to the new norm where that has a tensor of the same role and shape. A factory that
    keeps norms gets sites around them, and around what was left alone and is called like a norm.

    Args:
        only: names of the classes to replace; None for all norms.

    Raises:
        UserError: no norm, or no norm of a class in `only`.
    """
    left_alone = {} if only is not None else dict(recognition.left_alone)
    surgery = Surgery(left_alone, factory.keeps_norms)
    new: dict[str, nn.Module] = {}
    evaluated = set[str]() if factory.keeps_norms else _evaluated_in_training(network)
    for path, old in network.named_modules():
        class_name = type(old).__name__
        if only is not None and class_name not in only:
            continue
        norm = recognition.norms.get(path)
        other = recognition.left_alone.get(path)
        if norm is not None and not factory.keeps_norms:
            new[path], lost = _new_norm(old, norm, factory, network)
            surgery.lost += [f"{path}.{name}" for name in lost]
            parameters = [*old.parameters()]
            has_some = parameters and any(True for _ in new[path].parameters())
            if has_some and not any(parameter.requires_grad for parameter in parameters):
                new[path].requires_grad_(False)
                surgery.frozen.append(path)
        elif norm is not None:
            new[path] = factory.around(old, is_last=norm.formula.is_last)
        elif factory.keeps_norms and other and other.resembles_norm and other.is_called:
            new[path] = factory.around(old, is_last=False)
            left_alone.pop(path, None)
        else:
            continue
        surgery.classes[path] = class_name
    for slot, value in vars(factory.slots).items():
        if value != getattr(Slots(), slot):
            surgery.unused_slots.append(f"{slot}={value}")
    missing = sorted(set(only or ()) - set(surgery.classes.values()))
    if missing or not new:
        raise UserError(_why_nothing(network, recognition, missing))
    _put(new, network)
    if evaluated:
        evaluated -= _evaluated_in_training(network)
        surgery.unfrozen = [path for path in new if path in evaluated]
    for module in network.modules():
        if hasattr(module, "inplace"):  # a norm may need its output for its gradient
            setattr(module, "inplace", False)  # noqa: B010 (nn.Module is typed to hold no bool)
        if factory.keeps_norms:
            continue
        for switch in FAST_PATHS:
            if hasattr(module, switch):
                setattr(module, switch, False)
    return surgery


def check_formulas(
    network: nn.Module,
    recognition: Recognition,
    args: tuple[Any, ...],
    keywords: Mapping[str, Any],
) -> None:
    """Puts the formulas that were recognised in place of the norms that are not torch's own.

    Raises:
        UserError: the outputs are not the same, in either mode.
    """
    formulas: dict[str, nn.Module] = {}
    for path, norm in recognition.norms.items():
        if norm.form is not None:
            old = network.get_submodule(path)
            formulas[path] = _like(old, network, DescribedNorm(norm, old))
    if not formulas:
        return
    described = copied(network)
    _put(formulas, described)
    for training in (False, True):
        expected = _outputs(copied(network).train(training), args, keywords)
        output = _outputs(copied(described).train(training), args, keywords)
        tolerance = TOLERANCE
        if expected.dtype != torch.double:
            tolerance = max(FLOAT_TOLERANCE, 8 * torch.finfo(expected.dtype).eps)
        if expected.shape != output.shape or not is_close(expected, output, tolerance):
            mode = "training" if training else "evaluation"
            raise UserError(
                f"with its own norms put in anew the network has other outputs in {mode}, so what "
                "it does with them is not known well enough to replace them; use norm=as_built"
            )


def check_called(
    network: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]
) -> list[str]:
    """Runs a network in both modes; notes sites that take another axis for that of the samples.

    Raises:
        UserError: a forward fails, or a site is never entered.
    """
    network = copied(network)
    names = {site: name for name, site in named_sites(network)}
    tensors = [value for value in (*args, *keywords.values()) if isinstance(value, Tensor)]
    lengths = {len(value) for value in tensors if value.ndim}
    entered: set[Site] = set()
    turned: list[str] = []
    running: list[Site] = []  # the site in which a forward fails

    def enter(site: Site, inputs: tuple[Any, ...], named_inputs: dict[str, Any]) -> None:
        x, _ = input_and_mask(inputs, named_inputs)
        reads_samples = site.norm_batch_size is not None or site.view == "sequence"
        if site not in entered and reads_samples and lengths and len(x) not in lengths:
            turned.append(names[site])
        entered.add(site)
        running.append(site)

    def leave(*_: Any) -> None:
        running.pop()

    for site in names:
        site.register_forward_pre_hook(enter, with_kwargs=True)
        site.register_forward_hook(leave)
    for training in (True, False):
        try:
            run_network(network.train(training), args, keywords)
        except UserError as error:
            where = f"norm at {names[running[-1]]}: " if running else ""
            raise UserError(f"{where}{error}") from error
    if idle := sorted(name for site, name in names.items() if site not in entered):
        raise UserError(f"the new norm at {name_some(idle)} is never called; use norm=as_built")
    if not turned:
        return []
    return [f"at {name_some(turned)} the first axis, taken for samples, is not that of the inputs"]


def _outputs(network: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Tensor:
    """All floating-point outputs in a row, in float64 if the network takes it."""

    def widen(value: Any) -> Any:
        is_real = isinstance(value, Tensor) and value.is_floating_point()
        return value.double() if is_real else value

    wide_args, wide_keywords = tree_map(widen, (args, dict(keywords)))
    try:
        output = run_network(copied(network).double(), wide_args, wide_keywords)
    except UserError:
        output = run_network(network, args, keywords)
    values = [v for v in tree_leaves(output) if isinstance(v, Tensor) and v.is_floating_point()]
    return torch.cat([value.flatten() for value in values])


def _new_norm(
    old: nn.Module, norm: NormDescription, factory: NormFactory, network: nn.Module
) -> tuple[nn.Module, list[str]]:
    """A site with a new norm and the old norm's tail, and the old tensors without a place there."""
    build = factory.tokens if norm.formula.is_last else factory
    site = build(norm.num_features, **norm.settings).train(old.training)
    lost = _carry_over(values_of(old, norm), site)
    if not norm.tail:
        return _like(old, network, site), lost
    new = SiteWithTail()
    new.add_module("site", _like(old, network, site))
    for name in norm.tail:
        new.add_module(name, old.get_submodule(name))
    return new, lost


def _evaluated_in_training(network: nn.Module) -> set[str]:
    """The paths of the modules that the network's train() leaves in evaluation mode."""
    modules = copied(network).train().named_modules()
    return {path for path, module in modules if not getattr(module, "training", True)}


def _like(old: nn.Module, network: nn.Module, new: nn.Module) -> nn.Module:
    """The new module on the device, and in the precision, of the old one or else its network."""
    tensors = (*old.parameters(), *old.buffers(), *network.parameters(), torch.ones(()))
    first = next(tensor for tensor in tensors if tensor.is_floating_point())
    return new.to(first.device, first.dtype)


def _put(new: Mapping[str, nn.Module], network: nn.Module) -> None:
    """Puts modules in place of those at their paths, at every path of a shared one."""
    by_old = {network.get_submodule(path): module for path, module in new.items()}
    for path, old in list(network.named_modules(remove_duplicate=False)):
        if old in by_old:
            network.set_submodule(path, by_old[old])


def _why_nothing(network: nn.Module, recognition: Recognition, missing: Sequence[str]) -> str:
    """Why no norm is replaced, or none of a class that `model.replace` names."""
    leaves = [module for module in network.modules() if not any(module.children())]
    has = _count_names((type(module).__name__ for module in leaves), most=8)
    if missing:
        name = missing[0]
        for module in recognition.left_alone.values():
            if module.class_name == name:
                return f"model.replace=[{name}]: {module.reason}"
        return f"model.replace: the network has no {name}; it has {has}"
    left_alone = describe_left_alone(recognition.left_alone)
    why = f"; left alone: {left_alone}" if left_alone else ""
    return (
        f"the network has no norm that is recognised (it has {has}{why}); build its norms from an "
        "argument `norm`"
    )


@torch.no_grad()
def _carry_over(values: State, site: Site) -> list[str]:
    """Copies gain, shift and running moments; returns the names of those that have no place.

    A weight is copied only to one that starts at one, a bias only to one that starts at zero. A
    norm with a warm-up or ramp keeps its own count of batches, which must start at 0.
    """
    tensors = tensors_of(site.norm)
    if isinstance(site.norm, HasRamp):
        tensors.pop(COUNT, None)
    lost = []
    for name, value in values.items():
        start = INITIAL_VALUES[name]
        fitting = []
        for path, tensor in tensors.items():
            has_role = path.rpartition(".")[2] == name and tensor.shape == value.shape
            must_be_new = name in ("weight", "bias")
            if has_role and (not must_be_new or bool((tensor == start).all())):
                fitting.append(tensor)
        if len(fitting) == 1:
            fitting[0].copy_(value)
        elif name != COUNT and bool(((value - start).abs() > TOLERANCE).any()):
            lost.append(name)
    return lost


def _count_names(names: Iterable[str], most: int | None = None) -> str:
    """`20 weight, 20 bias`; the `most` frequent ones."""
    counts = Counter(names)
    frequent = counts.items() if most is None else counts.most_common(most)
    return ", ".join(f"{count} {name}" for name, count in frequent)
