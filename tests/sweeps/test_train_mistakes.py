"""A mistake in a line of `python -m normexp.train` is told and leaves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from train_cases import QUICK

from normexp.train import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["norm=instance", "model=custom", "model._target_=torch.nn.Identity"],
            "no argument `norm`",
        ),
        (["norm=group", "norm.num_groups=5"], "num_groups=5 does not divide num_features=16"),
        (["norm=batch", "batch_size=2000"], "batch_size=2000 is more than the 1294"),
        (["model=gpt"], "does not fit data=digits"),
        (["data=langid", "model=convnet"], "does not fit data=langid"),
        (["norm=batch", "norm.half_life=100"], "are both set"),
        (["steps=5", "samples=100"], "are both set"),
        (["data=text_file", "data.path=nowhere.txt"], "nowhere.txt"),
        (["data=image_folder", "data.root=nowhere"], "nowhere"),
        (["trainer=gpu"], "trainer"),
        (["norm=custom", "norm._target_=no.such.Norm"], "no.such.Norm"),
        (["norm=custom", "norm._target_=torch.nn.Linear"], "torch.nn.Linear"),
        (["norm=custom", "norm._target_=torch.nn.GroupNorm"], "num_groups"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_is_one_short_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
):
    if "trainer=gpu" in words and torch.cuda.is_available():
        pytest.skip("a GPU is there")
    quick = [w for w in QUICK if w.split("=")[0] not in {x.split("=")[0] for x in words}]
    assert main([*words, *quick, f"runs_dir={tmp_path / 'runs'}"]) == 2
    err = capsys.readouterr().err
    (line,) = [line for line in err.splitlines() if line.startswith("normexp: ")]
    assert message in line
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()


def test_runs_dir_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert main([*QUICK, f"runs_dir={blocked}/runs"]) == 2
    assert "runs_dir" in capsys.readouterr().err
