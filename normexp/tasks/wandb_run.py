"""One W&B run per (cell, seed), several of them open in one process."""

from __future__ import annotations

import netrc
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class WandbRun:
    """A sink that logs one run to Weights & Biases; offline unless a login is there.

    Args:
        mode: auto, online, offline or disabled; auto is online where a login is there.
        directory: where W&B keeps its files.
        id_file: holds the W&B id of this run, so that one resumed is the same W&B run.
        group: the cell, so that W&B's own grouping shows mean and spread over seeds.
    """

    def __init__(
        self,
        *,
        project: str,
        entity: str | None,
        mode: str,
        directory: Path,
        group: str,
        seed: int,
        id_file: Path,
        tags: list[str],
        config: Mapping[str, Any],
    ) -> None:
        import wandb

        directory.mkdir(parents=True, exist_ok=True)
        self.mode = resolve_mode(mode)
        if not id_file.is_file():
            id_file.write_text(secrets.token_hex(8))
        self.run = wandb.init(
            project=project,
            entity=entity,
            mode=self.mode,  # type: ignore[arg-type]
            dir=directory,
            name=f"{group}/seed-{seed}",
            group=group,
            tags=tags,
            config=dict(config),
            id=id_file.read_text(),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )

    def add(self, step: int, epoch: int, samples_seen: int, metrics: Mapping[str, float]) -> None:
        self.run.log({**metrics, "epoch": epoch, "samples_seen": samples_seen}, step=step)

    def flush(self) -> None:
        """W&B writes as it goes."""

    def truncate_after(self, step: int) -> None:
        """W&B keeps no second value of a step: it takes the first and goes on from there."""

    def finish(self, *, failed: bool) -> None:
        """Ends the run; without this, the next run of the process would be merged into it."""
        self.run.finish(exit_code=1 if failed else 0)


def resolve_mode(mode: str) -> str:
    """`auto` as online where a login is there, else offline; any other mode as it is."""
    if mode != "auto":
        return mode
    return "online" if has_login() else "offline"


def has_login() -> bool:
    """Whether W&B would find a key: in the environment or in the user's netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        hosts = netrc.netrc().hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return any("wandb" in host for host in hosts)
