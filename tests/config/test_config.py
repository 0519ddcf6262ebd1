"""Composing and validating a cell: values, shipped and user YAMLs, mistakes in one line."""

from __future__ import annotations

import inspect
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.version import VersionBase

from normexp.cli import parse_command, read_options
from normexp.errors import UserError
from normexp.training.config.choices import forget_composed, parse_overrides, words_of
from normexp.training.config.command import compose_cells
from normexp.training.config.compose import compose_cell, compose_config
from normexp.training.config.groups import GROUPS, conf_dir, group_choices
from normexp.training.config.target import read_target
from normexp.training.config.validate import read_settings

REFUSED = {
    # Composing.
    "model=convent": "model=convent: no such model; did you mean convnet",
    "optim=xyz": "optim=xyz: no such optim; it takes adamw, custom, muon, sgd",
    "norm=xyz": "norm=xyz: no such norm; --help lists all; YAMLs of yours need --config-dir FOLDER",
    "norm=./norms/mine.py": "--help lists all; a class of yours is norm=my_module.MyClass",
    "activation=gelu": "activation: unknown key; did you mean act?",
    "num_seeds=3": "num_seeds: unknown key; did you mean replicas?",
    "+trainer.max_steps=9": "trainer.max_steps: unknown key; did you mean steps?",
    "optim.learning_rate=1": "optim.learning_rate: unknown key of optim=sgd; did you mean lr?",
    "hydra/launcher=ray": "hydra/launcher=ray: no such choice; pip install -e '.[ray]'",
    "experiment=claim": "experiment=claim: no such experiment; --help lists all",
    "logger=[wandb,neptune]": "logger=neptune: no such logger",
    "btch_size=3": "btch_size: unknown key; did you mean batch_size",
    "weight_decay=0.1": "did you mean optim.weight_decay?",
    "norm.foo=1": "norm.foo: unknown key of norm=batch; did you mean",
    "lr.x=3": "lr.x: unknown key",
    "evaluate_with.x=batch": "evaluate_with.x: unknown key",
    "hydra.foo=3": "hydra.foo=3: changes nothing here",
    "+hydra.run.dir=out": "+hydra.run.dir=out: changes nothing here; study=NAME and runs_dir=",
    "hydra.job.chdir=true": "hydra.job.chdir=true: changes nothing here; study=NAME",
    "hydra.verbose=true": "hydra.verbose=true: changes nothing here; messages go to stderr",
    "hydra/sweeper=ax": "hydra/sweeper=ax: name several values as a,b with -m, or search",
    "batch_size": "'batch_size' is not key=value",
    "=3": "'=3' is not key=value",
    "data_dir=a=b": "data_dir=a=b: the value cannot be read; quote",
    "seed=1,2": "seed=1,2 names several values: add -m",
    "optim=[sgd,adamw]": "optim=[sgd,adamw]: takes one name; add -m and write a,b for several",
    "schedule=null": "schedule=null: takes one name; for the default, leave schedule out",
    "model=7": "model=7: takes one name; --help lists the names",
    "logger=[csv,7]": "logger=[csv,7]: takes one name",
    "norm={_target_:a.B}": "norm={_target_:a.B}: takes one name; a class of yours is norm=",
    "optim={momentun:0}": "optim.momentun: unknown key",
    "schedule=lineer": "schedule=lineer: no such schedule; did you mean linear",
    "optim.schedule=linear": "optim.schedule: unknown key; the word is schedule=... now",
    "optim=torch.optim.RMSprop optim.warmup=0": "the word is schedule.warmup=... now",
    "~model": "~model: no key can be removed; for the default leave it out, or try null",
    "lr@x=3": "lr",
    "batch_size=abc": "batch_size=abc: must be a whole number",
    "lr='0.2'": "lr=0.2: must be a number; it is a text: drop its quotes, or read it with",
    "dry_run=1": "dry_run=1: must be true or false",
    "lr=${optim.defualt_lr}": "lr: Interpolation key 'optim.defualt_lr'",
    "hydra/launcher=foo": "hydra/launcher=foo: no such choice; it takes ray, submitit_slurm",
    # Keys that nothing reads.
    "+foo=1": "foo: unknown key; --help lists",
    "schedule.peak=0.2": "schedule.peak: unknown key of schedule=cosine",
    "weights=w.pt": "weights: unknown key; did you mean model.weights?",
    "+tune.x=1": "tune.x: unknown key",
    "optim._target_=torch.optim.Adam": "optim._target_: optim=sgd has one; add optim=custom",
    "optim=custom optim._target_=torch.optim.Adam": "lr=null: must be a number; set lr=...",
    # Validating.
    "batch_size=null": "batch_size=null: must be a whole number (samples)",
    "norm_batch_size=1.5": "norm_batch_size=1.5: must be a whole number (samples)",
    "micro_batch_size=true": "micro_batch_size=true: must be a whole number",
    "micro_batch_size=12": "try micro_batch_size=8 or micro_batch_size=16",
    "evaluate_batch_sizes=[2]": "evaluate_batch_sizes=[2]: only batch statistics use it; add batch",
    "tags=mine": "tags=mine: must be a list; type tags=[mine]",
    "tags=[a,7]": "tags=[a,7]: must be a string; quote it, as '\"7\"'",
    "evaluate_with=[]": "evaluate_with=[]: must not be empty",
    "stack=perhaps": "stack=perhaps: must be 'auto', true or false",
    "lr=nan": "lr=nan: must be a finite number",
    "eps=-1e-5": "eps=-1e-05: must be greater than or equal to 0",
    f"study={'n' * 201}": "of at most 200 bytes",
    "schedule.warmup=1.0": "schedule.warmup=1.0: must be less than 1",
    "trainer.devices=2": "several devices need trainer=ddp",
    "+norm.placement=mid": "norm.placement=mid: must be 'pre', 'post'",
    "lr=[0": "lr=[0: the value cannot be read",
    "epochs=2 steps=4": "epochs=2 and steps=4: a training has one budget; keep one",
    "samples=9 steps=4": "samples=9 and steps=4: a training has one budget",
    "samples=9 epochs=2": "a training has one budget; keep one, or type samples=null",
    "experiment=debug epochs=2": "epochs=2 and steps=100: a training has one budget; keep one, "
    "or type steps=null",
}


