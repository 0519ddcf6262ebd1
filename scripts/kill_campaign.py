"""Kills trainings at random, types them again, and compares what they leave with a whole study.

    python scripts/kill_campaign.py --kills 100 [--seed 0] [--folder DIR]

Each round is a study of norms, two rates and two norm batch sizes, disturbed in one of the ways of
`WAYS` until it is complete. After each: nothing missing, nothing twice, nothing left over, and
every result and metrics.csv equal, to the bit, those of a study that nothing disturbed, but for
runs that are recorded as trained apart. Prints a line per round and the totals.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from normexp.records.history import read_history
from normexp.records.metrics import read_metrics

TRAIN = Path(__file__).with_name("kill_campaign_train.py")
GRID = ["-m", "norm=batch,group", "lr=0.03,0.3", "norm_batch_size=4,32", "epochs=2", "log_every=5"]
FAILING = ["-m", "norm=custom", "norm._target_=failing_norm.FailsWhereItExplodes"]
FAILING += ["lr=0.03,0.1,0.3,3e4", "optim.warmup=0", "epochs=2", "replicas=2", "log_every=5"]
# Also of Ctrl-C while Python itself starts or ends, when no program can answer it.
EXIT_CODES = (0, 1, 130, -signal.SIGINT, -signal.SIGKILL)
ALWAYS = ["save_weights=true", "max_attempts=99", "trainer=cpu"]

# A norm that raises in a stack after some steps, and alone where its input is huge: so one rate of
# four fails, and the other three must not.
FAILING_NORM = """
import torch

class FailsWhereItExplodes(torch.nn.Module):
    steps = 0

    def __init__(self, num_features):
        super().__init__()

    def forward(self, x):
        if torch._C._functorch.is_batchedtensor(x):
            FailsWhereItExplodes.steps += self.training
            if FailsWhereItExplodes.steps > 120:
                raise RuntimeError("a run of this stack explodes")
        elif self.training and not x.detach().abs().max() < 1e6:
            raise RuntimeError("exploded")
        return x
