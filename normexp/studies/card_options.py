"""The command line of normexp.check: which norms, and how their cards are shown. No Hydra here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from normexp.errors import UserError

OWN_KEYS = {
    "format": ("table", "json", "markdown"),
    "part": ("all", "contract"),
    "ddp": ("false", "true"),
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
  ddp=false               true also trains the norm in two processes

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
    ddp: bool


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
    options = CardOptions(given["format"], given["part"] == "contract", given["ddp"] == "true")
    if options.contract_only and options.ddp:
        raise UserError("ddp=true is no part of the contract; drop part=contract")
    return options, rest


def _as_sweep(word: str) -> str:
    """`norm=[a,b]` as `norm=a,b`."""
    if word.startswith("norm=[") and word.endswith("]"):
        return "norm=" + word.removeprefix("norm=[").removesuffix("]").replace(" ", "")
    return word