@pytest.mark.parametrize(("line", "part"), REFUSED.items(), ids=REFUSED.keys())
def test_a_mistake_is_one_line_with_its_key(line: str, part: str):
    words = [line] if line.startswith("study=") else line.split()
    with pytest.raises(UserError) as caught:
        read_settings(compose_config(words))
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("", {"lr": 0.1, "micro_batch_size": None, "study": "default", "replicas": 4}),
        ("lr=1 micro_batch_size=8 stack=false", {"lr": 1, "micro_batch_size": 8, "stack": False}),
        ("study=2026 eps=0 stack=true", {"study": "2026", "eps": 0, "stack": True}),
        ("study=2026_11", {"study": "2026_11"}),
        ("optim=adamw batch_size=6 norm_batch_size=3", {"lr": 1e-3, "norm_batch_size": 3}),
    ],
)
def test_a_line_sets_its_values_and_leaves_the_defaults(line: str, values: dict[str, object]):
    config, choices = compose_cell(parse_overrides(line.split()))
    read_settings(config)
    assert {key: config[key] for key in values} == values
    assert choices["optim"] == ("adamw" if "adamw" in line else "sgd")
    assert "hydra" not in config and "experiment" not in choices


@pytest.mark.parametrize("key", ["norm", "model", "data", "optim", "schedule", "callback"])
def test_a_dotted_path_is_a_choice_of_every_group_that_takes_own_classes(key: str):
    short, choices = compose_cell(parse_overrides([f"{key}=my_pkg.Mine", "lr=1"]))
    words = [f"{key}=custom", f"{key}._target_=my_pkg.Mine", "lr=1"]
    assert short == compose_config(words) and choices[key] == "Mine"


