"""A study that is killed, shared, or out of disk space ends as one that nothing disturbed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from killing import WarmTrainings, check_nothing_torn, ended_runs, numbers_of

pytestmark = pytest.mark.slow

GRID = ["-m", "norm=batch,group", "norm_batch_size=4,32", "epochs=2", "replicas=2", "log_every=5"]
RATES = ["-m", "lr=0.03,0.3,1", "norm_batch_size=2", "epochs=3", "replicas=2", "log_every=5"]
# Files whose appearance is a moment worth dying at; a dot file is one that is being written.
MOMENTS = (
    *("config.yaml", "seed-*/.result.json.*", "seed-*/.weights.pt.*", "seed-1/weights.pt"),
    *("stacks/*/.ended.json.*", "stacks/*/ended.json", "seed-0/result.json"),
    *("stacks/*/.last.ckpt.*", "stacks/*/last.ckpt"),
)


@pytest.fixture
def warm(tmp_path: Path) -> Iterator[WarmTrainings]:
    trainings = WarmTrainings(tmp_path / "log")
    yield trainings
    trainings.close()


@pytest.mark.parametrize(
    ("grid", "num_kills"),
    [(GRID, 30), (RATES, 15)],  # 6 runs each: group norm mixes no samples; one stack of three cells
)
def test_kills_change_no_number_and_train_nothing_twice(
    tmp_path: Path, warm: WarmTrainings, grid: list[str], num_kills: int
):
    draw = random.Random(0)
    runs = f"runs_dir={tmp_path / 'runs'}"
    words = [*grid, "workers=0", runs]
    began = time.monotonic()
    assert warm.run([*words, "study=whole"]) == 0
    seconds = time.monotonic() - began
    whole = numbers_of(tmp_path / "runs" / "whole")
    assert len(whole) == 6
    kills = tries = rounds = 0
    while kills < num_kills:
        rounds += 1
        study = tmp_path / "runs" / f"cut{rounds}"
        ended: dict[Path, tuple[int, int]] = {}
        code = None
        while code != 0:
            pid = warm.begin([*words, f"study={study.name}"])
            if kills < num_kills:
                tries += 1
                kills += die_at_some_moment(pid, study, tries, seconds, draw)
            code = warm.wait(pid)
            assert code in (0, 130, -signal.SIGKILL), warm.log.read_text()[-3000:]
            check_nothing_torn(study)
            now = ended_runs(study)
            assert {path: now.get(path) for path in ended} == ended
            ended = now
        assert numbers_of(study) == whole
        assert not list(study.glob("**/.*.tmp"))
        assert not list(study.glob("**/stacks/*/last.ckpt"))
        assert not list(study.glob("**/stacks/*/ended.json"))


def die_at_some_moment(
    pid: int, study: Path, kill: int, seconds: float, draw: random.Random
) -> bool:
    """At a random time; or when a file appears; or soon after a Ctrl-C, for a checkpoint.

    Returns:
        True if it was still alive.
    """
    if kill % 3 == 0:
        wait_for(pid, study, MOMENTS[kill // 3 % 7], seconds)
    else:
        time.sleep(draw.uniform(0, 0.6 * seconds))
    if kill % 3 == 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
        if kill % 2:
            wait_for(pid, study, MOMENTS[7 + kill // 2 % 2], 1.0)
        else:
            time.sleep(draw.uniform(0, 0.1))
    was_alive = is_alive(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return was_alive


def wait_for(pid: int, study: Path, pattern: str, seconds: float) -> None:
    """Waits until a new file matches, or `seconds` have passed."""
    before = found(study, pattern)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and is_alive(pid):
        if found(study, pattern) - before:
            return
        time.sleep(0.0005)


def found(study: Path, pattern: str) -> set[Path]:
    """The files of a study that match; none while folders come and go."""
    try:
        return set(study.glob(f"**/{pattern}"))
    except FileNotFoundError:
        return set()


def is_alive(pid: int) -> bool:
    """True if a process runs and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("seed", [0, 1])
