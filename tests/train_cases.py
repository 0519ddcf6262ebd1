"""Runs `python -m normexp.train` in this process, and reads what it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from normexp.errors import UserError
from normexp.norms.build import build_norm
from normexp.train import main
from normexp.training.cells.cell import Cell, prepare_cell
from normexp.training.config.choices import parse_overrides
from normexp.training.config.compose import compose_cell, compose_config
from normexp.training.config.groups import shipped_defaults
from normexp.training.config.spec import CellSpec
from normexp.training.records.result import Result, read_result

NO_RECORDS = "runs_dir=/nowhere"
QUICK = ["steps=12", "replicas=2", "log_every=5", "workers=0"]  # no other process


def spec_of(*words: str) -> CellSpec:
    """The cell of these words, in a folder without records."""
    return CellSpec(*compose_cell(parse_overrides([NO_RECORDS, *words])))


def prepare(*words: str) -> Cell:
    return prepare_cell(spec_of(*words))


def takes_maps(norm: str) -> bool:
    """False for a shipped norm of texts alone."""
    config = {**compose_config([]), "norm": shipped_defaults("norm", norm)}
    site = build_norm(config, num_positions=4)(8)
    try:
        site(torch.randn(2, 8, 3, 3))
    except UserError:
        return False
    return True


def train(tmp_path: Path, *words: str) -> int:
    return main([*words, *QUICK, f"runs_dir={tmp_path / 'runs'}", f"data_dir={tmp_path / 'data'}"])


def cells(tmp_path: Path, study: str = "default") -> list[Path]:
    return sorted(p for p in (tmp_path / "runs" / study).iterdir() if (p / "config.yaml").is_file())


def results(runs_dir: Path, study: str = "default") -> dict[Path, Result]:
    """The results of all runs, by their place in the folder."""
    found = sorted(runs_dir.glob(f"{study}/*/seed-*/result.json"))
    return {path.relative_to(runs_dir): read_result(path) for path in found}


def wandb_records(folder: Path) -> list[dict[str, Any]]:
    """The records of an offline W&B run, by W&B's own reader."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
    answer = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=os.environ
    )
    assert answer.returncode == 0, answer.stderr
    return [json.loads(line) for line in answer.stdout.splitlines() if line.startswith("{")]


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