def test_a_sweep_takes_shipped_and_own_norms_in_one_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "my_pkg.py").write_text("class LpNorm: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    words = ["-m", "norm=batch,my_pkg.LpNorm", "lr=1"]
    cells = compose_cells(parse_command(words))
    assert [cell.choices["norm"] for cell in cells] == ["batch", "LpNorm"]
    assert cells[1].title == "norm=LpNorm batch_size=32 lr=1"


OWN = """\
import torch
from torch import nn as layers
class LpNorm(layers.Module): ...
if True:
    def build(): ...
_hidden = LpNorm
"""
MISSING = {
    "norm=my_own.LpNrm": "my_own has no LpNrm; did you mean LpNorm?",
    "norm=my_own.py": "my_own has no py; it has LpNorm",
    "norm=custom norm._target_=my_own": "my_own is a module; it has LpNorm",
    "norm=no_such.LpNorm": "there is no module no_such",
    "norm=custom": "norm._target_ is not set; give norm._target_=...",
    "data=image_folder": "data.root is not set; give data.root=...",
    "model=timm": "model.name is not set; give model.name=resnet18",
}


@pytest.mark.parametrize(("line", "part"), MISSING.items(), ids=MISSING.keys())
def test_missing_modules_are_found_without_torch(
    line: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "my_own.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError) as caught:
        compose_cells(parse_command(line.split()))
    assert part in str(caught.value)
    if line.startswith("norm=") and "custom" not in line:  # nor is it a row of a sweep
        with pytest.raises(UserError, match=re.escape(part)):
            compose_cells(parse_command(["-m", line.replace("=", "=group,", 1)]))
    for name in ("LpNorm", "build", "_hidden", "layers"):
        compose_cells(parse_command([f"norm=my_own.{name}"]))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        (
            {"groups_policy": "nearest", "num_groups": "auto"},
            "norm.num_groups=auto: must be a whole",
        ),
        ({"affine": "sometimes"}, "norm.affine=sometimes: must be true or false"),
        ({"num_groups": None}, "norm.num_groups=null: must be a whole number; set"),
        ({"num_groups": [2]}, r"norm.num_groups=\[2\]: must be a whole number"),
        ({"num_groups": True}, "norm.num_groups=true: must be a whole number"),
        ({"affine": 0}, "norm.affine=0: must be true or false"),
        ({"groups_policy": "nearest", "num_groups": 4}, ""),
    ],
)
def test_a_value_of_another_kind_is_refused_by_its_type(knobs: dict[str, object], message: str):
    values = {"_target_": "normexp.norms.sample.GroupNorm", **knobs}
    if not message:
        assert read_target(values, "norm").call.keywords == knobs
        return
    with pytest.raises(UserError, match=f"^{message}"):
        read_target(values, "norm")


def list_takers(sizes: list[int], name: str, pair: tuple[float, float], lies: int = None) -> None:  # type: ignore[assignment]
    """A signature as users write them."""


def test_values_of_containers_and_defaults_are_the_code_s_to_refuse():
    values = {"_target_": f"{__name__}.list_takers", "sizes": [2, 3], "pair": [1, 2], "lies": None}
    assert read_target(values, "model").call.keywords.keys() == {"sizes", "pair", "lies"}
    for value in ([2], None, 1, True):  # the hints of others are often careless
        read_target({**values, "lies": value}, "model")
    with pytest.raises(UserError, match='^model.name=18: must be a string; quote it, as .*"18"'):
        read_target({**values, "name": 18}, "model")


@pytest.mark.parametrize(
    ("knob", "message"),
    [
        ({"flip": "perhaps"}, "data.augmentation.flip=perhaps: must be true or false"),
        ({"flipp": True}, "data.augmentation.flipp: .* has no such argument; did you mean flip?"),
    ],
)
def test_a_knob_of_a_class_in_a_class_is_checked_under_its_key(knob: dict[str, Any], message: str):
    config = compose_config([])["data"]
    config["augmentation"] |= knob
    with pytest.raises(UserError, match=f"^{message}"):
        read_target({key: value for key, value in config.items() if key != "order"}, "data")


class TakesAnything:
    """As the configs of transformers, whose signatures show some of their keywords."""

    __signature__ = inspect.Signature()

    def __init__(self, **values: Any) -> None:
        self.values = values


