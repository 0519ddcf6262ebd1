"""What the README says is so: its commands compose, its folders and keys exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from normexp.cli import parse_command
from normexp.config.grid import compose_cells

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands(entry: str) -> list[str]:
    lines = [line.split("#")[0].strip() for line in README.splitlines() if line.startswith("    ")]
    return [line for line in lines if line.startswith(entry)]


def test_it_opens_with_the_two_commands():
    indented = [line.strip() for line in README.splitlines() if line.startswith("    ")]
    assert indented[:2] == ["./scripts/train norm=group", "./scripts/test"]


@pytest.mark.parametrize("command", commands("python -m normexp.train"))
def test_training_commands_compose(command: str):
    arguments = parse_command(shlex.split(command)[3:])
    if not arguments.help:
        assert compose_cells(arguments)


def test_folders_of_the_tree_exist():
    tree = README.split("## Where things are")[1].split("From Python")[0]
    below = re.findall(r"^      (\w+(?:/|\.py)) ", tree, flags=re.MULTILINE)
    assert len(below) >= 11
    for name in below:
        assert (ROOT / "normexp" / name).exists(), name
    packages = {p.name + "/" for p in (ROOT / "normexp").iterdir() if (p / "__init__.py").exists()}
    assert packages <= set(below)


def test_pictures_exist():
    for path in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README):
        assert (ROOT / path).is_file(), path
