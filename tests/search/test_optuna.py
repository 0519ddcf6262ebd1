"""The README's lines that let an Optuna study drive normexp, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import normexp

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_optuna_study_drives_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("optuna").logging.set_verbosity(40)
    (lines,) = [code for code in re.findall("```python\n(.+?)```", README, re.S) if "ask()" in code]
    assert len(lines.splitlines()) <= 10
    monkeypatch.chdir(tmp_path)
    exec(
        lines.replace("range(20)", "range(2)").replace('"seed=1000"', '"seed=1000", "steps=4"'), {}
    )
    assert re.fullmatch(r"\{'lr': [\d.]+\}", capsys.readouterr().out.splitlines()[-1])
    runs = normexp.load_study("adaptive")
    assert len(runs) == 2 * 4 and runs["lr"].nunique() == 2
    assert set(runs["seed"]) == {1000, 1001, 1002, 1003}
