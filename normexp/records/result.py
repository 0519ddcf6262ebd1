"""What one run came to: the content of result.json, schema 1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

SCHEMA = 1
Status = Literal["finished", "diverged", "failed"]
OPTIONAL = ("diverged_at_step", "error", "num_parameters", "timing", "invalid", "attempts")


@dataclass(frozen=True)
class Result:
    """One ended run, (cell, seed). What is not known is absent: None or an empty dict here.

    Attributes:
        config: plain values: norm, model, data, sizes, lr, epochs and so on.
        metrics: name (`val/accuracy`) to a finite number; a metric without a value has no name.
        diverged_at_step: the optimizer step whose loss was not finite; only where diverged.
        error: one line; only, and always, where failed.
        timing: train_seconds, step_ms of one optimizer step of the whole stack, stack_size,
            samples_per_second; on a GPU peak_memory_mb of the whole stack, in 10^6 bytes.
        invalid: why no number here may be compared, as of a language model that reads the future.
        attempts: how often the run has failed so far; only where failed.

    Raises:
        ValueError: an unknown status, a status without its reason, or a number that is not finite.
    """

    cell_id: str
    seed: int
    status: Status
    config: dict[str, Any]
    metrics: dict[str, float]
    environment: dict[str, Any]
    diverged_at_step: int | None = None
    error: str | None = None
    num_parameters: int | None = None
    timing: dict[str, float] = field(default_factory=dict)
    invalid: str | None = None
    attempts: int | None = None

    def __post_init__(self) -> None:
        if self.status not in get_args(Status):
            known = ", ".join(get_args(Status))
            raise ValueError(f"status={self.status!r} is not one of {known}")
        if (self.diverged_at_step is not None) != (self.status == "diverged"):
            raise ValueError("diverged_at_step goes with status diverged, and with no other")
        if (self.error is not None) != (self.status == "failed"):
            raise ValueError("error goes with status failed, and with no other")
        if self.attempts is not None and (self.status != "failed" or self.attempts < 1):
            raise ValueError("attempts, from 1, goes with status failed, and with no other")
        for group in (self.metrics, self.timing):
            for name, value in group.items():
                _require_finite(name, value)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: schema first, metrics by name, absent where missing."""
        content = {"schema": SCHEMA} | {
            part.name: getattr(self, part.name) for part in fields(self)
        }
        content["metrics"] = {name: float(self.metrics[name]) for name in sorted(self.metrics)}
        return {key: value for key, value in content.items() if not _is_missing(key, value)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Result:
        """The result in a parsed result.json; ValueError says what is wrong with it."""
        names = {part.name for part in fields(cls)}
        missing = sorted(names - set(OPTIONAL) - set(content))
        if missing:
            raise ValueError(f"{', '.join(missing)} missing")
        unknown = sorted(set(content) - names - {"schema"})
        if unknown:
            raise ValueError(f"unknown key {', '.join(unknown)}")
        for name in ("config", "metrics", "environment", "timing"):
            if not isinstance(content.get(name, {}), dict):
                raise ValueError(f"{name} is not a mapping")
        if type(content["seed"]) is not int:
            raise ValueError(f"seed={content['seed']!r} is not an integer")
        return cls(**{name: content[name] for name in names & set(content)})


def _is_missing(key: str, value: Any) -> bool:
    return key in OPTIONAL and (value is None or value == {})


def _require_finite(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name}={value!r} is not a finite number; leave it out where missing")