def test_a_class_in_a_class_may_take_what_its_signature_does_not_show():
    part = {"_target_": f"{__name__}.TakesAnything", "num_labels": 3}
    target = read_target({"_target_": "builtins.dict", "part": part}, "model")
    assert target.call.keywords["part"].values == {"num_labels": 3}


def test_a_plus_before_a_group_changes_nothing():
    plain = compose_config(["model=vit", "optim=adamw"])
    assert compose_config(["+model=vit", "++optim=adamw"]) == plain


def test_threads_compose_at_once():
    """As threads that call `normexp.run`."""
    with ThreadPoolExecutor(4) as pool:
        configs = list(pool.map(lambda _: compose_config(["eps=0"]), range(8)))
    assert all(config["eps"] == 0 for config in configs)


def test_composing_leaves_a_hydra_app_as_it_was(tmp_path: Path):
    def state() -> list[object]:
        store, base = ConfigStore.instance().repo, VersionBase.instance().getbase()
        groups = {group: sorted(one) for group, one in store.items() if isinstance(one, dict)}
        return [GlobalHydra.instance().hydra, HydraConfig.instance().cfg, base, groups, [*store]]

    (tmp_path / "config.yaml").write_text("norm: theirs\n")
    ConfigStore.instance().store("theirs", {"knob": 1}, "norm")
    try:
        with hydra.initialize_config_dir(str(tmp_path), version_base="1.2"):
            HydraConfig.instance().set_config(hydra.compose("config", return_hydra_config=True))
            before = state()
            forget_composed()
            assert compose_config(["norm=my_own.Norm"])["norm"]["_target_"] == "my_own.Norm"
            with pytest.raises(UserError, match="norm=theirs: no such norm"):
                compose_config(["norm=theirs"])
            assert state() == before
            assert hydra.compose("config") == {"norm": "theirs"}
    finally:
        del ConfigStore.instance().repo["norm"]
        HydraConfig.instance().cfg = None


