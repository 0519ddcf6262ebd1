"""The modules of a network, each run by itself on what reached it in one forward.

So they are known by what they compute: which normalize by running moments, which keep other state,
which mix samples, and which act otherwise in training.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from normexp.batching.copies import copied
from normexp.checks.probe import change, moves, unlike
from normexp.diagnosis.network import (
    Call,
    Loss,
    Modes,
    Subject,
    call_of,
    innermost,
    is_within,
    loss_on,
    num_samples,
    recording,
    set_modes,
    take,
    tensors_in,
)
from normexp.norms.moment_sites import NormSite, can_be_shown
from normexp.norms.site import named_sites

ROUNDING = 1e-6  # relative; state that moves an output by less is of no use to it


class Parts:
    """The called modules of a network.

    Attributes:
        model: a copy after one forward.
        calls: what each module was called with first, by path.
        moved: paths of the parameters, buffers and attributes that the forward changed.
    """

    def __init__(
        self, subject: Subject, batch: Any, loss: Loss, modes: Modes, *, learning: bool
    ) -> None:
        self.subject, self.num = subject, num_samples(batch)
        self.model = subject.fresh(modes)
        torch.manual_seed(0)
        with recording(self.model) as self.calls, torch.set_grad_enabled(learning):
            loss_on(self.model, batch, loss)
        self.calls.setdefault("", call_of(self.model, batch))
        by_copying = unlike(subject.fresh(modes), subject.model)
        self.moved = [p for p in unlike(self.model, subject.model) if p not in by_copying]

    def outputs(
        self, path: str, modes: Modes, *, learning: bool = False, call: Call | None = None
    ) -> list[Tensor]:
        """What a module returns in these modes, for what it was called with unless told."""
        torch.manual_seed(0)
        with torch.set_grad_enabled(learning):
            return tensors_in((call or self.calls[path])(self.subject.fresh(modes, path)))

    def mixing(self, modes: Modes) -> list[str]:
        """The innermost modules in which a sample's output depends on other samples."""
        return innermost(path for path in self.calls if self.mixes(path, modes))

    def mixes(self, path: str, modes: Modes, *, learning: bool = False) -> bool:
        call, middle = self.calls[path], self.num // 2
        alike = Call(*take((call.args, call.kwargs), [middle] * self.num, self.num))
        before = self.outputs(path, modes, learning=learning)
        after = self.outputs(path, modes, learning=learning, call=alike)
        return any(
            moves(old[middle], new[middle])
            for old, new in zip(before, after, strict=True)
            if old.ndim and len(old) == self.num
        )

    def acts_in_training(self, path: str) -> bool:
        training = self.outputs(path, self.subject.training, learning=True)
        return differ(training, self.outputs(path, self.subject.silent))

    # --- Running moments -------------------------------------------------------------------------

    @torch.no_grad()
    def sites(self) -> dict[str, NormSite]:
        """By path, the norms with batch statistics in training and running ones in evaluation."""
        modules, found = self.subject.modules, dict[str, NormSite]()
        sites = named_sites(self.subject.model)
        entries = {id(module): name for name, site in sites for module in site.modules()}
        for path, module in modules.items():
            entry = self._called(entries.get(id(module), path))
            around = modules[entry]
            if entry in found or isinstance(around, torch.jit.ScriptModule):
                continue
            for mean, var in permutations(_untrained(module), 2):
                site = NormSite(entry or "the model", module, around, True, True, mean, var)
                if self._normalizes_by(site, entry):
                    found[entry] = site
                    break
        active = {path: site for path, site in found.items() if self.acts_in_training(path)}
        for path, site in active.items():
            site.pools_samples = self.mixes(path, self.subject.training, learning=True)
        return active

    def _called(self, path: str) -> str:
        """The innermost called module around one, which may be this one."""
        while path not in self.calls:
            path = path.rpartition(".")[0]
        return path

    def _normalizes_by(self, site: NormSite, path: str) -> bool:
        x, *_ = tensors_in((self.calls[path].args, self.calls[path].kwargs))
        if x.ndim < 2 or not x.is_floating_point():
            return False
        sizes = {getattr(site.norm, name).numel() for name in (site.mean, site.var)}
        if sizes != {site.maps(x).shape[1]}:
            return False
        site = copied(site, self.subject.fixed)
        set_modes(site.entry, self.subject.silent, path)
        return can_be_shown(site, x)

    def momentum(self, path: str, site: NormSite) -> float | None:
        """The weight of a new value in the running mean; None if that is not constant."""
        named, trained, call = getattr(site.norm, "momentum", 0), copied(site), self.calls[path]
        set_modes(trained.entry, self.subject.training, path)
        call(trained.entry)
        batch = site.pooled(site.of_samples(tensors_in((call.args, call.kwargs))[0], None)).mean
        moved, far = trained.running[0] - site.running[0], batch - site.running[0]
        weight = float((moved * far).sum() / far.square().sum())
        fits = bool((moved - weight * far).norm() <= 0.05 * moved.norm())
        return weight if fits and named is not None else named

    # --- State of another kind -------------------------------------------------------------------

    @torch.no_grad()
    def unknown(self, sites: Collection[str]) -> dict[str, list[str]]:
        """Modules with running state of another kind, and the paths whose mode decides how it acts.

        State is what the forward moved and an evaluation depends on.
        """
        silent, names = self.subject.silent, dict[str, list[str]]()
        for owner, _, name in (moved.rpartition(".") for moved in self.moved):
            if not any(is_within(owner, path) for path in sites):
                names.setdefault(owner, []).append(name)
        before, found = self.outputs("", silent), dict[str, list[str]]()
        for owner in names:
            model = self.subject.fresh(silent)
            trained, own = (dict(m.named_modules())[owner] for m in (self.model, model))
            for name in names[owner]:
                setattr(own, name, copied(getattr(trained, name)))
            torch.manual_seed(0)
            if differ(before, tensors_in(self.calls[""](model))):
                user = self._called(owner)  # whose forward uses the state
                found[owner] = [p for p in silent if is_within(owner, p) and is_within(p, user)]
        return found


def differ(outputs: list[Tensor], others: list[Tensor]) -> bool:
    """True beyond rounding."""
    return any(change(*pair) > ROUNDING for pair in zip(outputs, others, strict=False))


def _untrained(module: nn.Module) -> list[str]:
    """The names of the floating-point tensors of a module that no optimizer moves."""
    named = {**dict(module.named_buffers(recurse=False)), **vars(module)}
    named |= dict(module.named_parameters(recurse=False))
    return [
        name
        for name, value in named.items()
        if isinstance(value, Tensor)
        and value.is_floating_point()
        and not (isinstance(value, nn.Parameter) and value.requires_grad)
    ]
