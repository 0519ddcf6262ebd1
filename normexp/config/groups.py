"""The config groups, and the names of their shipped choices. Imports neither torch nor Hydra."""

from __future__ import annotations

from pathlib import Path

PARTS = ("norm", "model", "data", "optim")  # of every cell; their targets say what they take
OPTIONAL_GROUPS = ("schedule", "callback")  # a training may have none
CUSTOM_GROUPS = (*PARTS, *OPTIONAL_GROUPS)  # take `<group>=custom <group>._target_=...`
GROUPS = (*CUSTOM_GROUPS, "trainer", "logger", "experiment")


def conf_dir() -> Path:
    """The folder of the shipped YAMLs: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(f"normexp is installed without its conf folder (beside {package})")


def group_choices(group: str, folder: Path | None = None) -> list[str]:
    """The names that `group=` takes, sorted; those of another folder of YAMLs, if given."""
    folder = (folder or conf_dir()) / group
    names = {file.relative_to(folder).with_suffix("").as_posix() for file in folder.rglob("*.yaml")}
    return sorted(names - {"claims"})  # conf/experiment/claims.yaml is read and not trained
