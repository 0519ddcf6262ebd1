"""The command line of normexp.report: a few keys, checked before anything is read."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from normexp.errors import UserError

KEYS = ("study", "runs_dir", "metric", "tolerance", "watch", "log")
TRACKERS = ("wandb",)
HELP = """\
normexp.report turns a study into tables, figures, a page and a verdict.

  python -m normexp.report study=NAME          writes runs/NAME/report/, also while it is running
  python -m normexp.report study=[a,b]         two studies of one grid: differences, paired by seed

Values (key=value) and their defaults:
  study                   name of a study, or [a,b] with the one before first; required
  runs_dir=runs           folder of all studies
  metric=test/accuracy    main metric; by default test accuracy, bits per byte or loss
  tolerance=1             differences within it are called a tie, in the metric's unit (points,
                          nats, bits per byte); by default 1 point, 0.05 nats, 0.02 bits
  watch=false             true writes the report again when results appear, until Ctrl-C; the page
                          reloads itself
  log=wandb               also logs figures, main table and verdict to W&B, to the project of the
                          study's own runs
"""


@dataclass(frozen=True)
class Options:
    """What was asked for; None leaves a choice to the report."""

    studies: list[str]
    runs_dir: Path
    metric: str | None
    tolerance: float | None
    watch: bool
    log: list[str]


def parse_options(words: Sequence[str]) -> Options:
    """Reads `key=value` words. Raises UserError."""
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key not in KEYS or not equals:
            raise UserError(_unknown(word, key))
        if key in given:
            raise UserError(f"{key} is given twice; several studies are study=[a,b]")
        given[key] = value
    return Options(
        studies=_studies(given.get("study", "")),
        runs_dir=Path(given.get("runs_dir", "runs")),
        metric=given.get("metric") or None,
        tolerance=_tolerance(given.get("tolerance")),
        watch=_switch(given.get("watch", "false")),
        log=_trackers(given.get("log", "")),
    )


def _studies(text: str) -> list[str]:
    names = _names(text)
    if not names:
        raise UserError("study is missing: name one of the folders in runs_dir, study=NAME")
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled:
        raise UserError(f"study={doubled} is named twice; name each study once")
    return names


def _trackers(text: str) -> list[str]:
    names = _names(text)
    unknown = next((name for name in names if name not in TRACKERS), None)
    if unknown is not None:
        raise UserError(f"log={unknown} is not known; choose from {', '.join(TRACKERS)}")
    return list(dict.fromkeys(names))


def _names(text: str) -> list[str]:
    """The names in `a`, `a,b` or `[a, b]`."""
    inner = text.removeprefix("[").removesuffix("]") if text.startswith("[") else text
    return [name.strip().strip("'\"") for name in inner.split(",") if name.strip()]


def _tolerance(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise UserError(f"tolerance={text} is not a number of 0 or more; try tolerance=1")
    return value


def _switch(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise UserError(f"watch={text} is neither true nor false")
    return text.lower() == "true"


def _unknown(word: str, key: str) -> str:
    if "=" not in word:
        return f"{word}: not of the form key=value; try study={word}"
    near = difflib.get_close_matches(key, KEYS, n=1)
    return f"{key}: unknown key; " + (
        f"did you mean {near[0]}?" if near else f"there are {', '.join(KEYS)}"
    )
