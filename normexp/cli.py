"""What every entry does with an error: exit codes and the one line on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from normexp.config.arguments import parse_arguments
from normexp.config.help import conf_dir
from normexp.errors import INTERRUPTED, USER_MISTAKE, UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig


def run_entry(entry: Callable[[], int]) -> int:
    """Exit code of `entry()`: its own, 2 after a user's mistake, 130 after Ctrl-C.

    A mistake and a stop are one line on stderr. Any other exception passes through: Python prints
    the traceback and exits with 1.
    """
    try:
        return entry()
    except UserError as error:
        print(f"normexp: {error}", file=sys.stderr)
        return USER_MISTAKE
    except KeyboardInterrupt as stop:
        print(f"normexp: {str(stop) or 'interrupted'}", file=sys.stderr)
        return INTERRUPTED


def hydra_app(argv: Sequence[str]) -> int:
    """Lets Hydra answer `argv`; no training is started and nothing is written.

    Raises:
        UserError: the config to show does not compose.
    """
    import hydra

    from normexp.config.compose import VERSION_BASE, compose_config, register_custom

    if not {"-sc", "--shell-completion"} & set(argv):
        arguments = parse_arguments(argv)
        compose_config(arguments.overrides, arguments.config_dirs)
    register_custom()
    before = sys.argv
    sys.argv = [before[0], *argv]
    try:
        hydra.main(config_path=str(conf_dir()), config_name="config", **VERSION_BASE)(_show)()
    finally:
        sys.argv = before
    return 0


def _show(config: DictConfig) -> None:
    raise AssertionError(f"Hydra answers by itself and runs no job ({list(config)})")
