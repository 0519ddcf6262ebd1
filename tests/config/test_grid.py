"""A sweep lists the cells that Hydra's basic sweeper would launch, in its order."""

from __future__ import annotations

from pathlib import Path

import pytest

from normexp.cli import parse_command
from normexp.errors import UserError
from normexp.training.config.choices import words_of
from normexp.training.config.command import compose_cells


def expand_grid(words: list[str]) -> list[list[str]]:
    """The words of each point."""
    points = parse_command(["-m", *words]).lines()
    return [[*words_of(point).values()] for point in points]


def test_grid_is_the_product_with_the_first_key_slowest():
    cells = expand_grid(["optim=sgd,adamw", "batch_size=2,8", "+optim.extra=1"])
    assert cells == [
        [f"optim={optim}", f"batch_size={size}", "+optim.extra=1"]
        for optim in ("sgd", "adamw")
        for size in (2, 8)
    ]


@pytest.mark.parametrize(
    ("sweep", "values"),
    [
        ("seed=range(1,4)", ["1", "2", "3"]),
        ("lr=choice(0.1,0.3)", ["0.1", "0.3"]),
        ("lr=range(0.2,0.9,0.2)", ["0.2", "0.4", "0.6", "0.8"]),  # not 0.6000000000000001
        ("lr=range(-0.2,0.3,0.1)", ["-0.2", "-0.1", "0.0", "0.1", "0.2"]),  # not 2.8e-17
        ("study='a b','c'", ["'a b'", "'c'"]),
        ("study=2026_10,1e5,x", ["'2026_10'", "'1e5'", "x"]),  # as typed, not 202610
        ("logger=[csv],[csv,wandb]", ["[csv]", "[csv,wandb]"]),
        ("optim=glob(*,exclude=[s*,m*])", ["adamw"]),
        ("batch_size=sort(8,2,reverse=true)", ["8", "2"]),
        ("norm=glob([*n_hw,scale])", ["scale"]),  # a folder only by its name
        ("norm=glob(deviations/ln_h*)", ["deviations/ln_hw"]),
        ("norm=glob([scale,deviations/ln_h*])", ["deviations/ln_hw", "scale"]),
    ],
)
def test_each_kind_of_sweep_is_listed(sweep: str, values: list[str]):
    key = sweep.partition("=")[0]
    assert expand_grid([sweep]) == [[f"{key}={value}"] for value in values]


def test_a_knob_is_that_of_the_swept_choice():
    words = ["-m", "norm=group,group_ws", "norm.num_groups=4"]
    groups = [cell.config["norm"]["num_groups"] for cell in compose_cells(parse_command(words))]
    assert groups == [4, 4]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["lr=interval(0.1,1)"], "lr=interval(0.1,1)"),
        (["optim=glob(zzz*)"], "optim=glob(zzz*)"),
        (["optim=sgdd,adamww"], "optim=sgdd"),  # none composes
        (["norm=batch,group,layer", "norm.num_groups=2"], "num_groups: only norm=group takes it"),
        (["norm=batch,layer", "norm.num_groups=2"], "num_groups: unknown key of norm=batch"),
    ],
)
def test_sweep_of_nothing_that_trains_is_refused(words: list[str], part: str):
    with pytest.raises(UserError) as caught:
        compose_cells(parse_command(["-m", *words]))
    assert part in str(caught.value) and "\n" not in str(caught.value)


RECIPE = """\
# @package _global_
hydra:
  mode: MULTIRUN
  sweeper:
    params:
      optim: sgd,adamw
      batch_size: 2,8
study: mine
"""


@pytest.fixture
def recipe_dir(tmp_path: Path) -> str:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(RECIPE)
    return str(tmp_path)


def test_params_of_an_experiment_are_swept_with_and_without_m(recipe_dir: str):
    expected = [
        {"optim": f"optim={optim}", "batch_size": f"batch_size={size}"}
        for optim in ("sgd", "adamw")
        for size in (2, 8)
    ]
    for flags in (["-m"], []):
        line = [*flags, "--config-dir", recipe_dir, "experiment=mine"]
        command = parse_command(line)
        typed = words_of(command.overrides)
        assert [*map(words_of, command.lines())] == [point | typed for point in expected]


def test_command_line_replaces_a_param_of_the_experiment(recipe_dir: str):
    line = ["-m", "--config-dir", recipe_dir, "experiment=mine", "batch_size=4"]
    cells = [cell.config for cell in compose_cells(parse_command(line))]
    assert [cell["optim"]["default_lr"] for cell in cells] == [0.1, 1e-3]
    assert [cell["batch_size"] for cell in cells] == [4, 4]
    assert {cell["study"] for cell in cells} == {"mine"}


def test_a_value_that_cannot_be_trained_is_a_row_of_a_sweep_and_refused_if_all_have_it():
    with pytest.raises(UserError, match="norm_batch_size=3 does not divide"):
        compose_cells(parse_command(["norm_batch_size=3"]))
    good, bad = compose_cells(parse_command(["-m", "norm_batch_size=2,3"]))
    assert not good.error and "norm_batch_size=3 does not divide" in bad.error
    assert bad.title == "norm=batch batch_size=32 norm_batch_size=3"
    for words in (["norm=group"], ["-m", "norm=batch,group"], ["-m", "norm=group", "lr=1,2"]):
        with pytest.raises(UserError, match="replicas=0: must be"):
            compose_cells(parse_command([*words, "replicas=0"]))


def test_points_of_a_grid_with_one_id_are_one_cell_of_a_study_with_all_seeds():
    line = ["-m", "norm=batch,group", "norm_batch_size=2,8", "seed=0,4"]
    cells = compose_cells(parse_command(line))
    assert len(cells) == 3 and len({cell.id for cell in cells}) == 3
    with pytest.raises(UserError, match="^study=a,b: must be the same in all cells; set"):
        compose_cells(parse_command([*line, "study=a,b"]))
    assert {tuple(cell.seeds) for cell in cells} == {tuple(range(8))}
    assert cells[-1].title == "norm=group batch_size=32"
    (cell,) = compose_cells(parse_command(["-m", "replicas=2,4"]))
    assert cell.seeds == [0, 1, 2, 3]
