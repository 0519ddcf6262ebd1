"""What a stranger finds: the changelog, the citation, the forms of .github/ and the notebook."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from normexp.training.records.schema import READERS, SCHEMA

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_changelog_begins_with_this_version():
    versions = re.findall(r"^## \[(.+)\] - \d{4}-\d\d-\d\d$", CHANGELOG, re.MULTILINE)
    assert versions[0] == PROJECT["version"]
    numbers = [tuple(map(int, version.split("."))) for version in versions]
    assert numbers == sorted(numbers, reverse=True)


def test_the_changelog_says_which_version_reads_which_records():
    this = PROJECT["version"].rpartition(".")[0]
    schemas = dict(re.findall(r"^\| ([\d.]+) \| (\d+) \| \w+ \|$", CHANGELOG, re.MULTILINE))
    assert schemas == {reader: str(schema) for schema, reader in [(SCHEMA, this), *READERS.items()]}


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == PROJECT["version"]
    assert citation["authors"] == PROJECT["authors"]
    assert citation["license"] == PROJECT["license"]


def test_forms_and_workflow_can_be_read():
    folder = ROOT / ".github"
    (job,) = yaml.safe_load((folder / "workflows" / "ci.yml").read_text())["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands and all((ROOT / command).is_file() for command in commands)
    for form in (folder / "ISSUE_TEMPLATE").iterdir():
        content = yaml.safe_load(form.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= set(content)
        assert all(part["attributes"] for part in content["body"])


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, own_module: Any, monkeypatch: pytest.MonkeyPatch):
    own_module("max_norm", "")  # the notebook writes it; afterwards it is forgotten
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "scripts" / "tour.ipynb").read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] or "import normexp\n" in cell["source"]
            exec("".join(cell["source"]), names)
    assert {run.settings["norm"] for run in names["results"]} == {"batch", "layer", "MaxNorm"}
    assert len(names["table"]) == 16 and len(names["rows"]) == 8