"""

MARK = "NORMEXP_KILL_CAMPAIGN"  # in the environment of every process of a round


class Training:
    """A command in a process of its own."""

    def __init__(self, pid: int, wait: Callable[[int], int]) -> None:
        self.pid = pid
        self.wait = lambda: wait(pid)


class Campaign:
    """Where studies go, how commands are begun, and what has happened so far.

    Args:
        cold: share of the commands that begin as a user's do, by a new interpreter with spawned
            workers. The others, and their workers, are forked from a process that has torch
            imported, which is some seconds faster.

    Attributes:
        kills: by kind, of processes that were still alive.
        compared, apart: number of runs that were compared, and that were trained apart.
        seconds: of a study that nothing disturbs.
    """

    def __init__(self, folder: Path, seed: int, cold: float = 0.0) -> None:
        self.folder = folder
        self.draw = random.Random(seed)
        self.cold = cold
        self.kills: Counter[str] = Counter()
        self.compared = self.apart = self.commands = self.num_cold = 0
        self.seconds = 0.0
        for name in ("tmp", "slots", "runs"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "failing_norm.py").write_text(FAILING_NORM)
        self.environment = {
            **os.environ,
            MARK: str(folder),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder / "tmp"),
            "XDG_RUNTIME_DIR": str(folder / "slots"),
            "PYTHONPATH": os.pathsep.join([str(folder), str(TRAIN.parents[1])]),
        }
        self.server = subprocess.Popen(
            [sys.executable, str(TRAIN)],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._hear() == "ready"

    def close(self) -> None:
        assert self.server.stdin is not None and self.server.stdout is not None
        self.server.stdin.close()
        self.server.wait(30)
        self.server.stdout.close()

    def command(self, study: str, words: list[str], runs: Path | None = None) -> Training:
        """Types a line."""
        place = [f"runs_dir={runs or self.folder / 'runs'}", f"study={study}"]
        words = [*words, *ALWAYS, *place]
        path = self.folder / f"{study}.log"
        self.commands += 1
        if self.draw.random() >= self.cold:
            return Training(int(self._ask([str(path), words])), lambda pid: int(self._ask(pid)))
        self.num_cold += 1
        with open(path, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, str(TRAIN), *words],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return Training(process.pid, lambda _: process.wait())

    def finish(self, study: str, words: list[str], codes: tuple[int, ...] = (0,)) -> None:
        """Types a line again until it ends with one of the codes."""
        for _ in range(20):
            code = self.command(study, words).wait()
            if code in codes:
                return
            assert code in (1, 130), (code, self.tail(study))
        raise AssertionError(f"{study} does not end:\n{self.tail(study)}")

    def tail(self, study: str) -> str:
        return (self.folder / f"{study}.log").read_text(errors="replace")[-4000:]

    def _ask(self, message: object) -> str:
        assert self.server.stdin is not None
        print(json.dumps(message), file=self.server.stdin, flush=True)
        return self._hear()

    def _hear(self) -> str:
        assert self.server.stdout is not None
        return self.server.stdout.readline().strip()


# --- What disturbs -------------------------------------------------------------------------------


def kill_parent(campaign: Campaign, process: Training) -> None:
    _kill(campaign, "parent", [process.pid])


def kill_worker(campaign: Campaign, process: Training) -> None:
    workers = _workers_of(process.pid)
    if workers:
        _kill(campaign, "worker", [campaign.draw.choice(workers)])
        if campaign.draw.random() < 0.5:  # else the command goes on with another
            return
    _kill(campaign, "parent", [process.pid])


def kill_all(campaign: Campaign, process: Training) -> None:
    family = [process.pid, *_workers_of(process.pid)]
    campaign.draw.shuffle(family)
    _kill(campaign, "all", family)


def interrupt(campaign: Campaign, process: Training) -> None:
    """Ctrl-C; perhaps a second one, or a kill, before all have ended."""
    _kill(campaign, "Ctrl-C", [process.pid], signal.SIGINT)
    after = campaign.draw.random()
    if after < 0.6:
        time.sleep(campaign.draw.uniform(0, 1))
    if after < 0.3:
        _kill(campaign, "second Ctrl-C", [process.pid], signal.SIGINT)
    elif after < 0.6:
        kill_all(campaign, process)


KILLERS = {
    "parent": kill_parent,
    "worker": kill_worker,
    "all": kill_all,
    "interrupt": interrupt,
}


def _kill(campaign: Campaign, kind: str, pids: list[int], number: int = signal.SIGKILL) -> None:
    if is_alive(pids[0]):
        campaign.kills[kind] += 1
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def is_alive(pid: int) -> bool:
    """True if a process runs and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _workers_of(pid: int) -> list[int]:
    try:
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(word) for word in words if b"resource_tracker" not in _command_line(int(word))]


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


# Files whose appearance is a moment worth dying at; a dot file is one that is being written.
MOMENTS = (
    *("config.yaml", ".members.json.*", "members.json", ".last.ckpt.*", "last.ckpt"),
    *(".weights.pt.*", "weights.pt", ".result.json.*", "result.json", ".metrics.csv.*"),
)


def wait_for_a_moment(campaign: Campaign, process: Training, study: Path) -> None:
    """Sleeps for a random time, or until a file is written."""
    if campaign.draw.random() < 0.5:
        time.sleep(campaign.draw.uniform(0, campaign.seconds))
        return
    name = campaign.draw.choice(MOMENTS)
    before = _found(study, name)
    deadline = time.monotonic() + campaign.seconds
    while time.monotonic() < deadline and is_alive(process.pid):
        if _found(study, name) - before:
            return
        time.sleep(0.003)


def _found(study: Path, name: str) -> set[Path]:
    """The files of a study of this name; none while folders come and go."""
    try:
        return {path for path in study.rglob(name) if path.suffix != ".log"}
    except FileNotFoundError:
        return set()


# --- What must hold ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """The numbers of a run, in all their bytes."""

    result: str
    metrics: bytes
    apart: bool


def runs_of(study: Path) -> dict[str, Run]:
    runs = {}
    for path in sorted(study.glob("*/seed-*/result.json")):
        result = json.loads(path.read_text())
        kept = {key: result.get(key) for key in ("status", "metrics", "diverged_at_step", "config")}
        metrics = (path.parent / "metrics.csv").read_bytes()
        name = str(path.parent.relative_to(study))
        runs[name] = Run(json.dumps(kept), metrics, result.get("apart") is not None)
    return runs


def ended_runs(study: Path) -> dict[Path, tuple[int, int]]:
    """Identity of every ended result.json: one that was written anew has another."""
    ended = {}
    for path in study.glob("*/seed-*/result.json"):
        if json.loads(path.read_text())["status"] != "failed":
            found = path.stat()
            ended[path] = (found.st_ino, found.st_mtime_ns)
    return ended


