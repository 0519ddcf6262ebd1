"""The options of the command line, as Hydra's users know them. Knows no Hydra itself."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from normexp.errors import UserError

LAUNCHER = "hydra/launcher="


@dataclass(frozen=True)
class Arguments:
    """A command line taken apart.

    Attributes:
        overrides: `key=value` arguments in their order.
        multirun: -m was given: several cells.
        config_dirs: folders of the user's own YAMLs.
        help: --help was given.
        delegate: Hydra itself answers (--cfg, --info, shell completion); see `hydra_app`.
        launcher: a launcher of Hydra's that is to run the cells; None for workers of our own.
    """

    overrides: list[str]
    multirun: bool
    config_dirs: list[str]
    help: bool
    delegate: bool
    launcher: str | None = None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Takes a command line apart, without its program name. Raises UserError."""
    options = _parser().parse_intermixed_args(list(argv))
    shows = options.cfg is not None or options.info is not None
    if shows and options.multirun:
        raise UserError("--cfg and --info show one cell: drop -m and name one value per key")
    return Arguments(
        overrides=options.overrides,
        multirun=options.multirun,
        config_dirs=options.config_dir,
        help=options.help,
        delegate=shows or options.shell_completion,
        launcher=_launcher(options.overrides),
    )


def config_dir_words(config_dirs: Sequence[str]) -> list[str]:
    """The folders as a command line names them."""
    return [word for folder in config_dirs for word in ("--config-dir", folder)]


def _launcher(overrides: Sequence[str]) -> str | None:
    names = [text.removeprefix(LAUNCHER) for text in overrides if text.startswith(LAUNCHER)]
    return names[-1] if names and names[-1] != "basic" else None


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="normexp", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--config-dir", "-cd", action="append", default=[])
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--package", "-p")
    parser.add_argument("--info", "-i", nargs="?", const="all")
    parser.add_argument("--shell-completion", "-sc", action="store_true")
    return parser
