"""The key `cells`: several keys that vary together, multiplied by the grid."""

from __future__ import annotations

from pathlib import Path

import pytest

from normexp.cli import parse_command
from normexp.config.grid import compose_cells
from normexp.search.points import plan_searches
from normexp.train import main

LISTED = "cells=[{norm:batch,lr:1.0},{norm:group,lr:0.3,norm.num_groups:4}]"
RECIPE = """\
# @package _global_
cells:
  - {norm: batch, lr: 1.0, study: "7"}
  - {norm: group, lr: 0.3, norm.num_groups: 4}
study: mine
hydra:
  sweeper:
    params:
      norm_batch_size: 2,8
"""
TITLES = [
    f"{listed} norm_batch_size={size}"
    for listed in ("norm=batch lr=1.0", "norm=group lr=0.3 norm.num_groups=4")
    for size in (2, 8)
]


@pytest.fixture
def recipe(tmp_path: Path) -> list[str]:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(RECIPE)
    return ["--config-dir", str(tmp_path), "experiment=mine"]


def test_listed_cells_are_multiplied_by_the_grid(recipe: list[str]):
    typed = compose_cells(parse_command(["-m", LISTED, "norm_batch_size=2,8"]))
    cells = compose_cells(parse_command(recipe))
    assert [cell.title for cell in typed] == TITLES
    assert [cell.title.replace(" study='7'", "") for cell in cells] == TITLES
    assert [cell.cfg.study for cell in cells if cell.cfg] == ["7", "7", "mine", "mine"]  # a text
    single = compose_cells(parse_command(TITLES[3].split()))[0]
    assert typed[3].digest == single.digest  # the training is that of the cell alone
    assert typed[3].cfg is not None and typed[3].cfg.cells is None


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["cells=[{norm:batch,batch_sise:8},{norm:group}]"], ["batch_sise", "batch_size"]),
        (["cells=[{norm:grop},{norm:group}]"], ["norm=grop", "group"]),
        (["cells=[{norm:batch,lr:1.0},{norm:group}]", "lr=0.1,0.3"], ["lr=0.1,0.3", "cells"]),
        (["cells=[{lr:1.0}]", "lr=0.1"], ["lr=0.1", "cells"]),
        (["cells=[]"], ["cells=[]", "a list of cells"]),
        (["cells=batch"], ["cells=batch", "a list of cells"]),
        (["cells=[{norm:{num_groups:4}}]"], ["cells=", "dotted"]),
        (["cells=[{lr:1.0}],[{lr:2.0}]"], ["cells=", "one list"]),
    ],
)
def test_mistake_in_a_listed_cell_is_one_message(
    tmp_path: Path, words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
):
    assert main(["-m", *words, f"runs_dir={tmp_path / 'runs'}"]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert all(part in told for part in parts), told
    assert not (tmp_path / "runs").exists()


def test_each_listed_cell_has_a_search_of_its_own():
    searches = plan_searches(parse_command([LISTED.replace("lr", "eps"), "lr=choice(0.1,1)"]))
    assert [search.title for search in searches] == [
        "norm=batch eps=1.0",
        "norm=group eps=0.3 norm.num_groups=4",
    ]
