"""The shell around a training: options, help, exit codes, and what Hydra answers itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from normexp.cli import hydra_app, run_entry
from normexp.config.arguments import parse_arguments
from normexp.config.help import GROUPS, group_choices, help_text
from normexp.errors import UserError


def test_options_and_overrides_may_stand_in_any_order():
    found = parse_arguments(["seed=1", "-m", "--config-dir", "a", "lr=2", "-cd", "b", "~x"])
    assert found.overrides == ["seed=1", "lr=2", "~x"]
    assert found.config_dirs == ["a", "b"]
    assert found.multirun and not found.help and not found.delegate


@pytest.mark.parametrize("argv", [["--cfg", "job"], ["--info"], ["-sc", "install=bash"]])
def test_hydras_own_questions_are_delegated(argv: list[str]):
    assert parse_arguments(argv).delegate


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--confg-dir", "a"], "--confg-dir"),
        (["--cfg", "everything"], "everything"),
        (["--config-dir"], "expected one argument"),
        (["--cfg", "job", "-m"], "drop -m"),
    ],
)
def test_unknown_option_is_a_users_mistake(argv: list[str], part: str):
    with pytest.raises(UserError, match=part):
        parse_arguments(argv)


def test_help_lists_every_choice_and_the_values_with_defaults(tmp_path: Path):
    (tmp_path / "norm").mkdir()
    (tmp_path / "norm" / "my_norm.yaml").write_text("_target_: my.Norm\n")
    text = help_text([str(tmp_path)])
    for group in GROUPS:
        for name in group_choices(group):
            assert name in text
    assert "my_norm" in text
    for setting in ("batch_size=32", "norm_batch_size=null", "replicas=4", "study=default"):
        assert setting in text
    assert max(map(len, text.splitlines())) <= 100


def raises(error: BaseException):
    def entry() -> int:
        raise error

    return entry


def test_exit_codes_and_the_one_line_of_a_mistake(capsys: pytest.CaptureFixture[str]):
    assert run_entry(lambda: 1) == 1
    assert capsys.readouterr().err == ""
    assert run_entry(raises(UserError("lr=0: must be above 0"))) == 2
    assert capsys.readouterr().err == "normexp: lr=0: must be above 0\n"
    assert run_entry(raises(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "normexp: interrupted\n"
    assert run_entry(raises(KeyboardInterrupt("stopped"))) == 130
    assert capsys.readouterr().err == "normexp: stopped\n"
    with pytest.raises(ZeroDivisionError):
        run_entry(raises(ZeroDivisionError()))


def test_cfg_shows_the_composed_config_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    before = list(sys.argv)
    assert hydra_app(["--cfg", "job", "optim=adamw", "batch_size=8"]) == 0
    shown = capsys.readouterr().out
    assert "batch_size: 8" in shown and "_target_: torch.optim.AdamW" in shown
    assert list(tmp_path.iterdir()) == []
    assert sys.argv == before


def test_cfg_refuses_as_a_training_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="optim=sgdd: no such optim"):
        hydra_app(["--cfg", "job", "optim=sgdd"])


def test_shell_completion_lists_choices():
    script = "import sys; from normexp.train import main; sys.exit(main(sys.argv[1:]))"
    environment = {**os.environ, "COMP_LINE": "normexp-train optim=", "COMP_POINT": "20"}
    run = subprocess.run(
        [sys.executable, "-c", script, "-sc", "query=bash"],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert run.stdout.split() == ["optim=adamw", "optim=sgd"]