def test_a_tilde_is_the_home_and_counts_as_typed_in_an_id(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = compose_config(["runs_dir=~/runs", "data_dir=~/d", "data=text_file", "data.path=~/t"])
    assert (config["runs_dir"], config["data_dir"]) == ("/home/me/runs", "/home/me/d")
    assert config["data"]["path"] == "~/t"
    options = read_options("status", ["study=s", "runs_dir=~/runs"])
    assert options["runs_dir"] == "/home/me/runs"


def test_composing_one_cell_leaves_the_next_alone():
    config = compose_config(["optim=adamw"])
    config["optim"]["weight_decay"] = 99.0
    assert compose_config(["optim=adamw"])["optim"]["weight_decay"] == 0.1


def own_yaml(folder: Path, name: str, text: str) -> list[str]:
    """The word by which a command line finds a file of the user's."""
    file = folder / name
    file.parent.mkdir(parents=True)
    file.write_text(text)
    overrides = parse_command(["--config-dir", str(folder)]).overrides
    return [*words_of(overrides).values()]


def test_users_file_may_leave_the_target_to_the_line_and_change_between_commands(tmp_path: Path):
    folder = own_yaml(tmp_path, "norm/mine.yaml", "_target_: ???\nknob: 2\n")
    line = ["--config-dir", str(tmp_path), "norm=mine", "norm._target_=my.Norm"]
    assert compose_config([*folder, *line[2:]])["norm"] == {
        "_target_": "my.Norm",
        "knob": 2,
        "at": None,
        "half_life": None,
        "running_from": "step",
    }
    Path(tmp_path, "norm/mine.yaml").write_text("_target_: ???\nknob: 3\n")
    assert compose_cell(parse_command(line).overrides)[0]["norm"]["knob"] == 3


def test_users_file_may_pick_a_model(tmp_path: Path):
    text = "# @package _global_\ndefaults: [override /optim: adamw]\ndata: {_target_: my.load}\n"
    folder = own_yaml(tmp_path, "data/mine.yaml", text)
    for words, optimizer in ((["data=mine"], "AdamW"), (["data=mine", "optim=sgd"], "SGD")):
        optim = compose_config([*folder, *words])["optim"]
        assert optim["_target_"] == f"torch.optim.{optimizer}"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "data/mine.yaml",
            "# @package _global_\nval_fraction: 0.2\n",
            "val_fraction: unknown key",
        ),
        ("experiment/mine.yaml", "# @package _global_\nepoch: 3\n", "epoch: unknown key; did you"),
        (
            "experiment/mine.yaml",
            "# @package _global_\nnorm: rms\n",
            "norm=rms: a recipe has keys below norm",
        ),
        (
            "experiment/mine.yaml",
            "# @package _global_\ntrainer: null\n",
            "trainer=null: a recipe has",
        ),
        ("experiment/mine.yaml", "# @package _global_\nepochs: null\n", "epochs=null: must be"),
        ("experiment/mine.yaml", "epochs: 3\n", "experiment=mine: its YAML must begin with"),
        (
            "experiment/mine.yaml",
            "defaults: [override /norm: group]\nepochs: 3\n",
            "experiment: its YAML must begin with `# @package _global_`",
        ),
        ("trainer/mine.yaml", "defaults: [auto]\nmax_steps: 3\n", "trainer.max_steps: unknown key"),
        (
            "optim/mine.yaml",
            "_target_: my.Sgd\ndefault_lr: 1\n",
            "optim.weight_decay=null: must be",
        ),
        ("optim/sgd.yaml", "a: 1\n", "optim/sgd.yaml: normexp has optim=sgd itself; rename"),
        ("norm/custom.yaml", "a: 1\n", "custom.yaml: normexp has norm=custom itself; rename"),
        ("norm/mine.yaml", "_target_: my.Norm\nk: [1, 2\n", "mine.yaml, line 3: not valid YAML"),
        (
            "data/mine.yaml",
            "# @package _global_\ndefaults: [override /model: gtp]\ndata: {_target_: my.load}\n",
            "model=gtp: no such model",
        ),
        ("norm/mime.yaml", "_target_: my.Norm\n", "norm=mine: no such norm; did you mean mime"),
    ],
)
def test_a_mistake_in_a_users_file_is_one_line_too(tmp_path: Path, name, text, message):
    with pytest.raises(UserError, match=re.escape(message)):
        folder = own_yaml(tmp_path, name, text)
        read_settings(compose_config([*folder, f"{name.partition('/')[0]}=mine"]))


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("norm=custom norm._target_=my_pkg.MyNorm", "MyNorm"),
        ("data=custom data._target_=my_pkg.load_stripes", "stripes"),
        ("model=custom model._target_=my_pkg.nets.Tiny", "Tiny"),
        ("optim=custom optim._target_=my_pkg.Lion lr=0.1", "Lion"),
        ("norm=custom norm._target_=my_pkg.batch", "my_pkg.batch"),
    ],
)
def test_a_users_own_part_has_its_own_name(word: str, name: str):
    group = word.partition("=")[0]
    assert compose_cell(parse_overrides(word.split()))[1][group] == name


# --- the shipped YAMLs --------------------------------------------------------------------------

# Norms are composed where their traits are measured.
CHOICES = [
    f"{group}={name}"
    for group in GROUPS
    for name in group_choices(group)
    if group != "norm" and name != "custom"
]
FILES = sorted(conf_dir().rglob("*.yaml"))


@pytest.mark.slow  # the other tests compose most of them
@pytest.mark.parametrize("choice", CHOICES)
def test_choice_composes_and_validates(choice: str):
    group, _, name = choice.partition("=")
    config, choices = compose_cell(parse_overrides([choice]))
    read_settings(config)
    assert choices[group] == name or group == "logger"  # several may be chosen


def test_every_file_belongs_to_a_group_and_begins_with_a_comment():
    for file in FILES:
        parts = file.relative_to(conf_dir()).parts
        assert parts in (("config.yaml",), ("entries.yaml",)) or parts[0] in GROUPS, file
        text = file.read_text()
        assert text.startswith("#"), file
        if parts[0] == "norm":  # --help shows the first line and the family
            header = list(takewhile(lambda line: line.startswith("#"), text.splitlines()))
            assert re.match(r"# [^:(]+( \(arXiv:.+?\))?: .+", header[0]), file
            assert re.match(r"# family: \w+$", header[-1]), file
