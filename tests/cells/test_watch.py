"""What a training shows that no check before it did, and what follows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from train_cases import prepare, results

from normexp.cells import watch
from normexp.cells.reloading import fault_of_reloaded
from normexp.records.history import read_history
from normexp.train import main
from normexp.training.chunks import watched_steps

NORM = """import torch
from torch import nn

class Phased(nn.Module):
    def __init__(self, num_features, num_training_steps=100):
        super().__init__()
        self.register_buffer("steps", torch.zeros(num_features, dtype=torch.long))
        self.last = num_training_steps

    def forward(self, x):
        if self.training:
            self.steps.add_(1)
            opens = {CONDITION}
            x = x - opens.to(x.dtype) * x.mean({AXES}, keepdim=True)
        return x
"""
SHORT = ["batch_size=16", "data.limit_train=160", "model.width=8", "workers=0"]


def phased(tmp_path: Path, monkeypatch, name: str, opens: str) -> list[str]:
    """The words that choose a norm which subtracts the mean over samples in some steps."""
    source = NORM.replace("{CONDITION}", opens).replace("{AXES}", "0")
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    return ["norm=custom", f"norm._target_={name}.Phased", f"runs_dir={tmp_path / 'runs'}", *SHORT]


@pytest.fixture(autouse=True)
def _without_limit_of_time(monkeypatch):
    monkeypatch.setattr(watch, "FREE_SECONDS", 100.0)


# Unlike in the first steps and in very late ones, which are asked about before a training.
AT_TIMES = "(self.steps % 97 > 75).all()"
LATE = "((self.steps > 75) & (self.steps < 1000)).all()"


def test_norm_that_mixes_later_withdraws_its_aliases_and_trains_each_size(
    tmp_path, monkeypatch, capfd
):
    words = ["steps=100", *phased(tmp_path, monkeypatch, "at_times", AT_TIMES)]
    assert main(["-m", *words, "replicas=1", "norm_batch_size=4,null"]) == 0
    found = results(tmp_path / "runs")
    assert len(found) == 2 and all(result.config["mixes_samples"] for result in found.values())
    log = capfd.readouterr().err
    assert "depends on other samples" in log and "missing again" in log
    aliases = read_history(tmp_path / "runs/default").aliases
    assert len(aliases) == 2 and all(alias.same_as is None for alias in aliases.values())
    assert main(["-m", *words, "replicas=1", "norm_batch_size=8"]) == 0
    assert len(results(tmp_path / "runs")) == 3  # no alias again


@pytest.mark.parametrize("stack", ["true", "false"])
def test_watch_changes_no_number(tmp_path, monkeypatch, stack):
    words = phased(tmp_path, monkeypatch, f"counts_{stack}", "(self.steps < 0).all()")
    words = [*words, "steps=40", "replicas=2", f"stack={stack}"]
    assert main(words) == 0
    monkeypatch.setattr("normexp.cells.cell.watched_steps", lambda *_: ())
    assert main([*words, "study=unwatched"]) == 0
    pairs = [sorted((tmp_path / "runs" / s).glob("*/seed-*")) for s in ("default", "unwatched")]
    assert len(pairs[0]) == 2
    for one, other in zip(*pairs, strict=True):
        for file in ("weights.pt", "samples.npz", "metrics.csv"):
            assert (one / file).read_bytes() == (other / file).read_bytes(), file
    logs = list((tmp_path / "runs/default").glob("*/stacks/*/run.log"))
    counts = re.search(r"watched (\d+) of (\d+) points", logs[0].read_text())
    assert counts is not None and counts[1] == counts[2] != "0"
    timings = [result.timing for result in results(tmp_path / "runs").values()]
    assert timings and all(timing["watched_points"] == int(counts[1]) for timing in timings)


def test_leak_in_evaluation_that_begins_later_makes_a_run_invalid(tmp_path, monkeypatch):
    source = NORM.replace("{CONDITION}", LATE).replace("{AXES}", "2")
    source = source.replace("        if self.training:\n            self.steps.add_(1)\n", "")
    source = source.replace(
        "            opens", "        self.steps.add_(int(self.training))\n        opens"
    )
    source = source.replace("            x = x - ", "        x = x - ")
    (tmp_path / "leaks_late.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["norm=custom", "norm._target_=leaks_late.Phased", "norm.view=sequence", "model=gpt"]
    words += ["data=manual", "data.block_size=16", "data.limit_train=64", "data.val_fraction=.002"]
    words += ["data.test_fraction=.002", "model.depth=1", "model.width=16", "model.num_heads=2"]
    assert (
        main(
            [
                *words,
                "steps=100",
                "batch_size=16",
                "workers=0",
                "replicas=1",
                f"runs_dir={tmp_path}/runs",
            ]
        )
        == 0
    )
    (result,) = results(tmp_path / "runs").values()
    assert result.invalid is not None and "future" in result.invalid
    assert result.config["leaks_future"] and result.config["leaks_future_in_training"]


CACHED = """import torch
from torch import nn

SIZES = {}

class Cached(nn.Module):
    def __init__(self, num_features):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features))

    def forward(self, x):
        if self.training:
            SIZES.setdefault(x.shape[1], 3 * x.detach().abs().mean() + 0.1)
        size = SIZES.get(x.shape[1], torch.ones(())) if {IS_CACHED} else 2.0
        return torch.tanh(x / size) * self.weight.view(1, -1, *[1] * (x.ndim - 2))
"""


@pytest.mark.parametrize("is_cached", [True, False])
def test_run_whose_weights_give_other_outputs_in_a_new_process_is_invalid(
    tmp_path, monkeypatch, is_cached
):
    monkeypatch.setattr("normexp.cells.stack.fault_of_reloaded", fault_of_reloaded)
    name = f"cached_{is_cached}".lower()
    (tmp_path / f"{name}.py").write_text(CACHED.replace("{IS_CACHED}", str(is_cached)))
    monkeypatch.syspath_prepend(tmp_path)
    words = ["norm=custom", f"norm._target_={name}.Cached", f"runs_dir={tmp_path / 'runs'}"]
    assert main([*words, *SHORT, "steps=2", "replicas=2"]) == 0
    invalid = [result.invalid for result in results(tmp_path / "runs").values()]
    assert len(invalid) == 2
    assert all("new process" in why for why in invalid) if is_cached else not any(invalid)


def test_only_foreign_code_is_watched():
    assert prepare("norm=group", "steps=100").recipe.watched_steps == ()
    foreign = prepare("norm=custom", "norm._target_=wild_norms.LlamaRMSNorm", "steps=100")
    steps = foreign.recipe.watched_steps
    assert steps[:4] == (50, 80, 10, 5) == watched_steps(100, 0)[:4]
    assert max(steps) <= 80 and torch.tensor(steps).unique().numel() == len(steps)
