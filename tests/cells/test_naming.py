"""Ids of cells: recorded ones stay, equal trainings share one, and the user's own parts count."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import zip_longest
from pathlib import Path

import pytest

from normexp.cells import naming
from normexp.cells.cell import prepare_cell
from normexp.config.compose import compose_cell
from normexp.config.help import group_choices

TEXT = "the quick brown fox jumps over the lazy dog, " * 200

# Recorded results are found by these. A change of one orphans them: a changed default or meaning
# raises a number in `VERSIONS` instead.
GOLDEN = {
    "": "batch-convnet-digits-b32-lr0.1-877afbf8e9",
    "norm=group": "group-convnet-digits-b32-lr0.1-561dc25e34",
    "norm=group norm.num_groups=4 eps=1e-3": "group-convnet-digits-b32-lr0.1-892f9668b4",
    "norm=batch norm_batch_size=2": "batch-convnet-digits-b32-n2-lr0.1-33da31c87d",
    "norm=batch micro_batch_size=16 norm_batch_size=8 optim=adamw lr=0.01": (
        "batch-convnet-digits-b32-m16-n8-lr0.01-de0d8c848e"
    ),
    "norm=frn": "frn-convnet-digits-b32-lr0.1-dc899c44a2",
    "norm=frn act=relu": "frn-convnet-digits-b32-lr0.1-f41b7f308a",
    "norm=batch norm.half_life=500 norm.momentum=null steps=40": (
        "batch-convnet-digits-b32-lr0.1-2c37b94953"
    ),
    "norm=layer lr_rule=momentum_aware batch_size=64": "layer-convnet-digits-b64-lr0.38-bb9ec38c29",
    "model=small_resnet model.width=8 norm=none residual_scale=0": (
        "none-small_resnet-digits-b32-lr0.1-ff1161b38f"
    ),
    "norm=batch_renorm steps=100": "batch_renorm-convnet-digits-b32-lr0.1-6a1f22cc52",
    "norm=instance data.augmentation.flip=true trainer.precision=64-true drop_last=false": (
        "instance-convnet-digits-b32-lr0.1-275841975b"
    ),
    "data=text_file data.path={text} model.width=16 model.depth=1 norm=rms placement=post": (
        "rms-gpt-text_file-b32-lr0.001-f56dea5c56"
    ),
    "norm=custom norm._target_=torch.nn.BatchNorm2d +norm.momentum=0.2": (
        "batchnorm2d-convnet-digits-b32-lr0.1-449ab65da9"
    ),
}


def id_of_words(*words: str) -> str:
    """The id of a cell, prepared as for training."""
    return prepare_cell(*compose_cell(words)).id


id_of_line = cache(id_of_words)


@pytest.mark.parametrize("line", GOLDEN)
def test_recorded_ids_stay(line: str, tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    assert id_of_line(*line.format(text=text).split()) == GOLDEN[line]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("micro_batch_size=8", "micro_batch_size=8 norm_batch_size=8"),
        ("steps=40", "epochs=1 samples=null steps=40"),
        ("norm=group", "norm=group norm.num_groups=8 act=relu seed=3 trainer=cpu"),
        ("norm=frn", "norm=frn act=tlu"),
        ("model=vit", "model=vit placement=pre model.init=depth_scaled"),
        ("model=vit norm=none residual_scale=0", "model=vit norm=none residual_scale=0.0"),
        ("norm_batch_size=16 trainer=cpu", "trainer=ddp trainer.accelerator=cpu"),
        (
            "optim=custom optim._target_=torch.optim.SGD lr=0.1",
            "optim=custom optim._target_=torch.optim.SGD lr=0.1 optim.decay_bias=true",
        ),
    ],
)
def test_two_ways_to_ask_for_one_training_have_one_id(one: str, other: str):
    assert id_of_line(*one.split()) == id_of_line(*other.split())


def test_a_raised_number_changes_the_ids_of_its_choice_alone(monkeypatch: pytest.MonkeyPatch):
    group, batch = id_of_line("norm=group"), id_of_line("norm=batch")
    monkeypatch.setitem(naming.VERSIONS, "norm/group", 2)
    assert id_of_words("norm=group") != group
    assert id_of_words("norm=batch") == batch
    monkeypatch.setitem(naming.VERSIONS, "config", 2)
    assert id_of_words("norm=batch") != batch


@pytest.mark.slow
def test_shipped_choices_are_named_and_none_of_their_values_is_hashed():
    """A new knob, or a class that moves, does not change recorded ids."""
    own = ("custom", "text_file", "image_folder")
    choices = {
        group: [
            name
            for name in group_choices(group)
            if name not in own and f"{group}/{name}" not in naming.VERSIONS
        ][:: 5 if group == "norm" else 1]
        for group in naming.GROUPS
    }
    for names in zip_longest(*choices.values()):  # one choice of each group, as long as they last
        chosen = {group: name for group, name in zip(choices, names, strict=True) if name}
        cfg, _ = compose_cell([f"{group}={name}" for group, name in chosen.items()])
        defining = naming.defining_values(naming.plain(cfg))
        for group, name in chosen.items():
            assert naming.content_of(group, name, defining[group]) == {"choice": name}


@pytest.mark.parametrize(
    ("target", "knobs", "content"),
    [
        ("group.GroupNorm", {"num_groups": 4}, {"_target_": "norm/group"}),
        ("zoo.power.PowerNorm", {"warmup": 1.0}, {"_target_": "norm/power", "version": 2}),
    ],
)
def test_a_shipped_class_stands_by_its_choice_in_a_yaml_of_the_users(target, knobs, content):
    own = {"_target_": f"normexp.norms.{target}", **knobs}
    assert naming.content_of("norm", "mine", own) == content | knobs


def test_an_edited_module_of_the_users_is_another_training(
    tmp_path: Path, own_module: Callable[[str, str], Path]
):
    source = "from torch import nn\n\n\nclass Own(nn.BatchNorm2d):\n    pass\n"
    file = own_module("own_norm", source)
    words = ["norm=custom", "norm._target_=own_norm.Own"]
    before = id_of_words(*words)
    assert before.startswith("own-convnet-digits-b32-lr0.1-")
    file.write_text(source + "# edited\n")
    assert id_of_words(*words) == before  # what this process has imported
    own_module("own_norm", source + "# edited\n")
    assert id_of_words(*words) != before
    folder = tmp_path / "conf" / "norm"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("_target_: own_norm.Own\n_partial_: true\n")
    by_yaml = prepare_cell(*compose_cell(["norm=mine"], [str(folder.parent)]))
    assert by_yaml.id == id_of_words(*words)  # the same training
    assert by_yaml.record["norm"] == "mine"


def test_content_of_the_users_data_counts_and_its_place_does_not(tmp_path: Path):
    ids = []
    for name, text in (("a", TEXT), ("b", TEXT), ("c", TEXT.replace("lazy", "eager"))):
        (tmp_path / name).write_text(text)
        words = [
            "model.width=16",
            "model.depth=1",
            "data=text_file",
            f"data.path={tmp_path / name}",
        ]
        ids.append(id_of_words("norm=layer", *words))
    assert ids[0] == ids[1] != ids[2]


def test_a_name_with_a_folder_is_readable_in_the_slug():
    choice = next(name for name in group_choices("norm") if "/" in name)
    assert id_of_words(f"norm={choice}").startswith(choice.rpartition("/")[2])
