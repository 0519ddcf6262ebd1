"""Shared by all entries: key=value words, --help, exit codes, and one-line error messages."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from normexp.config.help import USAGE, conf_dir, help_text, option_defaults
from normexp.config.rules import OPTIONS, check_value, name_as_text, suggest
from normexp.config.spec import Command
from normexp.errors import FAILED, INTERRUPTED, USER_MISTAKE, Halted, UserError
from normexp.records.files import FULL_DISK, is_full_disk
from normexp.records.paths import list_cells, list_studies
from normexp.records.sources import source_line_of

if TYPE_CHECKING:
    from omegaconf import DictConfig


UNUSABLE_FILE = (PermissionError, NotADirectoryError, IsADirectoryError)
MOST_NAMED = 5  # studies or cells in a message


class EntryPoint(Protocol):
    """The `main` of an entry: from words, by default those of this process, to an exit code."""

    def __call__(self, argv: Sequence[str] | None = None, /) -> int: ...


def entry(name: str) -> Callable[[Callable[[list[str]], int]], EntryPoint]:
    """Decorates the `main` of `python -m normexp.<name>` with --help, messages and exit codes."""

    def decorate(act: Callable[[list[str]], int]) -> EntryPoint:
        @wraps(act)
        def main(argv: Sequence[str] | None = None, /) -> int:
            if argv is not None:
                return _run(name, list(argv), act)
            _import_from_current_folder()
            return _run(name, sys.argv[1:], act)

        return main

    return decorate


def _import_from_current_folder() -> None:
    """Lets a console script import the modules of the current folder, as `python -m` does."""
    folder = os.getcwd()
    if not sys.flags.safe_path and folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)


def _run(name: str, words: list[str], act: Callable[[list[str]], int]) -> int:
    """Returns the exit code of `act`, or 0 after --help.

    Prints one line for a full disk (returns 1), a user's mistake (2), such as a file in place of a
    folder or `sys.exit` in the user's code, and Ctrl-C (130). Other exceptions pass through: a
    traceback, and exit code 1.
    """
    try:
        if name in USAGE and {"--help", "-h"} & set(words):
            config_dirs = parse_command(words).config_dirs if name in TAKES_OVERRIDES else ()
            print(help_text(name, config_dirs), flush=True)
            return 0
        code = act(words)
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"normexp: {error}", file=sys.stderr)
        return USER_MISTAKE
    except SystemExit as stop:
        if not (line := source_line_of(stop)):
            raise
        print(f"normexp: your own code ends the program, by sys.exit{line}", file=sys.stderr)
        return USER_MISTAKE
    except BrokenPipeError:  # as in `... | head`; Python flushes stdout once more, at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except UNUSABLE_FILE as error:
        if error.filename is None:
            raise
        print(f"normexp: {error.filename}: {error.strerror}", file=sys.stderr)
        return USER_MISTAKE
    except (Halted, OSError) as error:
        if not isinstance(error, Halted) and not is_full_disk(error):
            raise
        print(f"normexp: {FULL_DISK if is_full_disk(error) else error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt as stop:
        with suppress(KeyboardInterrupt):  # from one more Ctrl-C
            print(f"normexp: {str(stop) or 'interrupted'}", file=sys.stderr)
        return INTERRUPTED


# --- train, tune, check: Hydra's overrides ------------------------------------------------------

TAKES_OVERRIDES = ("train", "tune", "check", "benchmark")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        hint = "write keys as key=value; " if message.startswith("unrecognized") else ""
        raise UserError(f"{message}; {hint}see --help")


def parse_command(words: Sequence[str]) -> Command:
    """Separates overrides from options, in any order. Raises UserError for an unknown option."""
    parser = _Parser(prog="normexp", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--config-dir", "-cd", action="append", default=[])
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--package", "-p")
    parser.add_argument("--info", "-i", nargs="?", const="all")
    options = parser.parse_intermixed_args(list(words))
    _refuse_repeated(options.overrides)
    shows = options.cfg is not None or options.info is not None
    if shows and options.multirun:
        raise UserError("--cfg and --info show one cell: drop -m and name one value per key")
    return Command(
        overrides=options.overrides,
        multirun=options.multirun,
        config_dirs=options.config_dir,
        shows_config=shows,
    )


def _refuse_repeated(words: Sequence[str]) -> None:
    given: dict[str, str] = {}
    for word in words:
        key = word.partition("=")[0].lstrip("+~")
        if key in given:
            raise UserError(f"{key} is given twice, as {given[key]} and {word}; name it once")
        given[key] = word


def show_config(words: Sequence[str]) -> int:
    """Lets Hydra answer --cfg or --info; trains and writes nothing.

    Raises:
        UserError: the config to show does not compose.
    """
    import hydra

    from normexp.config.compose import VERSION_BASE, compose_config, register_custom

    command = parse_command(words)
    compose_config(command.overrides, command.config_dirs)
    register_custom()
    before = sys.argv
    sys.argv = [before[0], *words]
    try:
        hydra.main(config_path=str(conf_dir()), config_name="config", **VERSION_BASE)(_show)()
    finally:
        sys.argv = before
    return 0


def _show(config: DictConfig) -> None:
    raise AssertionError(f"Hydra answers by itself and runs no job ({list(config)})")


# --- evaluate, report, status, and check's own keys: plain key=value ----------------------------


def split_options(name: str, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words that set an option of an entry, and all other words."""
    options = [word for word in words if word.partition("=")[0] in OPTIONS[name]]
    return options, [word for word in words if word not in options]


def read_options(name: str, words: Sequence[str]) -> dict[str, Any]:
    """The value of every key in `OPTIONS[name]`: as given, or its default.

    Raises:
        UserError: an unknown, doubled or missing key, or a value that its type refuses.
    """
    from omegaconf import OmegaConf
    from yaml import YAMLError

    _refuse_repeated(words)
    options, words = (
        OPTIONS[name],
        [name_as_text(w) if "[" in w or "," not in w else w for w in words],
    )
    for word in words:
        key, equals, _ = word.partition("=")
        if not equals:
            raise UserError(f"{word!r} is not key=value, as in {next(iter(options))}={word}")
        if key not in options:
            hint = suggest(key, options) or f"{name} takes {', '.join(options)}"
            raise UserError(f"{key}: unknown key; {hint}")
    try:
        read: Any = OmegaConf.to_container(OmegaConf.from_dotlist(words))
    except YAMLError as error:
        raise UserError(f"{' '.join(words)}: a value cannot be read; quote texts") from error
    given = {key: check_value(key, value, options[key]) for key, value in read.items()}
    values = option_defaults(name) | given
    for key, value in values.items():
        if value == "???":
            raise UserError(f"{key} is missing{_candidates(key, values.get('runs_dir', 'runs'))}")
    return values


def _candidates(key: str, runs_dir: str) -> str:
    """The values that a missing `study` or `run` may have, the latest first."""
    try:
        studies = [Path(runs_dir, name) for name in list_studies(Path(runs_dir))]
    except UserError as error:
        return f", and {error}"
    if key == "study":
        found, example = studies, "study=STUDY"
    else:
        found, example = [cell for study in studies for cell in list_cells(study)], "run=FOLDER"
    found.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
    names = [folder.name if key == "study" else str(folder) for folder in found[:MOST_NAMED]]
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return f": give {example} with one of {', '.join(names)}{more}"
