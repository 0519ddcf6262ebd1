"""A stack: which checkpoints it takes, and what it records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from train_cases import prepare

from normexp.cells.stack import create_stack, restore_stack, train_stack
from normexp.errors import UserError
from normexp.records.result import read_result
from normexp.records.stacks import begin_stack
from normexp.train import main
from normexp.training.stopping import Interrupted, TrainingControl


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path, bytes]:
    """A command line, and the path and content of its checkpoint after the first step."""
    words = ["norm=none", "steps=3", "replicas=1", f"runs_dir={tmp_path_factory.mktemp('runs')}"]
    cell = prepare(*words)
    control = TrainingControl()
    control.stop.requested = True
    with pytest.raises(Interrupted):
        train_stack(create_stack([(cell, 0)]), control)
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
        (lambda _: [], "TypeError"),
        (lambda _: {"state_dict": {}}, "normexp"),
        (other_networks, "other networks"),
        (other_optimizer, "param"),
        ("torn", "Error"),
    ],
    ids=["whole", "no_mapping", "foreign", "other_networks", "other_optimizer", "torn"],
)
def test_checkpoint_is_resumed_or_kept_aside_with_the_reason(stopped, spoil, reason, capfd):
    words, checkpoint, content = stopped
    cell_dir, aside = checkpoint.parents[2], checkpoint.with_suffix(".unreadable")
    begin_stack(cell_dir.parent, [(cell_dir.name, 0)], {cell_dir.name: 0.1})
    checkpoint.write_bytes(content if spoil != "torn" else b"torn")
    if callable(spoil):
        torch.save(spoil(torch.load(checkpoint, weights_only=True)), checkpoint)
    spoiled = checkpoint.read_bytes()
    assert main(words) == 0
    log = capfd.readouterr().err
    result = cell_dir / "seed-0" / "result.json"
    assert read_result(result).status == "finished"
    result.unlink()
    assert not checkpoint.exists()
    assert ("continues from step 1 of 3" in log) == (reason is None)
    if reason is not None:
        assert reason in log and aside.read_bytes() == spoiled
        aside.unlink()


NOISY = """import torch
from train_cases import prepare

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
    tmp_path: Path, own_module: Callable[[str, str], Path], source: str, name: str
):
    own_module("noisy_norm_of_a_test", source)
    words = ["norm=custom", f"norm._target_=noisy_norm_of_a_test.{name}", "steps=3", "log_every=1"]
    words += ["stack=false"]
    assert main([*words, "replicas=2", f"runs_dir={tmp_path / 'pair'}"]) == 0
    torch.manual_seed(7)  # must not matter
    assert main([*words, "seed=1", "replicas=1", f"runs_dir={tmp_path / 'alone'}"]) == 0
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
    assert "test/accuracy" not in result.metrics


def test_a_stack_whose_cell_only_the_history_knew_is_refused_with_the_remedy(tmp_path: Path):
    cell = prepare("norm=none", f"runs_dir={tmp_path}")
    record = begin_stack(tmp_path / "default", [("other-cell", 0)], {"other-cell": 0.1})
    with pytest.raises(UserError, match=r"put study\.jsonl back, or remove this folder"):
        restore_stack(record, [cell])
