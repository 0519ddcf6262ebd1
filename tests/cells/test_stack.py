"""A stack: which checkpoints it takes, what it records, and its W&B runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from normexp.cells.cell import prepare_cell
from normexp.cells.stack import new_stack, train_together
from normexp.config.compose import compose_cell
from normexp.records.result import read_result
from normexp.records.stacks import begin_stack
from normexp.train import main
from normexp.training.stopping import Interrupted, StopRequest


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path, bytes]:
    """A command line, and path and content of the checkpoint that its first step left."""
    words = ["norm=none", "steps=3", "replicas=1", f"runs_dir={tmp_path_factory.mktemp('runs')}"]
    cell = prepare_cell(*compose_cell(words))
    stop = StopRequest()
    stop.requested = True
    with pytest.raises(Interrupted):
        train_together(new_stack([(cell, 0)]), stop, None)
    checkpoint = cell.directory / "stacks" / "0-0" / "last.ckpt"
    return words, checkpoint, checkpoint.read_bytes()


def other_networks(content: dict) -> dict:
    name = next(iter(content["state_dict"]))
    content["state_dict"][name] = torch.zeros(1)
    return content


def other_optimizer(content: dict) -> dict:
    content["optimizer_states"][0]["param_groups"] = []
    return content


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (None, None),
        (b"torn", "Error"),
        (lambda _: [], "TypeError"),
        (lambda _: {"state_dict": {}}, "normexp"),
        (other_networks, "other networks"),
        (other_optimizer, "param"),
    ],
    ids=["whole", "torn", "no_mapping", "foreign", "other_networks", "other_optimizer"],
)
def test_checkpoint_is_resumed_or_kept_aside_with_the_reason(stopped, spoil, reason, capfd):
    words, checkpoint, content = stopped
    if isinstance(spoil, bytes):
        content = spoil
    cell_dir = checkpoint.parents[2]
    begin_stack(cell_dir.parent, [(cell_dir.name, 0)], {cell_dir.name: 0.1})
    checkpoint.write_bytes(content)
    if callable(spoil):
        torch.save(spoil(torch.load(checkpoint, weights_only=True)), checkpoint)
        content = checkpoint.read_bytes()
    assert main(words) == 0
    log = capfd.readouterr().err
    result = checkpoint.parents[2] / "seed-0" / "result.json"
    assert read_result(result).status == "finished"
    result.unlink()
    assert not checkpoint.exists()
    aside = checkpoint.with_suffix(".unreadable")
    if reason is None:
        assert "continues from step 1 of 3" in log
        assert not aside.exists()
    else:
        assert reason in log and "continues" not in log
        assert aside.read_bytes() == content
        aside.unlink()


NOISY = """import torch

class Noisy(torch.nn.Module):
    def __init__(self, num_features):
        super().__init__()

    def forward(self, x):
        return torch.nn.functional.dropout(x, 0.2, self.training)
"""


SHARED = """import functools, torch

@functools.cache
def make(num_features):
    return torch.nn.BatchNorm2d(num_features)  # one for all sites of this width, in every network
"""


@pytest.mark.parametrize(
    ("source", "name"), [(NOISY, "Noisy"), (SHARED, "make")], ids=["draws", "shared"]
)
def test_own_draws_and_shared_modules_do_not_tie_runs_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, name: str
):
    (tmp_path / "noisy_norm_of_a_test.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["norm=custom", f"norm._target_=noisy_norm_of_a_test.{name}", "steps=3", "log_every=1"]
    words += ["stack=false"]
    try:
        assert main([*words, "replicas=2", f"runs_dir={tmp_path / 'pair'}"]) == 0
        torch.manual_seed(7)  # must not matter
        assert main([*words, "seed=1", "replicas=1", f"runs_dir={tmp_path / 'alone'}"]) == 0
    finally:
        sys.modules.pop("noisy_norm_of_a_test", None)
    pair, alone = (
        torch.load(next(tmp_path.glob(f"{name}/default/*/seed-1/weights.pt")), weights_only=True)
        for name in ("pair", "alone")
    )
    assert all(torch.equal(value, alone[name]) for name, value in pair.items())


def test_run_that_its_last_update_broke_is_diverged(tmp_path: Path):
    words = ["norm=none", "lr=1e30", "optim.warmup=0", "steps=1", "replicas=1"]
    assert main([*words, f"runs_dir={tmp_path}"]) == 0
    (run,) = tmp_path.glob("default/*/seed-0")
    result = read_result(run)
    assert (result.status, result.diverged_at_step) == ("diverged", 1)


@pytest.mark.slow
def test_optimizer_that_looks_at_other_values_trains_each_seed_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "conf" / "optim"
    folder.mkdir(parents=True)
    knobs = "weight_decay: 0.0\ndecay_norm: false\nschedule: constant\nwarmup: 0.0\n"
    (folder / "own.yaml").write_text(
        f"_target_: own_optimizer_of_a_test.Own\n_partial_: true\ndefault_lr: 0.1\n{knobs}"
    )
    source = (
        "import torch\nclass Own(torch.optim.SGD):\n    def step(self):\n"
        "        torch.nn.utils.clip_grad_norm_(self.param_groups[0]['params'], 0.1)\n"
        "        super().step()\n"
    )
    (tmp_path / "own_optimizer_of_a_test.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        words = ["optim=own", "stack=true", "steps=2", "replicas=2", f"runs_dir={tmp_path}/runs"]
        assert main(["--config-dir", str(folder.parent), *words]) == 0
        (run,) = tmp_path.glob("runs/default/*/seed-0")
        assert read_result(run).timing["stack_size"] == 1
        (tmp_path / "own_optimizer_of_a_test.py").write_text(source + "# edited\n")
        del sys.modules["own_optimizer_of_a_test"]
        assert main(["--config-dir", str(folder.parent), *words]) == 0
        assert len(list(tmp_path.glob("runs/default/*/seed-0"))) == 2  # an edited one is a new cell
    finally:
        sys.modules.pop("own_optimizer_of_a_test", None)
