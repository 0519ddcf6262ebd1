"""What Hydra answers itself: --cfg, --info and shell completion."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import hydra
from omegaconf import DictConfig

from normexp.studies.arguments import parse_arguments
from normexp.studies.composing import VERSION_BASE, register_custom
from normexp.studies.config import compose_config
from normexp.studies.folders import conf_dir


def hydra_app(argv: Sequence[str]) -> int:
    """Lets Hydra answer `argv`; no training is started and nothing is written.

    Raises:
        UserError: the config to show does not compose.
    """
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
