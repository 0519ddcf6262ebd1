"""What a stack makes of a checkpoint that another stack, another form or a torn write left."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from normexp.cells.stack import remove_superseded
from normexp.records.result import read_result
from normexp.train import main


def test_unreadable_checkpoint_is_kept_aside_and_the_stack_starts_over(tmp_path: Path):
    words = ["norm=none", "steps=3", "replicas=1", f"runs_dir={tmp_path}"]
    assert main([*words, "dry_run=true"]) == 0
    assert main(words) == 0
    (cell,) = (p for p in (tmp_path / "default").iterdir() if p.is_dir())
    recorded = read_result(cell / "seed-0").metrics
    (cell / "seed-0" / "result.json").unlink()
    checkpoint = cell / "stacks" / "0-0" / "last.ckpt"
    checkpoint.write_bytes(b"torn")
    assert main(words) == 0
    assert read_result(cell / "seed-0").metrics == recorded
    assert not checkpoint.exists()
    assert (checkpoint.parent / "last.unreadable").read_bytes() == b"torn"


def test_checkpoints_of_other_stacks_with_one_of_the_seeds_go(tmp_path: Path):
    for name in ("0-1", "1-3", "2-5", "6-7"):
        (tmp_path / "stacks" / name).mkdir(parents=True)
        (tmp_path / "stacks" / name / "last.ckpt").touch()
    remove_superseded(tmp_path, [2, 3, 4, 5], tmp_path / "stacks" / "2-5")
    left = sorted(path.parent.name for path in tmp_path.glob("stacks/*/last.ckpt"))
    assert left == ["0-1", "2-5", "6-7"]


def test_run_that_its_last_update_broke_is_diverged(tmp_path: Path):
    words = ["norm=none", "lr=1e30", "optim.warmup=0", "steps=1", "replicas=1"]
    assert main([*words, f"runs_dir={tmp_path}"]) == 0
    (run,) = tmp_path.glob("default/*/seed-0")
    result = read_result(run)
    assert (result.status, result.diverged_at_step) == ("diverged", 1)


@pytest.mark.slow
def test_optimizer_not_known_to_act_by_value_trains_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "conf" / "optim"
    folder.mkdir(parents=True)
    knobs = "weight_decay: 0.0\ndecay_norm: false\nschedule: constant\nwarmup: 0.0\n"
    (folder / "own.yaml").write_text(
        f"_target_: own_optimizer_of_a_test.Own\n_partial_: true\ndefault_lr: 0.1\n{knobs}"
    )
    source = "import torch\nclass Own(torch.optim.SGD):\n    pass\n"
    (tmp_path / "own_optimizer_of_a_test.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        words = ["optim=own", "stack=true", "steps=2", "replicas=2", f"runs_dir={tmp_path}/runs"]
        assert main(["--config-dir", str(folder.parent), *words]) == 0
        (run,) = tmp_path.glob("runs/default/*/seed-0")
        assert read_result(run).config["stacked"] is False
        (tmp_path / "own_optimizer_of_a_test.py").write_text(source + "# edited\n")
        assert main(["--config-dir", str(folder.parent), *words]) == 0
        assert len(list(tmp_path.glob("runs/default/*/seed-0"))) == 2  # an edited one is a new cell
    finally:
        sys.modules.pop("own_optimizer_of_a_test", None)


def test_named_norm_takes_no_other_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["norm=batch", "norm._target_=torch.nn.Identity", f"runs_dir={tmp_path / 'runs'}"]
    assert main(words) == 2
    assert "try norm=custom norm._target_=" in capsys.readouterr().err


def test_wandb_runs_that_opened_are_finished_where_the_next_one_cannot(tmp_path, monkeypatch):
    finished = []

    class Run:
        def __init__(self, *, seed: int, **_: object) -> None:
            if seed == 2:
                raise OSError("no connection")
            self.seed = seed

        def finish(self, *, failed: bool) -> None:
            finished.append((self.seed, failed))

    monkeypatch.setattr("normexp.cells.stack.WandbRun", Run)
    words = ["norm=none", "steps=1", "replicas=3", "logger=wandb", f"runs_dir={tmp_path}"]
    assert main(words) == 1
    assert finished == [(0, True), (1, True)]
