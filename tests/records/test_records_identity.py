from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import normexp
from normexp.records.identity import canonical, cell_id, digest_of_source, source_digest

CONFIG: dict[str, Any] = {
    "norm": {"_target_": "normexp.norms.group.GroupNorm", "num_groups": 8, "eps": 1e-5},
    "model": {"_target_": "normexp.models.convnet.ConvNet", "widths": [16, 32]},
    "data": {"_target_": "normexp.data.digits.load", "val_fraction": 0.2, "data_dir": "/a"},
    "optim": {"_target_": "torch.optim.SGD", "momentum": 0.9},
    "trainer": {"accelerator": "auto", "devices": 1, "precision": "32-true"},
    "batch_size": 32,
    "micro_batch_size": None,
    "norm_batch_size": None,
    "epochs": 15,
    "lr": 0.1,
    "seed": 0,
    "replicas": 4,
    "study": "default",
    "runs_dir": "runs",
}


def id_of(changes: Mapping[str, object] | None = None, *, mixes_samples: bool = True) -> str:
    """The id of CONFIG with changed keys, nested ones written with dots."""
    config = copy.deepcopy(CONFIG)
    for key, value in (changes or {}).items():
        *parents, last = key.split(".")
        part = config
        for parent in parents:
            part = part[parent]
        part[last] = value
    return cell_id(canonical(config, mixes_samples=mixes_samples))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"micro_batch_size": 32}),
        ({}, {"micro_batch_size": 64}),
        ({}, {"norm_batch_size": 32}),
        ({}, {"micro_batch_size": 32, "norm_batch_size": 32}),
        ({"micro_batch_size": 8}, {"micro_batch_size": 8, "norm_batch_size": 8}),
        ({"micro_batch_size": 8}, {"micro_batch_size": 8, "norm_batch_size": 32}),
        ({"trainer.devices": 2, "norm_batch_size": 16}, {"norm_batch_size": 16}),
        ({}, {"max_grad_norm": None}),
        ({"lr": 1}, {"lr": 1.0}),
        ({"lr": 0.1}, {"lr": 0.10}),
        ({"norm.eps": 1e-5}, {"norm.eps": 0.00001}),
        ({"model.widths": [16, 32]}, {"model.widths": (16, 32.0)}),
    ],
)
def test_two_ways_of_saying_one_training_give_one_id(one, other):
    assert id_of(one) == id_of(other)


def test_order_of_keys_does_not_matter():
    backwards = dict(reversed(CONFIG.items()))
    assert cell_id(canonical(backwards, mixes_samples=True)) == id_of()


@pytest.mark.parametrize(
    "change",
    [
        {"norm.num_groups": 4},
        {"norm.eps": 1e-6},
        {"norm._target_": "my.GroupNorm"},
        {"norm.source": "0123"},
        {"model.widths": [32, 16]},
        {"data.val_fraction": 0.1},
        {"data.digest": "0123"},
        {"optim.momentum": 0.8},
        {"trainer.precision": "bf16-mixed"},
        {"batch_size": 64},
        {"micro_batch_size": 8},
        {"norm_batch_size": 8},
        {"epochs": 16},
        {"lr": 0.10000000000000002},
        {"max_grad_norm": 1.0},
    ],
)
def test_what_defines_a_training_changes_the_hash(change):
    assert id_of(change)[-10:] != id_of()[-10:]


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 7},
        {"replicas": 9},
        {"study": "other"},
        {"experiment": "batch_size_sensitivity"},
        {"runs_dir": "/elsewhere"},
        {"data_dir": "/elsewhere"},
        {"data.data_dir": "/elsewhere"},
        {"trainer.accelerator": "gpu"},
        {"trainer.devices": 8},
        {"trainer.strategy": "ddp"},
        {"logger": {"wandb": {"project": "x"}}},
        {"log_every": 99},
        {"allow_leak": True},
        {"diagnostics": {"every": 10}},
        {"val_every_epochs": 5},
        {"evaluate_with": ["precise"], "precise_samples": 9},
        {"evaluate_batch_sizes": [2], "evaluate_every_epoch": True},
        {"chunk": 1},
        {"stack": False},
        {"dry_run": True},
    ],
)
def test_what_does_not_define_a_training_keeps_the_id(change):
    assert id_of(change) == id_of()