def test_killed_workers_and_their_sweep(tmp_path: Path, seed: int):
    """Kills all processes at once, as when a machine loses power."""
    draw = random.Random(seed)
    runs, study = f"runs_dir={tmp_path / 'runs'}", tmp_path / "runs" / "cut"
    command = [sys.executable, "-m", "normexp.train", *GRID, "workers=2", runs]
    began = time.monotonic()
    subprocess.run([*command, "study=whole"], check=True, capture_output=True)
    seconds = time.monotonic() - began
    for kill in range(3):
        process = subprocess.Popen([*command, "study=cut"], stderr=subprocess.DEVNULL)
        time.sleep(draw.uniform(0.3 * kill, 0.3 * (kill + 1)) * seconds)
        family = [process.pid, *children_of(process.pid)]
        for pid in family if seed else reversed(family):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        check_nothing_torn(study)
    subprocess.run([*command, "study=cut"], check=True, capture_output=True)
    assert numbers_of(study) == numbers_of(tmp_path / "runs" / "whole")


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


SHARED_GRID = ["norm=batch,group,layer", "norm_batch_size=4,32", "epochs=3"]
SHARED_GRID += ["replicas=2", "log_every=5"]


def command(tmp_path: Path, study: str, workers: int) -> list[str]:
    own = [f"workers={workers}", f"runs_dir={tmp_path / 'runs'}", f"study={study}"]
    return [sys.executable, "-m", "normexp.train", "-m", *SHARED_GRID, *own]


def test_two_sweeps_at_once_train_each_run_once(tmp_path: Path):
    subprocess.run(command(tmp_path, "whole", 0), check=True, capture_output=True)
    both = [
        subprocess.Popen(
            command(tmp_path, "shared", workers),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for workers in (0, 1)
    ]
    answers = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], answers
    study = tmp_path / "runs" / "shared"
    assert numbers_of(study) == numbers_of(tmp_path / "runs" / "whole")
    cells = [path.name for path in study.iterdir() if path.is_dir()]
    assert len(cells) == 4
    for out, _ in answers:  # a closing table of all cells, whoever trained them
        assert all(name in out for name in cells)
    lines = [line for _, err in answers for line in err.splitlines() if line.startswith("[")]
    trained = [line.split()[2] for line in lines if line.split()[1] == "finished"]
    assert len(lines) == 12
    assert len(trained) == 4  # each of the four cells by one of the two


DISK_GRID = ["-m", "norm=batch,group,layer", "steps=30", "replicas=2", "log_every=5"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("workers", [0, 1])
def test_full_disk_is_one_message_and_the_rerun_completes(
    tmp_path: Path, small_disk: Path, workers: int
):
    entry = [sys.executable, "-m", "normexp.train", *DISK_GRID, f"workers={workers}"]
    whole = subprocess.run([*entry, f"runs_dir={tmp_path}"], capture_output=True, check=True)
    assert whole.returncode == 0
    size = sum(path.stat().st_size for path in (tmp_path / "default").rglob("*") if path.is_file())
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"\0" * (4 * 2**20 - size // 2))  # room for half of the study
    command = [*entry, f"runs_dir={small_disk / 'runs'}"]
    full = subprocess.run(command, capture_output=True, text=True, check=False)
    assert full.returncode == 1
    assert "Traceback" not in full.stderr
    (message,) = [line for line in full.stderr.splitlines() if line.startswith("normexp: ")]
    assert "the disk is full" in message
    study = small_disk / "runs" / "default"
    check_nothing_torn(study)
    assert 0 < len(numbers_of(study)) < 6  # no run that failed for want of room
    ballast.unlink()
    subprocess.run(command, capture_output=True, check=True)
    assert numbers_of(study) == numbers_of(tmp_path / "default")
