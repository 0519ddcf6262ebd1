"""The README's "Your norm in five minutes", word for word."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from normexp.checks import assert_contract

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTION = README.split("## Your norm in five minutes")[1].split("\n## ")[0]
CODE = re.findall(r"```python\n(.*?)```", SECTION, flags=re.DOTALL)[0]
COMMANDS = re.findall(r"```sh\n(.*?)```", SECTION, flags=re.DOTALL)[0].splitlines()


def test_the_norm_keeps_the_contract():
    names: dict[str, type] = {}
    exec(CODE, names)
    assert_contract(names["AbsNorm"])


def run(command: str, folder: Path) -> str:
    words = shlex.split(command)
    assert words[0] == "python"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, *words[1:]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_line_does_what_it_says(tmp_path: Path):
    (tmp_path / "my_norm.py").write_text(CODE)
    card, own, _, report = [run(command, tmp_path) for command in COMMANDS]
    assert "AbsNorm: the contract holds" in card
    assert re.search(r"mixes samples +no", card)
    assert "test/accuracy" in own
    assert "AbsNorm does not depend on the norm batch size" in report
    assert (tmp_path / "runs" / "mine" / "report" / "index.html").is_file()
