"""Builds the norm that a config names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

from torch import nn

from normexp.errors import UserError
from normexp.norms.adapt import foreign_factory
from normexp.norms.factory import AsBuilt, NormFactory, is_shipped
from normexp.norms.running import NUM_TRAINING_STEPS
from normexp.training.config.groups import group_choices, shipped_config, shipped_defaults
from normexp.training.config.keys import separate
from normexp.training.config.slots import SLOTS, resolve
from normexp.training.config.target import Target, read_target
from normexp.words import suggest

# Arguments from a training, for a norm that is built outside one.
NO_TRAINING = {"num_training_steps": NUM_TRAINING_STEPS}


def build_norm(
    config: Mapping[str, Any],
    norm_batch_size: int | None = None,
    *,
    num_steps: int = NUM_TRAINING_STEPS,
    num_positions: int | None = None,
    momentum: float | None = None,
    typed: Collection[str] = (),
) -> NormFactory:
    """The factory that builds the norm of every site, and the parts around it that slots set.

    Args:
        config: of a cell: its norm, eps and slots.
        norm_batch_size: samples that share batch statistics; None: all of a forward.
        num_steps: of the training, for a norm whose signature has `num_training_steps`.
        num_positions: of a text, for a norm that keeps state per position.
        momentum: of running averages, if the norm sets a half-life instead.
        typed: keys that win over the settings of a replaced norm, also at their shipped values.

    Raises:
        UserError: a knob that the norm does not take, or a setting without effect.
    """
    available = {"num_training_steps": num_steps}
    if num_positions is not None:
        available["num_positions"] = num_positions
    target, reserved = norm_target(config["norm"], available, momentum)
    view = reserved.get("view", "token")
    if view not in ("token", "sequence"):
        raise UserError(f"norm.view={view}: must be token or sequence")
    running_from = reserved.get("running_from", "step")
    if running_from == "sequence" and "num_training_steps" in target.arguments:
        raise UserError(
            "norm.running_from=sequence: this norm counts optimizer steps, and would count each "
            "group as one; try norm.running_from=group"
        )
    if momentum is not None:
        typed = {*typed, "momentum"}
    maker = NormMaker(target, config, reserved.get("layout"), typed)
    keeps_norms = target.call.func is AsBuilt
    if keeps_norms and maker.fixed:
        key = "eps" if "eps" in maker.fixed else "norm.half_life"
        raise UserError(f"{key} has no effect on norm=as_built, which keeps the norms as they are")
    if not keeps_norms:
        maker.check()
    at = {}
    for glob, name in (reserved.get("at") or {}).items():
        at[glob] = build_norm(
            {**config, "norm": _shipped_norm(name) | {"running_from": running_from}},
            norm_batch_size,
            num_steps=num_steps,
            num_positions=num_positions,
        )
    return NormFactory(
        maker,
        view=view,
        norm_batch_size=norm_batch_size,
        running_from=running_from,
        slots=resolve({slot: config[slot] for slot in SLOTS}, reserved),
        keeps_norms=keeps_norms,
        at=at,
    )


@dataclass(frozen=True)
class NormMaker:
    """Makes the bare norm of a site: the class that a config names, with the settings of the site.

    Attributes:
        target: the class, with its knobs.
        config: of the cell; its `eps` holds unless the site has one of its own.
        layout: where a foreign norm has its channels, `first` or `last`; None: found out.
        typed: keys that win over the settings of a site, also at their shipped values.
    """

    target: Target
    config: Mapping[str, Any]
    layout: Literal["first", "last"] | None
    typed: Collection[str]
    _builders: dict[tuple[Any, ...], Callable[[int], nn.Module]] = field(default_factory=dict)

    @cached_property
    def fixed(self) -> set[str]:
        """The settings that the config has changed, so that they win over those of a site."""
        return _changed_settings(self.config).union(self.typed)

    def __call__(self, num_features: int, **settings: Any) -> nn.Module:
        """The norm of a site; `settings` are those of the norm that it replaces."""
        kept = {key: value for key, value in settings.items() if key not in self.fixed}
        alike = tuple(sorted(kept.items()))
        if alike not in self._builders:  # a foreign norm is tried out once for all sites alike
            self._builders[alike] = self._builder(**kept)
        return self._builders[alike](num_features)

    def check(self) -> None:
        """Refuses a wrong knob before the model is built. Raises UserError."""
        self._builder()

    def _builder(self, **settings: Any) -> Callable[[int], nn.Module]:
        eps = settings.pop("eps", self.config["eps"])
        if "has_bias" in settings:
            settings["bias"] = settings["has_bias"]  # torch's name
        taken = {key: settings[key] for key in settings.keys() & self.target.arguments}
        target = self.target.with_knobs(taken)
        if is_shipped(target.path):
            return partial(target.filled_in({"eps": eps}).make, nn.Module)
        return foreign_factory(target.call, target=target.path, eps=eps, layout=self.layout)


def _shipped_norm(name: str) -> dict[str, Any]:
    values = shipped_defaults("norm", name)
    if values is None:
        hint = suggest(name, group_choices("norm")) or "python -m normexp.train --help lists all"
        raise UserError(f"norm.at={{...:{name}}}: no such norm; {hint}")
    return values


def _changed_settings(config: Mapping[str, Any]) -> set[str]:
    """Those settings of a replaced norm whose values differ from the shipped ones."""
    values = config["norm"]
    typed = values.keys() & {"eps", "momentum", "affine", "has_bias", "zero_centered"}
    typed |= values.keys() & {"track_running_stats", "unbiased_running_var"}
    changed = typed
    for choice in group_choices("norm"):  # of those with this class, the nearest
        shipped = shipped_defaults("norm", choice) or {}
        if shipped.get("_target_") == values["_target_"]:
            other = {key for key in typed if key not in shipped or values[key] != shipped[key]}
            changed = min(changed, other, key=len)
    return changed | ({"eps"} if config["eps"] != shipped_config()["eps"] else set())


def norm_target(
    values: Mapping[str, Any],
    available: Mapping[str, Any] = NO_TRAINING,
    momentum: float | None = None,
) -> tuple[Target, dict[str, Any]]:
    """The norm with the knobs of its YAML, and the YAML's reserved keys.

    Args:
        values: of the group `norm`.
        available: arguments from the training, for a norm whose signature names them.
        momentum: of running averages, if the norm sets a half-life instead.
    """
    reserved, knobs = separate("norm", values)
    if momentum is not None:
        knobs.pop("momentum", None)  # null
    target = read_target(knobs, "norm").filled_in(available)
    if momentum is not None:
        if target.arguments.isdisjoint(("momentum", "**")):
            half_life = reserved["half_life"]
            raise UserError(
                f"norm.half_life={half_life}: {target.path} has no momentum; drop the half-life"
            )
        target = target.with_knobs({"momentum": momentum})
    return target, reserved
