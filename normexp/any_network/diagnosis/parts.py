"""Runs each module of a network by itself, on what reached it in one training forward.

Finds by what they compute the modules that normalize by running moments, keep other running state,
mix samples, or act differently in training.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import permutations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normexp.any_network.control import Untried, find_control
from normexp.any_network.diagnosis.batches import (
    Call,
    Loss,
    call_of,
    loss_on,
)
from normexp.any_network.diagnosis.result import ROOT
from normexp.any_network.trial import Inputs, agree, attributes_of, differing_values
from normexp.errors import UserError
from normexp.norms.moment_sites import MomentSite, can_be_shown
from normexp.norms.samples import (
    Axis,
    SampleCounter,
    SampleOrder,
    axis_in,
    count_samples,
    map_tensors,
    take_samples,
    tensors_in,
    usual_axis,
)
from normexp.norms.site import named_sites
from normexp.training.batching.copies import copied
from normexp.words import name_some

FEW = 16  # samples on which modules are looked at one by one
ROUNDING = 1e-6  # relative; state that moves an output by less is of no use to it
MIXING = 1e-4  # relative; samples that move an output of another one by less do not mix
SMALL = 1e-6  # values below are compared on this scale


@contextmanager
def hooked(model: nn.Module, hook: Callable[..., None]) -> Iterator[None]:
    """Calls `hook(path, module, args, kwargs)` before each module runs, TorchScript's excepted."""
    with ExitStack() as hooks:
        for path, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                handle = module.register_forward_pre_hook(partial(hook, path), with_kwargs=True)
                hooks.callback(handle.remove)
        yield


def is_within(path: str, *outer: str) -> bool:
    """True if a module's path is one of `outer`, or below one of them."""
    return any(not name or f"{path}.".startswith(f"{name}.") for name in outer)


def innermost(paths: Iterable[str]) -> list[str]:
    """The paths that have no other of `paths` below them."""
    paths = list(paths)
    found: list[str] = []
    for path in paths:
        inside = [other for other in paths if other != path and is_within(other, path)]
        if not inside:
            found.append(path)
    return found


class Modes(NamedTuple):
    """The paths of the modules in training mode, and whether gradients are taken."""

    training: frozenset[str]
    learning: bool


SILENT = Modes(frozenset(), learning=False)


