"""The command line of normexp.evaluate: a few keys, read and checked before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from omegaconf import DictConfig, OmegaConf

from normexp.errors import UserError
from normexp.studies.composing import parse_overrides
from normexp.studies.validate import validate_keys

DEFAULTS: dict[str, Any] = {
    "evaluate_with": ["running", "precise"],
    "precise_samples": 4096,
    "evaluate_batch_sizes": None,
    "evaluate_every_epoch": False,
}
KEYS = ("run", "evaluate_with", "precise_samples", "evaluate_batch_sizes")
HELP = """\
normexp.evaluate evaluates the finished runs of a cell again, from the weights they kept.

  python -m normexp.evaluate run=runs/<study>/<cell_id>

Values (key=value) and their defaults:
  run                                        folder of the cell, required
  evaluate_with=[running,precise]            statistics that norms use: running averages, moments
                                             pooled over training samples; also batch, each
                                             batch's own
  precise_samples=4096                       training samples for precise statistics
  evaluate_batch_sizes=null                  samples per batch, as in [2,8,32]; null: as in training

Results go to evaluation.json beside each run's result.json, and to a table.
"""


def parse_evaluate_options(words: Sequence[str]) -> tuple[str, DictConfig]:
    """The folder to evaluate, and the evaluation keys of a config with their defaults.

    Raises:
        UserError: an unknown key, a value that is none of its kind, or no run.
    """
    given: dict[str, Any] = {}
    for override in parse_overrides(words):
        key = override.key_or_group
        if key not in KEYS:
            near = get_close_matches(key, KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(KEYS)}"
            raise UserError(f"{key}: unknown key; {hint}")
        if override.is_sweep_override():
            raise UserError(f"{override.input_line}: one value is wanted, a list is [a,b]")
        given[key] = override.value()
    run = given.pop("run", None)
    if run is None:
        raise UserError("run is missing: name the folder of a cell, run=runs/<study>/<cell_id>")
    if "evaluate_batch_sizes" in given and "evaluate_with" not in given:
        given["evaluate_with"] = [*DEFAULTS["evaluate_with"], "batch"]
    options = OmegaConf.create(DEFAULTS | given)
    validate_keys(options, DEFAULTS)
    return str(run), options
