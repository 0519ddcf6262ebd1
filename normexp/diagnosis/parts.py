"""The modules of a network, each run by itself on what reached it in one training forward.

So they are known by what they compute: which normalize by running moments, which keep other state,
which mix samples, and which act otherwise in training.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from normexp.batching.copies import copied
from normexp.checks.probe import change, moves, unlike, values_of
from normexp.diagnosis.network import (
    Call,
    Loss,
    call_of,
    hooked,
    innermost,
    is_within,
    loss_on,
    num_samples,
    take,
    tensors_in,
)
from normexp.diagnosis.result import ROOT
from normexp.errors import UserError
from normexp.norms.moment_sites import NormSite, can_be_shown
from normexp.norms.site import named_sites
from normexp.words import name_some

ROUNDING = 1e-6  # relative; state that moves an output by less is of no use to it


class Modes(NamedTuple):
    """The paths of the modules in training mode, and whether gradients are taken."""

    training: frozenset[str]
    learning: bool


SILENT = Modes(frozenset(), False)


class Parts:
    """A copy of the user's model that is never run: each forward gets a fresh copy of this one.

    Attributes:
        modules: of the copy, by path.
        training: the modes in which the model is trained: as they are, or after `train()` if it
            was handed over in evaluation mode.
        evaluation: the modes in which it is evaluated: as they are, or after `eval()`.
        trained, evaluated: copies after one forward.
        calls: what each module was called with first in training, by path.
        fixed: weights that no forward moves, which all copies share.
    """

    def __init__(self, model: nn.Module, batch: Any, loss: Loss) -> None:
        self.model, self.trained, self.evaluated = copied(model), copied(model), copied(model)
        if model.training:
            self.evaluated.eval()
        else:
            self.trained.train()
        self.training = Modes(_in_training(self.trained), True)
        self.evaluation = Modes(_in_training(self.evaluated), False)
        self.modules = dict(self.model.named_modules())
        self.num, self.criterion = num_samples(batch), loss
        self.calls: dict[str, Call] = {}
        with hooked(model, _refuse):
            with hooked(self.trained, self._record):
                self.loss(self.trained, batch, self.training)
            self.loss(self.evaluated, batch, self.evaluation)
        self.calls.setdefault("", call_of(model, batch))
        moved = unlike(self.trained, self.model) + unlike(self.evaluated, self.model)
        named = self.model.named_parameters()
        self.fixed = [p for name, p in named if p.requires_grad and name not in moved]

    def _record(self, path: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        call = tree_map_only(Tensor, lambda t: t.detach().clone(), (args, kwargs))
        self.calls.setdefault(path, call)

    def fresh(self, modes: Modes, path: str = "") -> nn.Module:
        """A copy of the module at a path, in these modes."""
        return set_modes(copied(self.modules[path], self.fixed), modes, path)

    def loss(self, model: nn.Module, batch: Any, modes: Modes, seed: int = 0) -> float:
        torch.manual_seed(seed)
        with torch.set_grad_enabled(modes.learning):
            return loss_on(model, batch, self.criterion).item()

    # --- What a module computes ------------------------------------------------------------------

    def run(self, module: nn.Module, call: Call, modes: Modes, seed: int = 0) -> list[Tensor]:
        args, kwargs = call
        torch.manual_seed(seed)
        with torch.set_grad_enabled(modes.learning):
            return tensors_in(module(*args, **kwargs))

    def outputs(self, path: str, modes: Modes, call: Call | None = None) -> list[Tensor]:
        """What a module returns in these modes; without a `call`, for what it was called with."""
        return self.run(self.fresh(modes, path), call or self.calls[path], modes)

    def mixes(self, path: str, modes: Modes) -> bool:
        """True if a sample's output depends on the other samples."""
        middle = self.num // 2
        alike = take(self.calls[path], [middle] * self.num, self.num)
        pairs = zip(self.outputs(path, modes), self.outputs(path, modes, alike), strict=True)
        return any(
            moves(before[middle], after[middle])
            for before, after in pairs
            if before.ndim and len(before) == self.num
        )

    def mixing(self, modes: Modes) -> list[str]:
        """The innermost modules that mix samples."""
        return innermost(path for path in self.calls if self.mixes(path, modes))

    def acts_in_training(self, path: str) -> bool:
        return differ(self.outputs(path, self.training), self.outputs(path, SILENT))

    def varies_in_evaluation(self) -> str:
        """Says so if two evaluations of one batch differ."""
        again = self.run(self.evaluated, self.calls[""], self.evaluation, seed=1)
        if not differ(self.outputs("", self.evaluation), again):
            return ""
        moved = name_some(unlike(self.evaluated, self.model))
        return "two forwards of one batch differ" + (f", and one changes {moved}" if moved else "")

    def up_to_called(self, path: str) -> list[str]:
        """A module and those around it, up to the innermost that is called."""
        paths = [path]
        while paths[-1] not in self.calls:
            paths.append(paths[-1].rpartition(".")[0])
        return paths

    # --- Running state ---------------------------------------------------------------------------

    @torch.no_grad()
    def sites(self) -> dict[str, NormSite]:
        """By path, the norms with batch statistics in training and running ones in evaluation."""
        found: dict[str, NormSite] = {}
        own_sites = named_sites(self.model)
        entries = {module: name for name, site in own_sites for module in site.modules()}
        for path, module in self.modules.items():
            entry = self.up_to_called(entries.get(module, path))[-1]
            for mean, var in permutations(_untrained(module), 2):
                around = self.modules[entry]
                site = NormSite(entry or ROOT, module, around, True, True, mean, var)
                if entry not in found and self._is_active(site, entry):
                    site.pools_samples = self.mixes(entry, self.training)
                    found[entry] = site
        return found

    def _is_active(self, site: NormSite, path: str) -> bool:
        """True if the module at a path evaluates by these moments, and trains otherwise."""
        inputs = tensors_in(self.calls[path])
        is_scripted = isinstance(site.entry, torch.jit.ScriptModule)
        if is_scripted or not inputs or not inputs[0].is_floating_point():
            return False
        site = copied(site, self.fixed)
        set_modes(site.entry, SILENT, path)
        return can_be_shown(site, inputs[0]) and self.acts_in_training(path)

    def unknown(self, sites: Collection[str]) -> dict[str, list[str]]:
        """Modules with running state of another kind, and the paths whose mode decides how it acts.

        State is what a training forward moved and an evaluation depends on.
        """
        found: dict[str, list[str]] = {}
        before = self.outputs("", SILENT)
        for moved in unlike(self.trained, self.model):
            owner, _, name = moved.rpartition(".")
            if owner in found or is_within(owner, *sites):
                continue
            model = self.fresh(SILENT)
            trained, own = (dict(part.named_modules())[owner] for part in (self.trained, model))
            setattr(own, name, copied(getattr(trained, name)))
            if differ(before, self.run(model, self.calls[""], SILENT)):
                found[owner] = self.up_to_called(owner)
        return found


def _in_training(model: nn.Module) -> frozenset[str]:
    """The paths of modules in training mode; one frozen by TorchScript evaluates."""
    modules = model.named_modules()
    return frozenset(path for path, module in modules if getattr(module, "training", False))


def set_modes(module: nn.Module, modes: Modes, path: str = "") -> nn.Module:
    """Sets the mode of the module at `path` and of all inside; returns it."""
    for name, part in module.named_modules(prefix=path):
        if hasattr(part, "training"):
            part.training = name in modes.training
    return module


def differ(outputs: list[Tensor], others: list[Tensor]) -> bool:
    """True beyond rounding."""
    return any(change(*pair) > ROUNDING for pair in zip(outputs, others, strict=False))


def _refuse(path: str, *_: Any) -> None:
    """Called where a function that a copy still holds runs the user's own modules."""
    raise UserError(
        f"a function inside the model holds its module {path or 'itself'}, so a copy would run the "
        f"original; let it be a method that uses self{path and '.'}{path}"
    )


def _untrained(module: nn.Module) -> list[str]:
    """The names of the floating-point tensors of a module that no optimizer moves."""
    return [
        name
        for name, value in values_of(module).items()
        if isinstance(value, Tensor) and value.is_floating_point() and not value.requires_grad
    ]
