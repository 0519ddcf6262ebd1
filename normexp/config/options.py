"""The command line of normexp.check: which norms, and how their cards are shown. No Hydra here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from omegaconf import DictConfig, OmegaConf

from normexp.config.compose import parse_overrides
from normexp.config.rules import validate_keys
from normexp.errors import UserError

OWN_KEYS = {
    "format": ("table", "json", "markdown"),
    "part": ("all", "contract"),
}
HELP = """\
normexp.check measures a norm from outside, trusting no declaration: its card.

  python -m normexp.check norm=NAME            one card: contract, traits, compatibility, cost
  python -m normexp.check norm=batch,group     a table of several; norm=glob(*) of all that ship
  python -m normexp.check norm=custom norm._target_=my_package.MyNorm norm.my_knob=2

Values (key=value) and their defaults:
  norm=batch              a norm, or several as a,b or [a,b]; its knobs as norm.num_groups=4
  eps=1e-5                passed to a norm that has such an argument
  part=all                contract: that part alone, in seconds
  format=table            table, json or markdown, to stdout

Options:
  --config-dir FOLDER     your own YAMLs, e.g. FOLDER/norm/mine.yaml for norm=mine; may be repeated

Exit code: 0, 1 where a line of the contract fails, 2 for a mistake in the command.
In a test of your own: from normexp.checks import assert_contract; assert_contract(MyNorm)
"""


@dataclass(frozen=True)
class CardOptions:
    """How cards are measured and shown."""

    format: str
    contract_only: bool


def parse_card_options(words: Sequence[str]) -> tuple[CardOptions, list[str]]:
    """Takes the keys of a card from a command line; the rest is Hydra's. Raises UserError."""
    given = {key: choices[0] for key, choices in OWN_KEYS.items()}
    rest = []
    for word in words:
        key, equals, value = word.partition("=")
        if key not in OWN_KEYS or not equals:
            rest.append(_as_sweep(word))
            continue
        if value not in OWN_KEYS[key]:
            raise UserError(f"{word}: must be one of {', '.join(OWN_KEYS[key])}")
        given[key] = value
    return CardOptions(given["format"], given["part"] == "contract"), rest


def _as_sweep(word: str) -> str:
    """`norm=[a,b]` as `norm=a,b`."""
    if word.startswith("norm=[") and word.endswith("]"):
        return "norm=" + word.removeprefix("norm=[").removesuffix("]").replace(" ", "")
    return word


DEFAULTS: dict[str, Any] = {
    "evaluate_with": ["running", "precise"],
    "precise_samples": 4096,
    "evaluate_batch_sizes": None,
    "evaluate_every_epoch": False,
}
KEYS = ("run", "evaluate_with", "precise_samples", "evaluate_batch_sizes")
HELP_EVALUATE_OPTIONS = """\
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
