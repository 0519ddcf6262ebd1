"""Puts sites in place of the norms of a network that was built without a norm factory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from normexp.any_network.carry_over import put, put_norms
from normexp.any_network.description import NormDescription
from normexp.any_network.recognise import LeftAlone, Recognition
from normexp.any_network.trial import Inputs, run_network
from normexp.errors import UserError
from normexp.norms.factory import NormFactory
from normexp.norms.site import Site, named_sites
from normexp.training.batching.copies import copied
from normexp.words import name_some

# Of torch's transformers: else they read the weights of a LayerNorm, and normalize by themselves.
FAST_PATHS = ("activation_relu_or_gelu", "use_nested_tensor")


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
            did = "kept" if self.keeps_norms else "replaced"
            yield f"{did} {_count_names(self.classes.values())}: {name_some(self.classes)}"
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


def put_sites(
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
    left_alone = dict(recognition.left_alone)
    if only is not None:
        left_alone = {p: other for p, other in left_alone.items() if other.class_name in only}
    surgery = Surgery(left_alone, factory.keeps_norms)
    anew: dict[str, NormDescription] = {}
    around: dict[str, nn.Module] = {}
    evaluated = set[str]() if factory.keeps_norms else _evaluated_in_training(network)
    for path, old in network.named_modules():
        class_name = type(old).__name__
        if only is not None and class_name not in only:
            continue
        norm = recognition.norms.get(path)
        other = recognition.left_alone.get(path)
        if norm is not None and not factory.keeps_norms:
            anew[path] = norm
        elif norm is not None:
            around[path] = factory.around(old, is_last=norm.formula.is_last)
        elif factory.keeps_norms and other and other.resembles_norm and other.is_called:
            around[path] = factory.around(old, is_last=False)
            left_alone.pop(path, None)
        else:
            continue
        surgery.classes[path] = class_name
        stop_splitting(old)  # in its place, the new site does
    surgery.unused_slots = [f"{slot}={value}" for slot, value in factory.changed_slots().items()]
    missing = sorted(set(only or ()) - set(surgery.classes.values()))
    if missing or not surgery.classes:
        raise UserError(_why_nothing(network, recognition, missing))
    put(around, network)
    carried = put_norms(network, anew, lambda _: factory)
    surgery.lost, surgery.frozen = carried.lost, carried.frozen
    if evaluated:
        evaluated -= _evaluated_in_training(network)
        surgery.unfrozen = [path for path in surgery.classes if path in evaluated]
    # A norm may need its output for its gradient.
    _switch_off(network, ["inplace"] if factory.keeps_norms else ["inplace", *FAST_PATHS])
    return surgery


def _switch_off(network: nn.Module, switches: Sequence[str]) -> None:
    for module in network.modules():
        for switch in switches:
            if hasattr(module, switch):
                setattr(module, switch, False)


def stop_splitting(network: nn.Module) -> None:
    """Lets the sites in a network normalize all samples of a forward together."""
    for _, site in named_sites(network):
        site.norm_batch_size = site.order = None


def check_called(network: nn.Module, inputs: Inputs) -> None:
    """Runs a network in both modes, without a split of its batch.

    Raises UserError if a forward fails, or never calls a site.
    """
    network = copied(network)
    names = {site: name for name, site in named_sites(network)}
    called: set[Site] = set()
    running: list[Site] = []  # the site in which a forward fails

    def enter(site: Site, _: Any) -> None:
        called.add(site)
        running.append(site)

    def leave(*_: Any) -> None:
        running.pop()

    for site in names:
        site.norm_batch_size = None
        site.register_forward_pre_hook(enter)
        site.register_forward_hook(leave)
    for training in (True, False):
        try:
            run_network(network.train(training), inputs)
        except UserError as error:
            where = f"norm at {names[running[-1]]}: " if running else ""
            raise UserError(f"{where}{error}") from error
    if idle := sorted(name for site, name in names.items() if site not in called):
        raise UserError(f"the new norm at {name_some(idle)} is never called; use norm=as_built")


def _evaluated_in_training(network: nn.Module) -> set[str]:
    """The paths of the modules that the network's train() leaves in evaluation mode."""
    modules = copied(network).train().named_modules()
    return {path for path, module in modules if not getattr(module, "training", True)}


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
        "argument `norm`, or keep them by norm=as_built"
    )


def _count_names(names: Iterable[str], most: int | None = None) -> str:
    """`20 weight, 20 bias`; the `most` frequent ones."""
    counts = Counter(names)
    frequent = counts.items() if most is None else counts.most_common(most)
    return ", ".join(f"{count} {name}" for name, count in frequent)
