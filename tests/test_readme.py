"""What the README says is so: its commands compose, its files, folders and pictures exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from normexp.cli import parse_command, read_options
from normexp.config.compose import compose_config
from normexp.config.grid import compose_norms, list_cells
from normexp.config.help import help_text
from normexp.config.rules import validate
from normexp.search.points import plan_searches

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
INDENTED = [line.strip() for line in README.splitlines() if line.startswith("    ")]
COMMANDS = [
    line.split("# ")[0].strip() for line in INDENTED if line.startswith("python -m normexp.")
]


def test_it_opens_with_the_two_commands():
    assert INDENTED[:2] == ["./scripts/train norm=group", "./scripts/test"]


@pytest.mark.parametrize("command", COMMANDS)
def test_command_is_understood(command: str):
    _, _, module, *words = shlex.split(command)
    entry = module.removeprefix("normexp.")
    if "--help" in words:
        assert help_text(entry)
    elif entry == "train":
        cells = list_cells(parse_command(words))
        for cell in (cells[0], cells[-1]):  # each takes a tenth of a second
            validate(compose_config(cell))
    elif entry == "tune":
        assert plan_searches(parse_command(words))
    elif entry == "check":
        assert compose_norms(parse_command(words))
    else:
        assert read_options(entry, words)


def test_every_package_stands_in_the_tree():
    tree = README.split("## Read the code")[1]
    named = set(re.findall(r"^      (\w+(?:/|\.py)) ", tree, flags=re.MULTILINE))
    for name in named:
        assert (ROOT / "normexp" / name).exists(), name
    packages = {p.name + "/" for p in (ROOT / "normexp").iterdir() if (p / "__init__.py").exists()}
    assert packages <= named


def test_files_of_the_spine_exist_and_are_as_long_as_said():
    spine = re.findall(r"^\| `(\w+/\w+\.py)` \|", README, flags=re.MULTILINE)
    assert len(spine) == 12
    lines = sum(len((ROOT / "normexp" / file).read_text().splitlines()) for file in spine)
    said = re.search(r"The spine, about ([\d,]+) lines", README)
    assert said and abs(lines - int(said[1].replace(",", ""))) < 100


def test_pictures_exist():
    for path in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README):
        assert (ROOT / path).is_file(), path
