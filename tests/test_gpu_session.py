"""scripts/gpu_session.sh: each part works on a CPU, as small as can be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from normexp.cli import parse_command
from normexp.config.compose import compose_config
from normexp.config.grid import list_cells
from normexp.config.rules import validate

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_session.sh"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"SMOKE": "1", "PYTHON": sys.executable}
    return subprocess.run(
        [SCRIPT, *words], env=environment, capture_output=True, text=True, check=False
    )


def test_an_unknown_part_is_refused(tmp_path: Path):
    for words in ([], ["check"], ["all", str(tmp_path)]):
        refused = run(*words)
        assert refused.returncode == 2 and "PART OUT" in refused.stderr


def test_its_study_is_a_grid_of_rates_at_two_budgets():
    cells = list_cells(parse_command(["experiment=cifar10_full", "data.root=PATH"]))
    assert len(cells) == 2 * 4 * 5 * 5
    grid = [compose_config(cells[index]) for index in (0, -1)]
    for config in grid:
        validate(config)
        assert (config["study"], config["replicas"]) == ("cifar10_full", 5)
    assert [(config["epochs"], config["lr"]) for config in grid] == [(10, 0.01), (40, 1.0)]


OPTIONAL = ["altair", "babel", "mlxtend", "vl_convert", "wandb", "tensorboard", "timm"]
# Trains where neither a package nor its version can be found.
WITHOUT_OPTIONAL = f"""
import sys
from importlib.metadata import Distribution, PackageNotFoundError

class Nothing:
    def find_spec(self, name, *_):
        if name.split(".")[0] in {OPTIONAL}:
            raise ModuleNotFoundError(name, name=name)

def from_name(name, found=Distribution.from_name):
    if name.replace("-", "_") in {OPTIONAL}:
        raise PackageNotFoundError(name)
    return found(name)

sys.meta_path.insert(0, Nothing())
Distribution.from_name = from_name
from normexp.train import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("data", ["digits", "manual model=gpt"])
def test_a_training_needs_no_optional_package(tmp_path: Path, data: str):
    words = [*f"norm=batch steps=2 trainer=cpu data={data}".split(), f"runs_dir={tmp_path}"]
    command = [sys.executable, "-c", WITHOUT_OPTIONAL, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and list(tmp_path.rglob("result.json")), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("part", ["check", "speed", "study"])
def test_a_part_works_on_a_cpu(tmp_path: Path, part: str):
    done = run(part, str(tmp_path))
    assert done.returncode == 0, (tmp_path / f"{part}.log").read_text()[-4000:]
    if part == "check":
        assert " equal\n" in (tmp_path / "check.log").read_text()
    elif part == "speed":
        rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
        assert {"step", "norm=batch", "study", "profile"} <= {
            word for row in rows for word in row["what"].replace(",", "").split()
        }
        assert all(row["value"] is not None for row in rows)
        assert (tmp_path / "profile-2.txt").is_file()
    else:
        with tarfile.open(tmp_path / "runs.tar.gz") as archive:
            ended = [name for name in archive.getnames() if name.endswith("result.json")]
        table = (tmp_path / "cifar10_full.csv").read_text().splitlines()
        # Two budgets and rates, two seeds: batch norm at two sizes, and group norm.
        assert len(ended) == len(table) - 1 == 2 * 2 * 2 * 3
