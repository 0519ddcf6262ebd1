"""The modules of a network, each run by itself on what reached it in one training forward.

So they are known by what they compute: which normalize by running moments, which keep other state,
which mix samples, and which act otherwise in training.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normexp.batching.copies import copied
from normexp.checks.probe import change, moves, unlike
from normexp.diagnosis.network import (
    Call,
    Loss,
    call_of,
    hooked,
    innermost,
    is_within,
    loss_on,
    map_tensors,
    num_samples,
    take,
    tensors_in,
)
from normexp.errors import UserError
from normexp.norms.moment_sites import NormSite, can_be_shown
from normexp.norms.site import named_sites

ROUNDING = 1e-6  # relative; state that moves an output by less is of no use to it


class Modes(NamedTuple):
    """`training` of every module by its path, and whether gradients are taken."""

    training: Mapping[str, bool]
    learning: bool


class Parts:
    """A copy of the user's model that is never run: each forward gets a fresh copy of this one.

    Attributes:
        modules: of the copy, by path.
        training: the modes in which the model is trained: as they are, or after `train()` if it
            was handed over in evaluation mode.
        evaluation: the modes in which it is evaluated: as they are, or after `eval()`.
        silent: every module in evaluation mode.
        trained, evaluated: copies after one forward.
        calls: what each module was called with first in training, by path.
        fixed: weights that no forward moves, which all copies share.
    """

    def __init__(self, model: nn.Module, batch: Any, loss: Loss) -> None:
        self.model, other = copied(model), copied(model)
        self.modules, self.num = dict(self.model.named_modules()), num_samples(batch)
        other.train(not model.training)
        modes = _modes_of(model), _modes_of(other)
        training, evaluation = modes if model.training else modes[::-1]
        self.training, self.evaluation = Modes(training, True), Modes(evaluation, False)
        self.silent = Modes(dict.fromkeys(training, False), False)
        self.fixed: list[nn.Parameter] = []
        self.calls: dict[str, Call] = {}
        with hooked(model, _refuse):
            self.trained, self.evaluated = self.fresh(self.training), self.fresh(self.evaluation)
            with hooked(self.trained, self._record):
                self.loss(self.trained, batch, loss, self.training)
            self.loss(self.evaluated, batch, loss, self.evaluation)
        self.calls.setdefault("", call_of(model, batch))
        moved = unlike(self.trained, self.model) + unlike(self.evaluated, self.model)
        named = self.model.named_parameters()
        self.fixed = [p for name, p in named if p.requires_grad and name not in moved]

    def _record(self, path: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        if path not in self.calls:
            self.calls[path] = map_tensors(lambda t: t.detach().clone(), (args, kwargs))

    def fresh(self, modes: Modes, path: str = "") -> nn.Module:
        """A copy of the module at a path, in these modes."""
        return set_modes(copied(self.modules[path], self.fixed), modes, path)

    @staticmethod
    def loss(model: nn.Module, batch: Any, loss: Loss, modes: Modes, seed: int = 0) -> float:
        torch.manual_seed(seed)
        with torch.set_grad_enabled(modes.learning):
            return loss_on(model, batch, loss).item()

    # --- What a module computes ------------------------------------------------------------------

    def run(self, module: nn.Module, call: Call, modes: Modes, seed: int = 0) -> list[Tensor]:
        args, kwargs = call
        torch.manual_seed(seed)
        with torch.set_grad_enabled(modes.learning):
            return tensors_in(module(*args, **kwargs))

    def outputs(self, path: str, modes: Modes) -> list[Tensor]:
        """What a module returns in these modes, for what it was called with."""
        return self.run(self.fresh(modes, path), self.calls[path], modes)

    def mixes(self, path: str, modes: Modes) -> bool:
        """True if a sample's output depends on the other samples."""
        middle = self.num // 2
        alike = take(self.calls[path], [middle] * self.num, self.num)
        before, after = self.outputs(path, modes), self.run(self.fresh(modes, path), alike, modes)
        return any(
            moves(old[middle], new[middle])
            for old, new in zip(before, after, strict=True)
            if old.ndim and len(old) == self.num
        )

    def mixing(self, modes: Modes) -> list[str]:
        """The innermost modules that mix samples."""
        return innermost(path for path in self.calls if self.mixes(path, modes))

    def acts_in_training(self, path: str) -> bool:
        return differ(self.outputs(path, self.training), self.outputs(path, self.silent))

    def called(self, path: str) -> str:
        """The innermost called module around one, which may be this one."""
        while path not in self.calls:
            path = path.rpartition(".")[0]
        return path

    # --- Running state ---------------------------------------------------------------------------

    @torch.no_grad()
    def sites(self) -> dict[str, NormSite]:
        """By path, the norms with batch statistics in training and running ones in evaluation."""
        found: dict[str, NormSite] = {}
        sites = named_sites(self.model)
        entries = {id(module): name for name, site in sites for module in site.modules()}
        for path, module in self.modules.items():
            entry = self.called(entries.get(id(module), path))
            around = self.modules[entry]
            if entry in found or isinstance(around, torch.jit.ScriptModule):
                continue
            for mean, var in permutations(_untrained(module), 2):
                site = NormSite(entry or "the model", module, around, True, True, mean, var)
                if self._normalizes_by(site, entry):
                    found[entry] = site
                    break
        active = {path: site for path, site in found.items() if self.acts_in_training(path)}
        for path, site in active.items():
            site.pools_samples = self.mixes(path, self.training)
        return active

    def _normalizes_by(self, site: NormSite, path: str) -> bool:
        x = next(iter(tensors_in(self.calls[path])), None)
        if x is None or not x.is_floating_point():
            return False
        site = copied(site, self.fixed)
        set_modes(site.entry, self.silent, path)
        return can_be_shown(site, x)

    def unknown(self, sites: Collection[str]) -> dict[str, list[str]]:
        """Modules with running state of another kind, and the paths whose mode decides how it acts.

        State is what a training forward moved and an evaluation depends on.
        """
        before, found = self.outputs("", self.silent), dict[str, list[str]]()
        for moved in unlike(self.trained, self.model):
            owner, _, name = moved.rpartition(".")
            if owner in found or is_within(owner, *sites):
                continue
            model = self.fresh(self.silent)
            trained, own = (dict(m.named_modules())[owner] for m in (self.trained, model))
            setattr(own, name, copied(getattr(trained, name)))
            if differ(before, self.run(model, self.calls[""], self.silent)):
                user = self.called(owner)  # whose forward uses the state
                around = [path for path in self.modules if is_within(owner, path)]
                found[owner] = [path for path in around if is_within(path, user)]
        return found


def set_modes(module: nn.Module, modes: Modes, path: str = "") -> nn.Module:
    """Sets the mode of the module at `path` and of all inside; returns it."""
    for name, part in module.named_modules():
        if hasattr(part, "training"):
            part.training = modes.training[f"{path}.{name}".strip(".")]
    return module


def _modes_of(model: nn.Module) -> dict[str, bool]:
    """The present mode of every module; one frozen by TorchScript evaluates."""
    return {name: getattr(module, "training", False) for name, module in model.named_modules()}


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
    named = {**dict(module.named_buffers(recurse=False)), **vars(module)}
    named |= {n: p for n, p in module.named_parameters(recurse=False) if not p.requires_grad}
    return [
        name
        for name, value in named.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    ]