def check_same(campaign: Campaign, study: Path, whole: dict[str, Run]) -> None:
    """Nothing is missing, and nothing differs but what was trained apart."""
    runs = runs_of(study)
    assert runs.keys() == whole.keys(), sorted(runs.keys() ^ whole.keys())
    for name, run in runs.items():
        if run.apart or whole[name].apart:
            campaign.apart += 1
        else:
            campaign.compared += 1
            assert run.result == whole[name].result, (study, name)
            assert run.metrics == whole[name].metrics, (study, name)


def check_nothing_torn(study: Path) -> None:
    """Every file that a reader may open is whole, at any moment."""
    for path in study.glob("*/seed-*/result.json"):
        if json.loads(path.read_text())["status"] == "finished":
            with zipfile.ZipFile(path.parent / "weights.pt") as weights:
                assert weights.testzip() is None
    for path in study.glob("*/seed-*/metrics.csv"):
        read_metrics(path)
    if study.is_dir():
        read_history(study)


def check_nothing_left(campaign: Campaign, study: Path) -> None:
    for name in (".lock", ".*.tmp", "last.ckpt", "members.json"):
        assert not list(study.rglob(name)), list(study.rglob(name))
    deadline = time.monotonic() + 60
    while orphans := _processes_of(campaign):
        assert time.monotonic() < deadline, [_command_line(pid) for pid in orphans]
        time.sleep(0.1)


def _processes_of(campaign: Campaign) -> list[int]:
    mark = f"{MARK}={campaign.folder}".encode()
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdecimal() and int(path.name) not in (os.getpid(), campaign.server.pid):
            with suppress(OSError):
                if mark in (path / "environ").read_bytes().split(b"\0") and is_alive(
                    int(path.name)
                ):
                    found.append(int(path.name))
    return found


# --- Rounds --------------------------------------------------------------------------------------

Way = Callable[[Campaign, str], None]


def disturb(
    campaign: Campaign, study: str, words: list[str], killers: list[str], most: int
) -> None:
    """Types a line, kills it, types it again at once, up to `most` times; then lets it end."""
    folder = campaign.folder / "runs" / study
    for _ in range(most):
        before = ended_runs(folder)
        process = campaign.command(study, words)
        wait_for_a_moment(campaign, process, folder)
        KILLERS[campaign.draw.choice(killers)](campaign, process)
        code = process.wait()
        assert code in EXIT_CODES, (code, campaign.tail(study))
        check_nothing_torn(folder)
        after = ended_runs(folder)
        assert {path: after.get(path) for path in before} == before, "a result was written twice"
        if code == 0:
            break
    before = ended_runs(folder)
    campaign.finish(study, words)
    after = ended_runs(folder)
    assert {path: after.get(path) for path in before} == before, "a result was written twice"


def in_one_process(campaign: Campaign, study: str) -> None:
    words = [*GRID, "replicas=4", "workers=0"]
    disturb(campaign, study, words, ["parent", "interrupt"], 3)
    check(campaign, study, "whole")


def in_workers(campaign: Campaign, study: str) -> None:
    words = [*GRID, "replicas=4", "workers=2"]
    disturb(campaign, study, words, list(KILLERS), 4)
    check(campaign, study, "whole")


def extended(campaign: Campaign, study: str) -> None:
    """From 4 to 8 seeds, each half disturbed."""
    workers = f"workers={campaign.draw.choice([0, 2])}"
    for replicas in (4, 8):
        disturb(campaign, study, [*GRID, f"replicas={replicas}", workers], list(KILLERS), 2)
    check(campaign, study, "whole8")


def in_two_terminals(campaign: Campaign, study: str) -> None:
    """Both train the study at once; one or both are killed, and typed again at once."""
    words = [[*GRID, "replicas=4", f"workers={number}"] for number in (0, 2)]
    folder = campaign.folder / "runs" / study
    for _ in range(2):
        both = [campaign.command(study, line) for line in words]
        victim = campaign.draw.choice(both)
        wait_for_a_moment(campaign, victim, folder)
        KILLERS[campaign.draw.choice(list(KILLERS))](campaign, victim)
        codes = [process.wait() for process in both]
        assert all(code in EXIT_CODES for code in codes), campaign.tail(study)
    campaign.finish(study, words[1])
    check(campaign, study, "whole")


