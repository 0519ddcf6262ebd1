"""README.md and the guides in conf/ do what they say: commands, files, own parts, Python."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from train_cases import QUICK, files

import normexp
from normexp.cli import parse_command, read_options, split_options
from normexp.errors import UserError
from normexp.train import main
from normexp.training.checks import assert_contract
from normexp.training.config.command import compose_norms
from normexp.training.config.compose import compose_cell
from normexp.training.config.help import help_text
from normexp.training.config.validate import read_settings
from normexp.training.records.result import Result
from normexp.training.search.points import plan_searches

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
AGENTS = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
GUIDE = "\n".join(
    (ROOT / "conf" / folder / "README.md").read_text(encoding="utf-8")
    for folder in (".", "norm", "model", "data", "../normexp")
)
INDENTED = [
    line.strip() for line in f"{README}\n{AGENTS}\n{GUIDE}".splitlines() if line.startswith("    ")
]
COMMANDS = [
    line.split("# ")[0].strip() for line in INDENTED if line.startswith("python -m normexp.")
]
PYTHON = (ROOT / "normexp" / "README.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", GUIDE, flags=re.DOTALL | re.MULTILINE))
FILES = dict(re.findall(r"as\s`(my_\w+\.py)`:\n\n```python\n(.*?)```", GUIDE, flags=re.DOTALL))


@pytest.mark.parametrize("command", COMMANDS)
def test_command_is_understood(command: str, own_module: Callable[[str, str], Path]):
    own_module("my_norm", "class MyNorm: ...\nclass AbsNorm: ...")
    _, _, module, *words = shlex.split(command)
    entry = module.removeprefix("normexp.")
    if "--help" in words:
        assert help_text(entry)
    elif entry == "train":
        cells = parse_command(words).lines()
        for cell in (cells[0], cells[-1]):
            read_settings(compose_cell(cell)[0])
    elif entry == "tune":
        assert plan_searches(parse_command(words))
    elif entry in ("check", "benchmark"):
        assert compose_norms(parse_command(split_options(entry, words)[1]))
    else:
        assert read_options(entry, words)


def test_the_tree_and_the_spine_exist_and_hold_every_package():
    words = SECTIONS["Read the code"]
    named = set(re.findall(r"(\w+(?:/\w+)*(?:/|\.py))(?=[`\s])", words))
    for name in named:
        places = (ROOT, ROOT / "normexp", ROOT / "scripts")
        assert any((place / name).exists() for place in places), name
    packages = {p.name + "/" for p in (ROOT / "normexp").iterdir() if (p / "__init__.py").exists()}
    assert packages <= named


@pytest.mark.parametrize("house", ["any_network"])
def test_the_page_of_a_house_names_all_of_its_files(house: str):
    folder = ROOT / "normexp" / house
    named = set(
        re.findall(r"^\| .* \| `(\w+\.py)` \|$", (folder / "README.md").read_text(), re.MULTILINE)
    )
    files = {f.name for f in folder.rglob("*.py") if f != folder / "__init__.py"}
    assert named == files


def test_links_of_the_guides_lead_somewhere():
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / ".github" / "CONTRIBUTING.md"]
    for file in (*pages, ROOT / "scripts" / "tour.ipynb", *(ROOT / "conf").rglob("README.md")):
        text = file.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#:]+)[^):]*\)", text):
            assert (file.parent / link).exists(), f"{file}: {link}"


def test_pictures_of_the_readme_exist():
    for path in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README):
        assert (ROOT / path).is_file(), path


# --- The guides in conf/ -------------------------------------------------------------------------


def commands(section: str) -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", SECTIONS[section], flags=re.DOTALL)
    return "".join(blocks).splitlines()


@pytest.fixture
def folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_module: Callable[[str, str], Path]
) -> Path:
    """A folder with the files of the guide, in which its commands are typed."""
    for name, code in FILES.items():
        own_module(name.removesuffix(".py"), code)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_norms_of_guide_and_readme_keep_the_contract():
    short = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)[0]
    for source in (FILES["my_norm.py"], short):
        names: dict[str, type] = {}
        exec(source, names)
        assert_contract(names["AbsNorm"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "name"),
    [
        ("A model that takes norms", "Tiny"),
        ("A data set of your own", "stripes"),
        ("Optimizer", "RMSprop"),
        ("Learning rate schedule", "triangle"),
        ("Callback", "ClipWeights"),
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
def test_a_logger_gets_the_losses_of_every_run(folder: Path):
    (command,) = commands("Logger")
    assert main([*shlex.split(command)[3:], "replicas=2"]) == 0
    logged = [
        path
        for path, text in files(folder / "runs").items()
        if path.endswith("metrics.csv") and b"train/loss" in text
    ]
    assert len(logged) == 4  # one of normexp's own and one of the logger for each of two runs


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec", "ignore:.*num_workers")
def test_a_trainer_of_ones_own_trains_the_module_of_the_guide(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", SECTIONS["With a Trainer of your own"], re.DOTALL)
    exec(code, {})
    assert re.search(r"tensor\(0\.[5-9]", capsys.readouterr().out)


@pytest.mark.slow
def test_the_diagnosis_of_the_guide_prints_its_steps(capsys):
    (code,) = re.findall(
        r"```python\n(.*?)```",
        SECTIONS["Why does my network evaluate worse than it trains?"],
        re.DOTALL,
    )
    exec(code, {})
    assert "running averages" in capsys.readouterr().out


@pytest.mark.slow
def test_the_network_of_the_guide_has_other_norms(caplog: pytest.LogCaptureFixture):
    section = SECTIONS["Other norms in a loop of your own"]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    exec(code, {})
    assert "replaced 47 BatchNorm2d" in caplog.text


def test_the_loop_of_the_readme_diagnoses_and_replaces(capsys, caplog: pytest.LogCaptureFixture):
    code = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)[1]
    images = torch.randn(4, 3, 8, 8)
    names: dict[str, Any] = {
        "model": nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 2)
        ),
        "batches": [(images, torch.tensor([0, 1, 0, 1]))] * 8,
        "loss": nn.functional.cross_entropy,
        "images": images,
    }
    exec(code, names)
    assert "running averages" in capsys.readouterr().out
    assert "replaced 1 BatchNorm2d" in caplog.text
    assert "1.norm.weight" in names["model"].state_dict()


@pytest.mark.slow
def test_the_exported_network_of_the_guide_equals_the_trained_one(folder: Path):
    (code,) = re.findall(r"```python\n(.*?)```", SECTIONS["Weights for other programs"], re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    trained, images = normexp.load(names["run_dir"]), names["images"]
    inputs = names["Normalize"](names["data"]["mean"], names["data"]["std"])(images)
    torch.testing.assert_close(names["deployed"](images), trained(inputs))
    torch.testing.assert_close(names["program"].module()(images), trained(inputs))
    colour = names["Normalize"]((0.5, 0.4, 0.3), (0.2, 0.3, 0.2))
    program = torch.export.export(colour, (images := torch.rand(2, 3, 8, 8),))
    torch.testing.assert_close(program.module()(images), colour(images))
    assert folder == Path.cwd()


@pytest.mark.slow
def test_the_python_of_the_guide_prints_the_recorded_accuracy(folder: Path, capsys):
    code = re.findall(r"```python\n(.*?)```", PYTHON, flags=re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(code, names)
    results, table = names["results"], names["table"]
    assert [(run.settings["norm"], run.seed) for run in results] == [
        (norm, seed) for norm in ("batch", "group") for seed in range(4)
    ]
    assert len(table) == 8
    printed = re.search(r"tensor\((.+?)\)", capsys.readouterr().out.splitlines()[-1])
    assert float(printed[1]) == pytest.approx(results[0].metrics["test/accuracy"], abs=1e-4)
    assert folder == Path.cwd()


def test_a_norm_and_a_model_cost_a_file_and_a_yaml_each(folder: Path, capsys):
    yamls = re.findall(r"```yaml\n(.*?)```", GUIDE, flags=re.DOTALL)
    for group, text in zip(("norm", "model"), yamls, strict=True):
        path = folder / "my_conf" / group / "mine.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    words = ["--config-dir", "my_conf", "norm=mine", "model=mine", *QUICK]
    assert main(words) == 0
    assert "mine on digits: trained" in capsys.readouterr().out
    first, second = normexp.run(words)  # recorded
    assert (first.settings["norm"], first.settings["model"], second.seed) == ("mine", "mine", 1)
    assert first.settings["norm._target_"] == "my_norm.AbsNorm"
    assert first.settings["model.width"] == 8


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
    typed = commands("A norm in five minutes")
    card, trained, report = [run(command, folder) for command in typed]
    assert "AbsNorm: the contract holds" in card
    assert re.search(r"mixes samples +no", card)
    assert "test/accuracy" in trained and "my_norm.AbsNorm" in trained
    assert re.search(r"^ AbsNorm +[\d.]+ \[.*same", report, re.MULTILINE)
    assert (folder / "runs" / "mine" / "report" / "index.html").is_file()


@pytest.mark.slow
def test_the_comparison_of_the_readme_takes_its_own_norm(folder: Path):
    code = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)[0]
    (folder / "my_norm.py").write_text(code)
    train_line, report_line = re.findall(r"^    (python -m .*)$", README, flags=re.MULTILINE)[:2]
    for old, new in (("norm=batch,layer", "norm=batch,layer,my_norm.AbsNorm"), ("400", "4")):
        assert old in train_line
        train_line = train_line.replace(old, new)
    run(train_line, folder)
    assert re.search(r"^ AbsNorm .*same", run(report_line, folder), re.MULTILINE)


@pytest.mark.slow
def test_networks_of_others_train_with_another_norm(folder: Path):
    pytest.importorskip("transformers")
    maps, tokens, swap, pixels, save, tuned, text = commands("Someone else's network")
    for command in (maps, tokens, pixels, text):
        assert "test/loss" in run(command, folder)
    assert "norm=as_built" in run(swap, folder)
    run(save, folder)
    said = run(tuned, folder)
    assert "5.weight is 10x16, in the file 1000x16" in said


# --- normexp.run --------------------------------------------------------------------------------


def train(tmp_path: Path, *words: str, workers: int = 0) -> list[Result]:
    quick = [word for word in QUICK if not word.startswith("workers")]
    places = [f"runs_dir={tmp_path / 'runs'}", f"data_dir={tmp_path / 'data'}"]
    return normexp.run([*words, *quick, *places], workers=workers)


def test_a_cell_is_trained_once_and_found_by_every_other_way(tmp_path: Path):
    assert train(tmp_path, "norm=group", "dry_run=true") == [] and not files(tmp_path)
    results = train(tmp_path, "norm=group")
    assert [(result.seed, result.status) for result in results] == [
        (0, "finished"),
        (1, "finished"),
    ]
    assert results[0].settings["norm"] == "group"
    before = files(tmp_path)
    assert train(tmp_path, "norm=group") == results
    assert main(["norm=group", *QUICK, f"runs_dir={tmp_path / 'runs'}"]) == 0
    recorded = {name: text for name, text in files(tmp_path).items() if "seed-" in name}
    assert recorded == {name: text for name, text in before.items() if "seed-" in name}
    table = normexp.load_study("default", tmp_path / "runs")
    assert sorted(table["seed"]) == [0, 1]
    cell_dir = tmp_path / "runs" / "default" / results[0].cell_id
    assert not normexp.load(cell_dir / "seed-1").training


@pytest.mark.parametrize(
    ("words", "workers", "expected"),
    [("", None, 0), ("workers=2", None, None), ("workers=2", 0, 0), ("", 3, 3)],
)
def test_workers_are_those_that_are_typed(words: str, workers: int | None, expected, monkeypatch):
    """None: those of the config, which has the words."""
    asked = []

    def noted(_cells, _command, *, workers):
        asked.append(workers)
        raise UserError("enough")

    monkeypatch.setattr("normexp.training.sweeps.sweep.train_cells", noted)
    with pytest.raises(UserError, match="enough"):
        normexp.run(words, workers=workers)
    assert asked == [expected]


def test_a_sweep_returns_each_run_once(tmp_path: Path):
    results = train(tmp_path, "-m", "norm=group", "norm_batch_size=8,32")  # the same training
    assert [(result.settings["norm"], result.seed) for result in results] == [
        ("group", 0),
        ("group", 1),
    ]


@pytest.mark.slow
def test_a_mistake_is_raised_after_the_other_cells(tmp_path: Path):
    with pytest.raises(UserError, match="norm_batch_size=5 does not divide"):
        train(tmp_path, "-m", "norm_batch_size=5,8")
    assert len(normexp.load_study("default", tmp_path / "runs")) == 2
    for words in (["norm=grup"], ["--cfg", "job"], ["-m", "hydra/launcher=ray"], ["--nothing"]):
        with pytest.raises(UserError):
            normexp.run(words)


def test_importing_normexp_is_light():
    script = "import sys, normexp; sys.exit(bool({'torch', 'hydra', 'pandas'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
