"""Shared by all entries: key=value words, --help, exit codes, and one-line error messages."""

from __future__ import annotations

import argparse
import codecs
import json
import os
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from normexp.errors import (
    FAILED,
    INTERRUPTED,
    USER_MISTAKE,
    Halted,
    UserError,
    explain_hidden,
    source_line_of,
)
from normexp.training.config.groups import GROUPS, group_choices, option_defaults
from normexp.training.config.help import help_text
from normexp.training.config.keys import MISSING
from normexp.training.config.validate import OPTIONS, check_value, name_as_text, unknown_key
from normexp.training.records.files import FULL_DISK, describe, is_full_disk, read_path

if TYPE_CHECKING:
    from normexp.training.config.command import Command

PLAIN = "normexp-plain"  # how what an encoding lacks is written, as ± in ASCII
SIGNS = {"±": "+-", "●": "*", "†": "#", "·": "|", "×": "x", "…": "...", "−": "-", "²": "^2"}


def _in_plain_signs(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(SIGNS.get(sign) or _plain_sign(sign) for sign in lacking), error.end


def _plain_sign(sign: str) -> str:
    """A letter without its accent; a line of a table as a dash or a bar; else a question mark."""
    if unicodedata.name(sign, "").startswith("BOX DRAWINGS"):
        return "|" if "VERTICAL" in unicodedata.name(sign) else "-"
    letters = unicodedata.normalize("NFKD", sign).encode("ascii", "ignore").decode()
    return letters or "?"


codecs.register_error(PLAIN, _in_plain_signs)


def entry(name: str) -> Callable[[Callable[[list[str]], int]], Callable[..., int]]:
    """Decorates the `main` of `python -m normexp.<name>` with --help, messages and exit codes.

    It takes words, by default those of this process, and returns an exit code.
    """

    def decorate(act: Callable[[list[str]], int]) -> Callable[..., int]:
        @wraps(act)
        def main(argv: Sequence[str] | None = None, /) -> int:
            if argv is not None:
                return _run(name, list(argv), act)
            with suppress(FileNotFoundError):  # a removed folder: whatever needs it says so
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
    """Returns the exit code of `act`, or 0 after --help; prints an error in one line.

    Errors of normexp itself are raised, and end in a traceback and exit code 1.
    """
    for key in ("stdout", "stderr"):
        if getattr(sys, key) is None:  # closed by the shell, as in `>&-`
            setattr(sys, key, open(os.devnull, "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=PLAIN)
    try:
        if {"--help", "-h"} & set(words):
            print(help_text(name), flush=True)
            return 0
        code = act(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # as in `... | head`; Python flushes stdout once more, at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except UserError as error:
        return _end(USER_MISTAKE, str(error))
    except Halted as error:
        return _end(FAILED, str(error))
    except KeyboardInterrupt as error:
        return _end(INTERRUPTED, str(error) or "interrupted")
    except OSError as error:
        if is_full_disk(error):
            return _end(FAILED, FULL_DISK)
        return _end(USER_MISTAKE, describe(error))
    except SystemExit as error:
        line = source_line_of(error)
        if not line:
            raise
        return _end(USER_MISTAKE, f"your own code ends the program, by sys.exit{line}")
    except Exception as error:
        if message := explain_hidden(error):
            return _end(USER_MISTAKE, message)
        raise


def _end(code: int, message: str) -> int:
    line = f"normexp: {message}"
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        line = textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
    with suppress(KeyboardInterrupt):  # from one more Ctrl-C
        print(line, file=sys.stderr)
    return code


# --- train, tune, check, benchmark: Hydra's overrides ---------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        hint = "write keys as key=value; " if message.startswith("unrecognized") else ""
        raise UserError(f"{message}; {hint}see --help")


def parse_command(words: Sequence[str]) -> Command:
    """Separates overrides from options, in any order. Raises UserError for an unknown option."""
    from normexp.training.config.choices import parse_overrides
    from normexp.training.config.command import Command

    parser = _Parser(prog="normexp", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--config-dir", "-cd", action="append", default=[])
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--config-name", "-cn", "--config-path", "-cp", dest="config")  # of Hydra
    options = parser.parse_intermixed_args(list(words))
    _refuse_repeated(options.overrides)
    if options.config:
        own = f"a recipe of yours is --config-dir FOLDER experiment={options.config}"
        raise UserError(f"--config-name and --config-path: normexp has one config; {own}")
    if options.cfg and options.multirun:
        raise UserError("--cfg shows one cell: drop -m and name one value per key")
    overrides = options.overrides
    if options.config_dir:
        folders = [read_path("--config-dir", folder) for folder in options.config_dir]
        _check_encoding(folders, overrides)
        overrides = [_search_path(folders), *overrides]
    return Command(
        parse_overrides(overrides), options.multirun, shows_config=options.cfg is not None
    )


def _search_path(folders: Sequence[Path]) -> str:
    """The word by which Hydra also finds the YAMLs in these folders.

    Raises:
        UserError: a missing folder, or a file with the name of a shipped choice, which Hydra would
            take instead.
    """
    from normexp.training.config.choices import forget_composed

    forget_composed()
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"--config-dir {folder}: no such folder")
        for group in GROUPS:
            for name in {*group_choices(group), "custom"} & {*group_choices(group, folder)}:
                file = folder / group / f"{name}.yaml"
                raise UserError(f"{file}: normexp has {group}={name} itself; rename yours")
    paths = [f"file://{folder.resolve().as_posix()}" for folder in folders]
    quoted = [json.dumps(path, ensure_ascii=False) for path in paths]
    return f"hydra.searchpath=[{','.join(quoted)}]"


def _check_encoding(folders: Sequence[Path], words: Sequence[str]) -> None:
    """Raises UserError for a YAML that an editor saved in an encoding that Hydra does not read."""
    for word in words:
        group, _, names = word.partition("=")
        files = [folder / group / f"{name}.yaml" for name in names.split(",") for folder in folders]
        for file in files if group in GROUPS else ():
            if file.is_file() and (fault := _fault_of_text(file.read_bytes())):
                raise UserError(f"{file} {fault}; save it as UTF-8, without a byte order mark")


def _fault_of_text(content: bytes) -> str:
    try:
        has_mark = content.decode().startswith("\ufeff")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        return f"is not UTF-8 (byte {content[error.start]:#04x} in line {line})"
    return "begins with a byte order mark" if has_mark else ""


def _refuse_repeated(words: Sequence[str], several: str = "-m {}={}") -> None:
    """Raises UserError for a key given twice, as after a shell has made a={b,c} into a=b a=c.

    Args:
        several: how a key and several values are typed.
    """
    given: dict[str, list[str]] = {}
    for word in words:
        key, _, value = word.partition("=")
        given.setdefault(key.lstrip("+~"), []).append(value)
    for key, values in given.items():
        if len(values) > 1:
            form = "'{}={{{}}}'" if all(":" in value for value in values) else several
            typed = form.format(key, ",".join(values))
            raise UserError(
                f"{key} is given twice; name it once, or if the shell has split braces, "
                f"type {typed}"
            )


def show_config(command: Command) -> int:
    """Prints the config of a cell; trains and writes nothing."""
    from omegaconf import OmegaConf

    from normexp.training.config.compose import compose_cell

    config, _ = compose_cell(command.overrides)
    print(OmegaConf.to_yaml(config), end="")
    return 0


# --- evaluate, report, status, and check's own keys: plain key=value ------------------------------


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

    _refuse_repeated(words, "'{}=[{}]'")
    kinds = OPTIONS[name]
    for word in words:
        key, equals, _ = word.partition("=")
        if not equals:
            raise UserError(f"{word!r} is not key=value, as in study=NAME or run=FOLDER")
        if key not in kinds:
            raise unknown_key(key, kinds)
    try:
        given: Any = OmegaConf.to_container(OmegaConf.from_dotlist([*map(name_as_text, words)]))
    except YAMLError as error:
        raise UserError(f"{' '.join(words)}: a value cannot be read; quote texts") from error
    values = option_defaults(name) | given
    for key, value in values.items():
        if value == MISSING:
            raise UserError(
                f"{key} is missing; set {key}=...; python -m normexp.report lists studies"
            )
        values[key] = check_value(key, value, kinds[key])
    return values