class Parts:
    """A copy of the user's model that is never run: each forward gets a fresh copy of this one.

    Attributes:
        axis: of the model's inputs, that of samples.
        batch, num: the samples on which its modules are run, and how many these are: a few, or all
            if the model does not take fewer.
        takes_gradients: its forward takes some also in evaluation, as those of an energy.
        modules: of the copy, by path.
        paths: of these modules.
        training: the modes in which the model is trained: as they are, or after `train()` if it
            was handed over in evaluation mode.
        evaluation: the modes in which it is evaluated: as they are, or after `eval()`.
        trained, evaluated: copies after one forward.
        calls: what each module was called with first in training, by path.
        autocasts: the automatic precision in which it was called, by path.
        fixed: weights that no forward changes, which all copies share.
    """

    def __init__(self, model: nn.Module, batch: Any, loss: Loss) -> None:
        self.axis = axis_of_samples(model, batch)
        num = count_samples(batch, self.axis)
        self.model = copied(model)
        self.modules = dict(self.model.named_modules())
        self.paths = {module: path for path, module in self.modules.items()}
        self.criterion = loss
        few = take_samples(batch, slice(FEW), num=num, axis=self.axis)
        problems: list[UserError] = []
        for self.batch, self.takes_gradients in product((few, batch), (False, True)):
            try:
                self._run_both_modes(model)
                break
            except UserError as error:
                problems.append(error)
        else:
            raise problems[-1]
        self.num = count_samples(self.batch, self.axis)
        self.calls.setdefault("", call_of(model, self.batch))
        moved = differing_values(self.trained, self.model)
        moved += differing_values(self.evaluated, self.model)
        self.fixed = [
            parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and name not in moved
        ]

    def _run_both_modes(self, model: nn.Module) -> None:
        """Runs copies, in training with all calls recorded."""
        self.trained = copied(model)
        self.evaluated = copied(model)
        if model.training:
            self.evaluated.eval()
        else:
            self.trained.train()
        self.training = Modes(_in_training(self.trained), learning=True)
        self.evaluation = Modes(_in_training(self.evaluated), learning=False)
        self.calls: dict[str, Call] = {}
        self.autocasts: dict[str, torch.autocast] = {}
        with hooked(model, _refuse):
            with hooked(self.trained, self._record):
                self.loss(self.trained, self.batch, self.training)
            self.loss(self.evaluated, self.batch, self.evaluation)

    def _record(self, path: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        call = map_tensors((args, kwargs), lambda tensor: tensor.detach().clone())
        self.calls.setdefault(path, call)
        device = tensors_in(call)[0].device.type if tensors_in(call) else "cpu"
        autocast = torch.autocast(
            device,
            dtype=torch.get_autocast_dtype(device),
            enabled=torch.is_autocast_enabled(device),
        )
        self.autocasts.setdefault(path, autocast)

    def fresh(self, modes: Modes, path: str = "") -> nn.Module:
        """A copy of the module at a path, in these modes."""
        return set_modes(copied(self.modules[path], self.fixed), modes, path)

    def loss(self, model: nn.Module, batch: Any, modes: Modes, seed: int = 0) -> float:
        torch.manual_seed(seed)
        with torch.set_grad_enabled(modes.learning or self.takes_gradients):
            return loss_on(model, batch, self.criterion).item()

    # --- What a module computes ------------------------------------------------------------------

    def run(self, module: nn.Module, call: Call, modes: Modes, seed: int = 0) -> list[Tensor]:
        """The outputs of a module; none if it does not run alone.

        For example, the module around it may set attributes of it in each forward.
        """
        args, kwargs = call
        torch.manual_seed(seed)
        try:
            with torch.set_grad_enabled(modes.learning or self.takes_gradients):
                return tensors_in(module(*args, **kwargs))
        except Exception:  # foreign code may raise anything
            return []

    def outputs(self, path: str, modes: Modes, call: Call | None = None) -> list[Tensor]:
        """The outputs of a module in these modes, for `call` or what it was called with."""
        with self.autocasts.get(path, nullcontext()):
            return self.run(self.fresh(modes, path), call or self.calls[path], modes)

    def mixes(self, path: str, modes: Modes) -> bool:
        """True if a sample's output depends on the other samples."""
        return self._mixes(path, modes, self.num, self.axis)

    def mixes_rows(self, path: str, modes: Modes) -> bool:
        """True if an output of a module depends on others along the first axis of its input."""
        return self._mixes(path, modes, len(tensors_in(self.calls[path])[0]), 0)

    def _mixes(self, path: str, modes: Modes, num: int, axis: Axis) -> bool:
        middle = num // 2
        all_alike = take_samples(self.calls[path], [middle] * num, num=num, axis=axis)
        before = self.outputs(path, modes)
        after = self.outputs(path, modes, all_alike)
        for old, new in zip(before, after, strict=False):
            own_axis = axis_in(old, num, axis)
            if own_axis is None or old.shape != new.shape:  # such as the boxes of an image
                continue
            own_before, own_after = (out.select(own_axis, middle) for out in (old, new))
            if not agree(own_before, own_after, MIXING, SMALL):
                return True
        return False

    def mixing(self, modes: Modes) -> list[str]:
        """The innermost modules that mix samples."""
        return innermost(path for path in self.calls if self.mixes(path, modes))

    def acts_in_training(self, path: str) -> bool:
        return differ(self.outputs(path, self.training), self.outputs(path, SILENT))

    def acts_by_own_mode(self, path: str) -> bool:
        """True if its own mode, and not that of a module inside, changes its outputs."""
        alone = Modes(self.training.training & {path}, learning=False)
        return differ(self.outputs(path, alone), self.outputs(path, SILENT))

    def varies(self, modes: Modes) -> str:
        """Says how two forwards of one batch differ; "" if they agree."""
        model = self.fresh(modes)
        first = self.run(model, self.calls[""], modes)
        again = self.run(model, self.calls[""], modes, seed=1)
        if not differ(first, again):
            return ""
        said = "two forwards of one batch differ"
        moved = name_some(differing_values(model, self.model))
        return f"{said}, and one changes {moved}" if moved else said

    def up_to_called(self, path: str) -> list[str]:
        """A module and those around it, up to the innermost that is called."""
        paths = [path]
        while paths[-1] not in self.calls:
            paths.append(paths[-1].rpartition(".")[0])
        return paths

    # --- Running state ---------------------------------------------------------------------------

    @torch.no_grad()
    def sites(self) -> dict[str, MomentSite]:
        """By path, the norms with batch statistics in training and running ones in evaluation."""
        found: dict[str, MomentSite] = {}
        entries: dict[nn.Module, str] = {}  # the path of the `Site` that holds a module
        for name, own_site in named_sites(self.model):
            entries |= dict.fromkeys(own_site.modules(), name)
        for path, module in self.modules.items():
            entry = self.up_to_called(entries.get(module, path))[-1]
            for mean, var in permutations(_untrained(module), 2):
                around = self.modules[entry]
                site = MomentSite(entry or ROOT, module, around, True, True, mean, var)
                if entry not in found and self._is_active(site, entry):
                    site.pools_samples = self.mixes_rows(entry, self.training)
                    found[entry] = site
        if found:
            self._find_orders(found)
        return found

    def _find_orders(self, sites: Mapping[str, MomentSite]) -> None:
        """Tells sites where the samples are in their inputs, if that can be tried."""
        inputs = Inputs(*call_of(self.model, self.batch))
        control = find_control(self.model, [*sites], inputs, 1, [self.axis])
        if isinstance(control, Untried):
            return
        counter = SampleCounter(control.axis)
        counter.watch(self.model)
        for path, order in control.find_orders().items():
            if order is not None:
                sites[path].order = SampleOrder(order, counter)

    def _is_active(self, site: MomentSite, path: str) -> bool:
        """True if the module at a path evaluates by these moments, and trains otherwise."""
        inputs = tensors_in(self.calls[path])
        is_scripted = isinstance(site.entry, torch.jit.ScriptModule)
        if is_scripted or not inputs or not inputs[0].is_floating_point():
            return False
        site = copied(site, self.fixed)
        set_modes(site.entry, SILENT, path)
        return can_be_shown(site, inputs[0]) and self.acts_in_training(path)

    def moved_by_training(self, site: MomentSite, **settings: Any) -> bool:
        """True if a forward in training mode moves the running averages of a site.

        Args:
            settings: attributes that the norm gets first.
        """
        entry, copy = copied((site.entry, site), self.fixed)
        for name, value in settings.items():
            if not hasattr(copy.norm, name):
                return False
            setattr(copy.norm, name, value)
        path = self.paths[site.entry]
        before = [running.clone() for running in copy.running]
        with self.autocasts.get(path, nullcontext()):
            self.run(set_modes(entry, self.training, path), self.calls[path], self.training)
        return not all(map(torch.equal, before, copy.running))

    def unknown(self, sites: Collection[str]) -> dict[str, list[str]]:
        """Modules with running state of another kind, and the paths whose mode decides how it acts.

        State is what a training forward moved and an evaluation depends on.
        """
        moved: dict[str, list[str]] = {}  # names of state by the path of its module
        for path in differing_values(self.trained, self.model):
            owner, _, name = path.rpartition(".")
            if not is_within(owner, *sites):
                moved.setdefault(owner, []).append(name)
        found: dict[str, list[str]] = {}
        before = self.outputs("", SILENT)
        trained = dict(self.trained.named_modules())
        for owner, names in moved.items():  # together, since a scale may need its zero point
            model = self.fresh(SILENT)
            module = dict(model.named_modules())[owner]
            for name in names:
                setattr(module, name, copied(getattr(trained[owner], name)))
            if differ(before, self.run(model, self.calls[""], SILENT)):
                found[owner] = self.up_to_called(owner)
        return found


def axis_of_samples(model: nn.Module, batch: Any) -> Axis:
    """The axis of a model's inputs along which each sample is handled by itself, in evaluation.

    The usual one, if none is or that cannot be tried.
    """
    call = call_of(model, batch)
    control = find_control(model, [], Inputs(*call), size=1)
    return usual_axis(call) if isinstance(control, Untried) else control.axis


def _in_training(model: nn.Module) -> frozenset[str]:
    """The paths of modules in training mode; modules frozen by TorchScript have no mode."""
    modules = model.named_modules()
    return frozenset(path for path, module in modules if getattr(module, "training", False))


def set_modes(module: nn.Module, modes: Modes, path: str = "") -> nn.Module:
    """Sets the mode of the module at `path` and of all inside; returns it."""
    for name, child in module.named_modules(prefix=path):
        if hasattr(child, "training"):
            child.training = name in modes.training
    return module


def differ(outputs: list[Tensor], others: list[Tensor]) -> bool:
    """True beyond rounding, or if there are more of one."""
    if len(outputs) != len(others):
        return True
    pairs = zip(outputs, others, strict=True)
    return not all(agree(output, other, ROUNDING, SMALL) for output, other in pairs)


def _refuse(path: str, *_: Any) -> None:
    """Refuses a model with a function that still runs the original modules from inside a copy."""
    raise UserError(
        f"a function inside the model holds its module {path or 'itself'}, so a copy would run the "
        f"original; let it be a method that uses self{path and '.'}{path}"
    )


def _untrained(module: nn.Module) -> list[str]:
    """The names of the floating-point tensors of a module that no optimizer moves."""
    return [
        name
        for name, value in attributes_of(module).items()
        if isinstance(value, Tensor) and value.is_floating_point() and not value.requires_grad
    ]
