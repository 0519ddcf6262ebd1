"""Runs `python -m normexp.train` in this process, and reads what it writes."""

from __future__ import annotations

from pathlib import Path

from normexp.train import main

QUICK = ["steps=12", "replicas=2", "log_every=5", "workers=0"]  # no other process


def train(tmp_path: Path, *words: str) -> int:
    return main([*words, *QUICK, f"runs_dir={tmp_path / 'runs'}", f"data_dir={tmp_path / 'data'}"])


def cells(tmp_path: Path, study: str = "default") -> list[Path]:
    return sorted(p for p in (tmp_path / "runs" / study).iterdir() if (p / "config.yaml").is_file())


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
