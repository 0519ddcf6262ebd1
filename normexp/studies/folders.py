"""Where the config files are and what each group offers; without Hydra, so that --help is fast."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from normexp.errors import UserError

GROUPS = ("norm", "model", "data", "optim", "trainer", "logger", "experiment")
CUSTOM_GROUPS = ("norm", "model", "data")  # take `<group>=custom <group>._target_=...`


def conf_dir() -> Path:
    """The folder of the shipped YAMLs: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(f"normexp is installed without its conf folder (beside {package})")


def group_choices(group: str, config_dirs: Sequence[str] = ()) -> list[str]:
    """What `group=` takes, sorted: shipped files, those of `config_dirs`, and `custom`."""
    names = {"custom"} if group in CUSTOM_GROUPS else set()
    for folder in (conf_dir(), *map(Path, config_dirs)):
        names.update(_names_in(folder / group))
    return sorted(names)


def check_config_dirs(config_dirs: Sequence[str]) -> None:
    """Refuses a folder that is not there, and a file that a shipped one would silently hide."""
    for config_dir in config_dirs:
        if not Path(config_dir).is_dir():
            raise UserError(f"--config-dir {config_dir}: no such folder")
        for group in GROUPS:
            folder = Path(config_dir, group)
            for name in sorted(_names_in(folder) & set(group_choices(group))):
                raise UserError(
                    f"{folder / name}.yaml: normexp has a {group}={name} of its own; rename yours"
                )


def _names_in(folder: Path) -> set[str]:
    files = folder.rglob("*.yaml")
    return {file.relative_to(folder).with_suffix("").as_posix() for file in files}
