"""Ids of cells: recorded ones stay, equal configs share one, and the user's own files count."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from normexp.cli import parse_command
from normexp.errors import UserError
from normexp.training.config import identity
from normexp.training.config.choices import parse_overrides
from normexp.training.config.command import compose_cells
from normexp.training.config.compose import compose_cell
from normexp.training.config.groups import group_choices, shipped_defaults
from normexp.training.config.identity import cell_id, differences
from normexp.training.config.sizes import Sizes
from normexp.training.config.spec import CellSpec

# Recorded results are found by these. A change of one orphans them: a changed default or meaning
# raises a number in `VERSIONS` instead.
GOLDEN = {
    "": "batch-convnet-digits-b32-lr0.1-98cf2ed2b7",
    "norm=group": "group-convnet-digits-b32-lr0.1-8b95d7bb27",
    "norm=group norm.num_groups=4 eps=1e-3": "group-convnet-digits-b32-lr0.1-003ed0a6ab",
    "norm=batch norm_batch_size=2": "batch-convnet-digits-b32-n2-lr0.1-a974251a5f",
    "norm=batch micro_batch_size=16 norm_batch_size=8 optim=adamw lr=0.01": (
        "batch-convnet-digits-b32-m16-n8-lr0.01-ad76bd8f33"
    ),
    "norm=frn": "frn-convnet-digits-b32-lr0.1-c1f9a76b03",
    "norm=frn act=relu": "frn-convnet-digits-b32-lr0.1-811cea5f1e",
    "norm=batch norm.half_life=500 norm.momentum=null steps=40": (
        "batch-convnet-digits-b32-lr0.1-9a94b1f05e"
    ),
    "norm=layer lr_rule=momentum_aware batch_size=64": "layer-convnet-digits-b64-lr0.1-e342068244",
    "model=small_resnet model.width=8 norm=none residual_scale=0": (
        "none-small_resnet-digits-b32-lr0.1-5e02f63955"
    ),
    "norm=batch_renorm steps=100": "batch_renorm-convnet-digits-b32-lr0.1-e0d9dc370e",
    "norm=instance data.augmentation.flip=true trainer.precision=64-true drop_last=false": (
        "instance-convnet-digits-b32-lr0.1-a60d30228a"
    ),
    "norm=sync trainer=ddp callback=early_stopping val_every_epochs=2": (
        "sync-convnet-digits-b32-lr0.1-2641aa1301"
    ),
    "data=shakespeare norm=rms": "rms-gpt-shakespeare-b32-lr0.001-a25673a668",
    "data=text_file data.path=text.txt model.width=16 model.depth=1 norm=rms placement=post": (
        "rms-gpt-text_file-b32-lr0.001-be13848a31"
    ),
    "schedule=one_cycle schedule.warmup=0.2": "batch-convnet-digits-b32-lr0.1-a5d1ab391e",
    "optim=torch.optim.RMSprop lr=0.1 schedule=linear": (
        "batch-convnet-digits-b32-lr0.1-4e73d1b636"
    ),
    "schedule=torch.optim.lr_scheduler.StepLR schedule.step_size=3 val_every_epochs=2": (
        "batch-convnet-digits-b32-lr0.1-9d18555f12"
    ),
    "model=timm model.name=resnet18 norm=group": "group-resnet18-digits-b32-lr0.1-9e9d64d802",
    "model=torchvision model.name=resnet50": "batch-resnet50-digits-b32-lr0.1-17d03722bd",
    "norm=custom norm._target_=torch.nn.BatchNorm2d +norm.momentum=0.2": (
        "batchnorm2d-convnet-digits-b32-lr0.1-ea05f00a04"
    ),
}


def spec_of(*words: str) -> CellSpec:
    return CellSpec(*compose_cell(parse_overrides(words)))


def id_of(line: str) -> str:
    return spec_of(*line.split()).id


@pytest.mark.parametrize("line", GOLDEN)
def test_recorded_ids_stay(line: str):
    assert id_of(line) == GOLDEN[line]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("batch_size=32", "micro_batch_size=32 norm_batch_size=32"),
        ("micro_batch_size=8", "micro_batch_size=8 norm_batch_size=8"),
        ("norm=group", "norm=group norm.num_groups=8 seed=3 trainer=cpu"),
        ("model=vit", "model=vit model.init=depth_scaled"),
        ("model=vit norm=none residual_scale=0", "model=vit norm=none residual_scale=0.0"),
        ("norm_batch_size=16 trainer=cpu", "trainer=ddp trainer.accelerator=cpu"),
        ("norm=sync trainer=cpu", "norm=sync trainer=ddp trainer.accelerator=cpu"),
        ("norm=sync trainer=cpu", "norm=sync trainer=ddp norm.running_from=group"),
        (
            "optim=custom optim._target_=torch.optim.SGD lr=0.1",
            "optim=custom optim._target_=torch.optim.SGD lr=0.1 optim.decay_bias=true",
        ),
        ("callback=early_stopping", "callback=early_stopping val_every_epochs=1"),
    ],
)
def test_equal_configs_have_one_id(one: str, other: str):
    assert id_of(one) == id_of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("norm=sync", "norm=batch"),
        ("norm=batch trainer=cpu", "norm=batch trainer=ddp"),
        ("callback=early_stopping", "callback=early_stopping val_every_epochs=2"),
        (
            "norm=custom norm._target_=torch.nn.SyncBatchNorm trainer=ddp",  # may split, or not
            "norm=custom norm._target_=torch.nn.SyncBatchNorm norm_batch_size=16",
        ),
    ],
)
def test_other_trainings_have_other_ids(one: str, other: str):
    assert id_of(one) != id_of(other)


def test_a_norm_declared_not_to_mix_samples_has_one_id_for_all_norm_batch_sizes():
    foreign = "norm=torch.nn.GroupNorm norm.num_groups=2"
    for line in ("norm=group micro_batch_size=16 lr=0.2", f"{foreign} norm.mixes_samples=false"):
        for split in ("norm_batch_size=2", "trainer=ddp", "trainer=ddp norm_batch_size=2"):
            assert id_of(f"{line} {split}") == id_of(line)
    assert id_of(f"{foreign} norm.mixes_samples=false") == id_of(foreign)
    assert id_of(f"{foreign} norm_batch_size=2") != id_of(foreign)  # not declared


BASE = "class Base:\n    mixes_samples = False\n"


@pytest.mark.parametrize(
    ("source", "is_declared"),
    [
        ("class Own:\n    mixes_samples = False", True),
        ("class Own:\n    mixes_samples: bool = False", True),
        ("class Base:\n    mixes_samples = False\nclass Own(Base): ...", True),
        ("from declared_base import Own", True),
        ("class Own:\n    mixes_samples = True", False),
        ("class Own:\n    def f(self):\n        mixes_samples = False", False),
        ("class Other:\n    mixes_samples = False\nclass Own: ...", False),
        ("class Own:\n    mixes_samples = True\n    mixes_samples = False", True),
        (f"{BASE}class Own(Base):\n    mixes_samples = True", False),
        (f"{BASE}class Own(Base):\n    mixes_samples: bool", True),
        (f"{BASE}class Twice(Base): ...\nclass Own(Twice, Base): ...", True),
    ],
)
def test_a_class_may_declare_it_too(
    source: str, is_declared: bool, own_module: Callable[[str, str], Path]
):
    own_module("declared_base", "class Own:\n    mixes_samples = False")
    own_module("declared", source)

    def num_cells(*words: str) -> int:
        return len(compose_cells(parse_command([*words, "norm=declared.Own"])))

    sizes = ("-m", "norm_batch_size=2,32")
    assert num_cells(*sizes) == (1 if is_declared else 2)
    assert num_cells(*sizes, "norm.mixes_samples=true") == 2  # what is typed wins
    assert num_cells("experiment=benchmark1/gpt", "lr=0.01") == (1 if is_declared else 2)


@pytest.mark.parametrize(
    "body",
    [
        "mixes_samples = not False",
        "mixes_samples, other = True, 2",
        "mixes_samples = None",
        "@property\n    def mixes_samples(self): return True",
        "from os import sep as mixes_samples",
        "if True:\n        mixes_samples = True",
        "mixes_samples = True\n    mixes_samples &= True",
    ],
)
def test_what_cannot_be_read_as_true_or_false_is_refused(
    body: str, own_module: Callable[[str, str], Path]
):
    own_module("unread", f"{BASE}class Own(Base):\n    {body}")
    match = "mixes_samples cannot be read as True or False in class Own; write"
    with pytest.raises(UserError, match=match):
        compose_cells(parse_command(["norm=unread.Own"]))
    typed = compose_cells(parse_command(["norm=unread.Own", "norm.mixes_samples=true"]))
    assert typed[0].settings.norm.may_mix_samples


def test_bases_that_disagree_are_refused(own_module: Callable[[str, str], Path]):
    own_module(
        "split", f"{BASE}class Other:\n    mixes_samples = True\nclass Own(Base, Other): ..."
    )
    with pytest.raises(UserError, match="is True in one base of class Own and False in another"):
        compose_cells(parse_command(["norm=split.Own"]))


@pytest.mark.parametrize("word", ["batch_size=abc", "norm_batch_size=3", "lr=high"])
def test_a_refused_cell_has_an_id_too(word: str):
    spec = parse_command([word]).cell(parse_overrides([word]))
    assert spec.error and spec.id != id_of("norm=batch")


def test_a_new_knob_of_shipped_schedules_moves_no_recorded_id(monkeypatch: pytest.MonkeyPatch):
    own = "optim=torch.optim.RMSprop lr=0.1"
    lines = ["lr=0.1", "schedule=linear schedule.warmup=0", own, f"{own} schedule=linear"]
    before = [id_of(line) for line in lines]

    def with_floor(group: str, choice: str) -> dict[str, Any] | None:
        values = shipped_defaults(group, choice)
        return {**values, "floor": 0.0} if group == "schedule" and values else values

    monkeypatch.setattr(identity, "shipped_defaults", with_floor)
    assert [id_of(f"{line} +schedule.floor=0") for line in lines] == before
    assert not {id_of(f"{line} +schedule.floor=0.1") for line in lines} & {*before}


def test_a_raised_number_changes_the_ids_of_its_choice_alone(monkeypatch: pytest.MonkeyPatch):
    group, batch = id_of("norm=group"), id_of("norm=batch")
    monkeypatch.setitem(identity.VERSIONS, "norm/group", 2)
    assert id_of("norm=group") != group
    assert id_of("norm=batch") == batch


@pytest.mark.slow
def test_shipped_choices_are_named_and_none_of_their_values_is_hashed():
    """A new knob, or a class that moves, does not change recorded ids."""
    own = ("custom", "text_file", "image_folder", "manual", "langid")
    choices = {
        group: [
            name
            for name in group_choices(group)
            if name not in own and f"{group}/{name}" not in identity.VERSIONS
        ][:: 5 if group == "norm" else 1]
        for group in identity.PARTS
    }
    for names in zip_longest(*choices.values()):  # one choice of each group, as long as they last
        chosen = {group: name for group, name in zip(choices, names, strict=True) if name}
        words = [f"{group}={name}" for group, name in chosen.items()]
        named = ["model.name=resnet18"] if chosen.get("model") == "timm" else []
        content = spec_of(*words, *named).identity
        for group, name in chosen.items():
            assert content[group] == {"choice": name}


@pytest.mark.parametrize(
    ("target", "knobs", "content"),
    [
        ("sample.GroupNorm", {"num_groups": 4}, {"_target_": "norm/group"}),
        ("zoo.power.PowerNorm", {"warmup": 1.0}, {"_target_": "norm/power", "version": 2}),
    ],
)
def test_a_shipped_class_stands_by_its_choice_where_the_user_names_it(target, knobs, content):
    words = [f"+norm.{key}={value}" for key, value in knobs.items()]
    spec = spec_of("norm=custom", f"norm._target_=normexp.norms.{target}", *words)
    assert spec.identity["norm"] == content | knobs


def test_an_edited_module_of_the_users_is_another_training(
    tmp_path: Path, own_module: Callable[[str, str], Path]
):
    source = "from torch import nn\n\n\nclass Own(nn.BatchNorm2d):\n    pass\n"
    file = own_module("own_norm", source)
    line = "norm=custom norm._target_=own_norm.Own"
    before = id_of(line)
    assert before.startswith("own-convnet-digits-b32-lr0.1-")
    file.write_text(source + "# edited\n")
    assert id_of(line) != before
    folder = tmp_path / "conf" / "norm"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("_target_: own_norm.Own\n_partial_: true\n")
    (by_yaml,) = compose_cells(parse_command(["--config-dir", str(folder.parent), "norm=mine"]))
    assert by_yaml.id == id_of(line)  # the same training


def test_data_and_weights_count_as_typed_whatever_is_there(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = "data=image_folder data.root=images model=timm model.name=vit model.weights=w.pt"
    before = id_of(line)
    (tmp_path / "images/train/a").mkdir(parents=True)
    assert id_of(f"{line} data_dir=elsewhere") == before
    for other in ("data.root=./images", "model.weights=v.pt"):
        key = other.partition("=")[0]
        words = [word for word in line.split() if not word.startswith(f"{key}=")]
        assert id_of(" ".join([*words, other])) != before


def test_a_class_without_a_file_is_refused():
    with pytest.raises(UserError, match="__main__.*: put the class in a file, as my_file.MyNorm"):
        id_of("norm=custom norm._target_=__main__.Mine")


def test_a_name_with_a_folder_is_readable_in_the_slug():
    choice = next(name for name in group_choices("norm") if "/" in name)
    assert id_of(f"norm={choice}").startswith(choice.rpartition("/")[2])


# --- Canonical values, and the id as text ---------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ((32, None, None), (None, None)),
        ((32, 32, None), (None, None)),
        ((32, None, 32), (None, None)),
        ((32, 8, 8), (8, None)),
        ((32, 8, 4), (8, 4)),
        ((32, None, 4), (None, 4)),
    ],
)
def test_a_size_is_null_where_nothing_is_split(given, kept):
    sizes = Sizes(*given).canonical(mixes_samples=True)
    assert (sizes["batch_size"], sizes["micro_batch_size"], sizes["norm_batch_size"]) == (32, *kept)
    alone = Sizes(*given).canonical(mixes_samples=False)
    assert alone == sizes | {"norm_batch_size": None}


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"a": 1.0, "b": {"c": [1, 2], "d": None}}, {}),
        ({"a": 2, "b": {"c": (1, 2.0), "d": None}}, {"a": 2}),
        ({"a": 1, "b": {"c": [2, 1], "d": None}}, {"b": {"c": [2, 1]}}),
        ({"a": 1, "b": {"c": [1, 2], "d": 0}}, {"b": {"d": 0}}),
        ({"a": 1, "b": None}, {"b": None}),
        ({"b": {"c": [1, 2]}}, {"~a": None, "b": {"~d": None}}),
        ({"a": 1, "b": {"c": [1, 2], "d": None, "e": None}, "f": 3}, {"b": {"e": None}, "f": 3}),
    ],
)
def test_differences_are_what_is_not_as_by_default(values, found):
    assert differences(values, {"a": 1, "b": {"c": [1, 2], "d": None}}) == found


def test_the_hash_is_of_values_whatever_their_order_and_spelling():
    one = cell_id({"a": 0.1, "b": [1, {"c": 2.0}]}, ["x"])
    assert re.fullmatch(r"x-[0-9a-f]{10}", one)
    for a, is_same in ((0.10, True), (0.1 + 2e-17, True), (0.1 + 1e-12, False), ("0.1", False)):
        assert (cell_id({"b": (1.0, {"c": 2}), "a": a}, ["x"]) == one) == is_same  # 15 digits


@pytest.mark.parametrize("part", ["b/../c", "Very" * 40, "Größe mit=Leer,Zeichen", "", "."])
def test_a_slug_is_safe_and_short(part: str):
    named = cell_id({}, [part, part, part, "b1000000000", "lr1e+300"] * 3)
    assert re.fullmatch(r"[a-z0-9][a-z0-9._-]*", named)
    assert len(named) <= 80


# --- Sources -------------------------------------------------------------------------------------


def test_a_request_holds_every_setting_with_its_default():
    values = spec_of("norm=frn", "batch_size=64", "lr_rule=linear", "steps=40").request.values
    expected = {"norm": "frn", "model": "convnet", "optim.momentum": 0.9, "drop_last": True}
    expected |= {"act": "tlu", "norm.act": "tlu", "conv": "plain", "norm.conv": "plain"}
    expected |= {"lr": pytest.approx(0.2), "norm_batch_size": 64, "micro_batch_size": 64}
    expected |= {"data.order": "shuffled", "norm.running_from": "step"}  # no id has them
    assert {key: values[key] for key in expected} == expected
    assert values["steps"] == 40 and "epochs" not in values
    typed = spec_of("norm=frn", "act=relu").request.values
    assert (typed["act"], typed["norm.act"]) == ("relu", "tlu")
    own_text = spec_of("data=text_file", "data.path=my text.txt", "norm=rms").request
    assert own_text.settings["data.path"] == "my text.txt"
