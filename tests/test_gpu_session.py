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
from normexp.config.rules import validate
from normexp.search.points import plan_searches

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


def test_its_study_searches_a_rate_for_every_norm_and_size():
    searches = plan_searches(parse_command(["experiment=cifar10_full", "data.root=PATH"]))
    assert len(searches) == 4 * 5
    for search in (searches[0], searches[-1]):
        config = compose_config([*search.fixed, "lr=0.1"])
        validate(config)
        assert (config["study"], config["replicas"]) == ("cifar10_full", 5)
        assert config["tune"]["seeds"] == 2


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
            studies = {Path(name).parts[1] for name in archive.getnames() if "/" in name}
        assert {"cifar10_full", "cifar10_full_long"} <= studies
        tables = [(tmp_path / f"{study}.csv").read_text() for study in studies]
        assert all(len(table.splitlines()) > 1 for table in tables)