def with_a_rate_that_raises(campaign: Campaign, study: str) -> None:
    """Three of four rates finish; the fourth fails, and so does the command."""
    words = [*FAILING, f"workers={campaign.draw.choice([0, 2])}"]
    process = campaign.command(study, words)
    wait_for_a_moment(campaign, process, campaign.folder / "runs" / study)
    KILLERS[campaign.draw.choice(list(KILLERS))](campaign, process)
    process.wait()
    campaign.finish(study, words, codes=(1,))
    folder = campaign.folder / "runs" / study
    results = [json.loads(path.read_text()) for path in folder.glob("*/seed-*/result.json")]
    states = Counter((result["config"]["lr"], result["status"]) for result in results)
    expected = {(lr, "finished"): 2 for lr in (0.03, 0.1, 0.3)} | {(3e4, "failed"): 2}
    assert states == expected, (states, campaign.tail(study))
    assert all(result["apart"] for result in results)
    campaign.apart += len(results)
    check_nothing_left(campaign, folder)


def with_a_full_disk(campaign: Campaign, study: str) -> None:
    """A disk with room for half of the study; then with room for all of it."""
    with small_disk(campaign.folder / f"disk-{study}") as disk:
        if disk is None:
            return
        words = [*GRID, "replicas=4", f"workers={campaign.draw.choice([0, 2])}"]
        whole = campaign.folder / "runs" / "whole"
        size = sum(path.stat().st_size for path in whole.rglob("*") if path.is_file())
        ballast = disk / "ballast"
        ballast.write_bytes(b"\0" * (DISK - int(size * campaign.draw.uniform(0.3, 0.7))))
        code = campaign.command(study, words, disk / "runs").wait()
        assert code == 1 and "the disk is full" in campaign.tail(study), campaign.tail(study)
        campaign.kills["full disk"] += 1
        ballast.unlink()
        assert campaign.command(study, words, disk / "runs").wait() == 0, campaign.tail(study)
        check_same(campaign, disk / "runs" / study, runs_of(whole))
        check_nothing_left(campaign, disk / "runs" / study)


DISK = 16 * 2**20


@contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A disk of `DISK` bytes; None where only root could mount one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


WAYS: dict[str, Way] = {
    "one process": in_one_process,
    "workers": in_workers,
    "4 to 8 seeds": extended,
    "two terminals": in_two_terminals,
    "a rate raises": with_a_rate_that_raises,
    "full disk": with_a_full_disk,
}


def check(campaign: Campaign, study: str, whole: str) -> None:
    runs = campaign.folder / "runs"
    check_same(campaign, runs / study, runs_of(runs / whole))
    check_nothing_left(campaign, runs / study)


def train_whole(campaign: Campaign) -> None:
    """The studies that nothing disturbs: with 4 seeds, and with 4 and then 8."""
    for study, replicas in (("whole", 4), ("whole8", 4), ("whole8", 8)):
        began = time.monotonic()
        words = [*GRID, f"replicas={replicas}", "workers=2"]
        assert campaign.command(study, words).wait() == 0, campaign.tail(study)
        campaign.seconds = campaign.seconds or time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cold", type=float, default=0.1, help="share of spawned commands")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="kill-campaign-"))
    campaign = Campaign(folder.resolve(), options.seed, options.cold)
    train_whole(campaign)
    print(f"{folder}: the whole study takes {campaign.seconds:.0f} s", flush=True)
    number = 0
    while campaign.kills.total() < options.kills:
        name, way = list(WAYS.items())[number % len(WAYS)]
        number += 1
        began = time.monotonic()
        way(campaign, f"cut{number}")
        seconds = time.monotonic() - began
        print(f"{number:3} {name:14} {seconds:4.0f} s  {dict(campaign.kills)}", flush=True)
    campaign.close()
    print(
        f"{campaign.kills.total()} disturbances in {number} studies by {campaign.commands} "
        f"commands ({campaign.num_cold} of them by new interpreters): {dict(campaign.kills)}; "
        f"{campaign.compared} runs equal to the bit, {campaign.apart} recorded as trained apart; "
        f"left in TMPDIR: {[path.name for path in (campaign.folder / 'tmp').iterdir()]}"
    )


if __name__ == "__main__":
    main()