def test_norm_that_ignores_other_samples_has_no_norm_batch_size():
    one = id_of({"norm_batch_size": 4}, mixes_samples=False)
    assert one == id_of(mixes_samples=False)
    assert one != id_of({"norm_batch_size": 4})


def test_path_of_data_counts_only_where_its_content_is_not_known():
    here, there = {"data.path": "/a/x.txt"}, {"data.path": "/b/x.txt"}
    assert id_of(here) != id_of(there)
    digest = {"data.digest": "0123"}
    assert id_of(here | digest) == id_of(there | digest)


def test_canonical_leaves_its_argument_alone():
    before = copy.deepcopy(CONFIG)
    canonical(CONFIG, mixes_samples=False)
    assert before == CONFIG


def test_id_is_the_same_in_every_version():
    """Recorded results are found by their id, so a change of it must be wanted."""
    assert id_of() == "group-convnet-digits-b32-lr0.1-68f1f82318"


def test_slug_says_norm_model_data_and_the_sizes_that_are_set():
    named = id_of({"micro_batch_size": 8, "norm_batch_size": 4})
    assert re.fullmatch(r"group-convnet-digits-b32-m8-n4-lr0\.1-[0-9a-f]{10}", named)
    assert id_of({"model.name": "resnet50"}).startswith("group-resnet50-digits-b32-lr0.1-")
    assert id_of({"norm._target_": "my_pkg.MyNorm"}).startswith("mynorm-convnet-")


@pytest.mark.parametrize(
    "target", ["a.b/../c", "a." + "Very" * 40, "a.Größe mit=Leer,Zeichen", "", "."]
)
def test_slug_is_safe_and_short(target):
    changes = {
        "batch_size": 10**9,
        "micro_batch_size": 10**8,
        "norm_batch_size": 10**7,
        "lr": 1e300,
    }
    for part in ("norm", "model", "data"):
        changes |= {f"{part}._target_": target}
    named = id_of(changes)
    assert re.fullmatch(r"[a-z0-9][a-z0-9._-]*", named)
    assert len(named) <= 80


def test_source_digest_is_of_the_file_and_follows_an_edit(tmp_path: Path):
    module = tmp_path / "my_norm.py"
    module.write_text("scale = 1\n")
    before = source_digest(module)
    (tmp_path / "unrelated.py").write_text("")
    assert source_digest(module) == before == digest_of_source(module)
    module.write_text("scale = 2\n")
    assert source_digest(module) != before


def test_source_digest_of_a_module_in_a_package_follows_its_helpers(tmp_path: Path):
    package = tmp_path / "my_pkg"
    (package / "norms").mkdir(parents=True)
    for file in ("__init__.py", "norms/__init__.py", "norms/mine.py", "helper.py", "notes.txt"):
        (package / file).write_text("x = 1\n")
    before = source_digest(package / "norms" / "mine.py")
    (package / "notes.txt").write_text("not source")
    assert source_digest(package / "norms" / "mine.py") == before
    (package / "helper.py").write_text("x = 2\n")
    edited = source_digest(package / "norms" / "mine.py")
    assert edited != before
    (package / "helper.py").rename(package / "renamed.py")
    assert source_digest(package / "norms" / "mine.py") != edited


def test_normexp_and_installed_packages_have_no_source_digest(tmp_path: Path):
    assert source_digest(Path(normexp.__file__).parent / "norms" / "contract.py") is None
    assert source_digest(Path(pytest.__file__)) is None
    installed = tmp_path / "site-packages" / "foreign.py"
    installed.parent.mkdir()
    installed.write_text("")
    assert source_digest(installed) is None
