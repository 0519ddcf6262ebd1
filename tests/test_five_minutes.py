"""conf/README.md, word for word: its norm, model, data set and optimizer, and every command."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from train_cases import files

from normexp.checks import assert_contract
from normexp.config.compose import compose_config
from normexp.config.help import help_text
from normexp.train import main

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "conf" / "README.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", GUIDE, flags=re.DOTALL | re.MULTILINE))
FILES = dict(re.findall(r"as\s`(my_\w+\.py)`:\n\n```python\n(.*?)```", GUIDE, flags=re.DOTALL))


def commands(section: str) -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", SECTIONS[section], flags=re.DOTALL)
    return "".join(blocks).splitlines()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of the guide, in which its commands are typed."""
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
        sys.modules.pop(name.removesuffix(".py"), None)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_norm_keeps_the_contract():
    names: dict[str, type] = {}
    exec(FILES["my_norm.py"], names)
    assert_contract(names["AbsNorm"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "name"),
    [
        ("Your model", "Tiny"),
        ("Your data set", "stripes"),
        ("Your optimizer", "RMSprop"),
        ("Your learning rate schedule", "triangle"),
        ("Your callback", "ClipWeights"),
    ],
)
def test_own_part_trains_and_carries_its_name(folder: Path, section: str, name: str, capsys):
    (command,) = commands(section)
    words = shlex.split(command)[3:]
    assert main([*words, "replicas=1"]) == 0
    assert "n = 1 seed\n" in capsys.readouterr().out
    (result,) = (text for path, text in files(folder / "runs").items() if "result.json" in path)
    assert f'"{name}"'.encode() in result


@pytest.mark.slow
def test_own_logger_gets_the_losses_of_every_run(folder: Path):
    (command,) = commands("Your logger")
    assert main([*shlex.split(command)[3:], "replicas=2"]) == 0
    logged = [
        t for path, t in files(folder / "runs").items() if "/seed-" in path and b"val/loss" in t
    ]
    assert len([text for text in logged if b"train/loss" in text and b"train/lr" not in text]) >= 2


@pytest.mark.slow
def test_the_python_of_the_guide_prints_the_recorded_accuracy(folder: Path, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", SECTIONS["From Python"], flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    results, table = names["results"], names["table"]
    assert [(run.config["norm"], run.seed) for run in results] == [
        (norm, seed) for norm in ("batch", "group") for seed in range(4)
    ]
    assert len(table) == 8
    printed = re.search(r"tensor\((.+?)\)", capsys.readouterr().out.splitlines()[-1])
    assert float(printed[1]) == pytest.approx(results[0].metrics["test/accuracy"], abs=1e-4)
    assert folder == Path.cwd()


def test_a_yaml_gives_a_norm_its_name_and_its_line_in_the_help(folder: Path):
    text = re.findall(r"```yaml\n(.*?)```", GUIDE, flags=re.DOTALL)[0]
    path = folder / "my_conf" / "norm" / "mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert compose_config(["norm=mine"], ["my_conf"]).norm._target_ == "my_norm.AbsNorm"
    family = help_text("train", ["my_conf"]).partition("\n  token\n")[2]
    assert re.search(r"^    mine +Absolute norm: divides by the mean", family, re.MULTILINE)


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
    return done.stdout + done.stderr


@pytest.mark.slow
def test_every_line_of_the_five_minutes_does_what_it_says(folder: Path):
    typed = commands("Your norm in five minutes")
    card, own, _, report = [run(command, folder) for command in typed]
    assert "AbsNorm: the contract holds" in card
    assert re.search(r"mixes samples +no", card)
    assert "test/accuracy" in own and "AbsNorm on digits" in own
    assert re.search(
        r"^- .*\bAbsNorm\b.* do not depend on the norm batch size", report, re.MULTILINE
    )
    assert (folder / "runs" / "mine" / "report" / "index.html").is_file()


@pytest.mark.slow
def test_networks_of_others_train_with_another_norm(folder: Path):
    pytest.importorskip("transformers")
    maps, tokens, save, tuned, text = commands("Someone else's network")
    for command in (maps, tokens, text):
        assert "test/loss" in run(command, folder)
    run(save, folder)
    said = run(tuned, folder)
    assert "Plain" in said and "5.weight is 10x16, in the file 1000x16" in said
