"""Kills trainings at random, types them again, and compares what they leave with a whole study.

    python scripts/kill_campaign.py --kills 100 [--seed 0] [--folder DIR]

Each round is a study that is disturbed in one of the `WAYS` until it is complete, or whose disk is
full for a while. After it nothing may be missing, nothing twice, nothing left over, and every
result and metrics.csv must equal, to the bit, those of a study that nothing disturbed, but for runs
that are recorded as trained apart. Prints a line per round and the totals; exit code 1 for a
problem.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from normexp.records.history import read_history

from normexp.errors import UserError
from normexp.records.metrics import read_metrics
from normexp.records.paths import list_runs
from normexp.sweeps import worker_process
from normexp.sweeps.machine import environment

SAVE_SECONDS = 0.5  # between checkpoints
GRID = ["-m", "norm=batch,group", "lr=0.03,0.3", "norm_batch_size=4,32", "epochs=2", "log_every=5"]
FAILING = ["-m", "norm=custom", "norm._target_=failing_norm.FailsWhereItExplodes"]
FAILING += ["lr=0.03,0.1,0.3,3e4", "optim.warmup=0", "epochs=2", "replicas=2", "log_every=5"]
ALWAYS = ["save_weights=true", "max_attempts=99", "trainer=cpu"]
# Also of Ctrl-C while Python itself starts or ends, when no program can answer it.
EXIT_CODES = {0, 1, 130, -signal.SIGINT, -signal.SIGKILL}
DISK = 16 * 2**20  # bytes

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


@dataclass(frozen=True)
class Way:
    """How a study is disturbed.

    Attributes:
        lines: commands, each typed again until it is complete, then the next.
        whole: name of the undisturbed study that the result must equal.
        times: most disturbances of each command.
        killers: kinds of `Campaign.kill`, one of which is drawn each time.
        workers: number of workers of a command, drawn from these.
        at_once: instead types one command for each number of workers at the same time.
        code: exit code of the last command.
    """

    lines: Sequence[Sequence[str]]
    times: int
    whole: str = "whole"
    killers: Sequence[str] = ("parent", "worker", "all", "Ctrl-C")
    workers: Sequence[int] = (0, 2)
    at_once: bool = False
    code: int = 0


WAYS = {
    "one process": Way([[*GRID, "replicas=4"]], 3, killers=("parent", "Ctrl-C"), workers=(0,)),
    "workers": Way([[*GRID, "replicas=4"]], 4, workers=(2,)),
    "4 to 8 seeds": Way([[*GRID, "replicas=4"], [*GRID, "replicas=8"]], 2, "whole8"),
    "two terminals": Way([[*GRID, "replicas=4"]], 2, at_once=True),
    "a rate raises": Way([FAILING], 1, "failing", code=1),
}
# Files whose appearance is a moment worth dying at; a dot file is one that is being written.
MOMENTS = (
    *("config.yaml", ".members.json.*", "members.json", ".last.ckpt.*", "last.ckpt"),
    *(".weights.pt.*", "weights.pt", ".result.json.*", "result.json", ".metrics.csv.*"),
)
MARK = "NORMEXP_KILL_CAMPAIGN"  # in the environment of every process of a campaign


class Campaign:
    """Where studies go, how commands are typed, and what has happened so far.

    Args:
        cold: share of the commands that begin as a user's do, by a new interpreter with spawned
            workers. The others, and their workers, are forked from a process that has torch
            imported, which is some seconds faster.

    Attributes:
        problems: what must never happen, in words.
        kills: by kind, of processes that were still alive.
        seconds: of a study that nothing disturbs.
    """

    def __init__(self, folder: Path, seed: int, cold: float = 0.0) -> None:
        self.folder, self.runs = folder, folder / "runs"
        self.draw = random.Random(seed)
        self.cold = cold
        self.problems: list[str] = []
        self.kills: Counter[str] = Counter()
        self.num_commands = self.num_cold = 0
        for name in ("tmp", "slots", "runs"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "failing_norm.py").write_text(FAILING_NORM)
        self.environment = {
            MARK: str(folder),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder / "tmp"),
            "XDG_RUNTIME_DIR": str(folder / "slots"),
        }
        multiprocessing.set_forkserver_preload(["normexp.cells.run"])
        began = time.monotonic()
        self.finish("whole", [*GRID, "replicas=4", "workers=2"])
        self.seconds = time.monotonic() - began
        self.idle = self.processes()  # of multiprocessing, until the campaign ends
        for replicas in (4, 8):
            self.finish("whole8", [*GRID, f"replicas={replicas}", "workers=2"])
        self.finish("failing", [*FAILING, "workers=0"], code=1)

    def type(self, study: str, words: Sequence[str], runs: Path | None = None) -> BaseProcess:
        """Begins a command in a process of its own."""
        is_cold = self.draw.random() < self.cold
        self.num_commands += 1
        self.num_cold += is_cold
        line = [*words, *ALWAYS, f"runs_dir={runs or self.runs}", f"study={study}"]
        context = multiprocessing.get_context("spawn" if is_cold else "forkserver")
        process = context.Process(target=begin, args=(self.log(study), line, not is_cold))
        with environment(self.environment):
            process.start()
        return process

    def end(self, study: str, process: BaseProcess, expected: set[int]) -> int:
        """Waits for the end of a command; an exit code that is not expected is a problem."""
        process.join()
        code = process.exitcode or 0
        if code not in expected:
            self.problems.append(f"{study} ended with {code}, see {self.log(study)}")
        return code

    def finish(self, study: str, words: Sequence[str], code: int = 0) -> None:
        """Types a line again until it ends with this code."""
        for _ in range(20):
            if self.end(study, self.type(study, words), {code, 1, 130}) in {code, 2}:
                return
        self.problems.append(f"{study} does not end")

    def log(self, study: str) -> Path:
        return self.folder / f"{study}.log"

    def disturb(self, way: Way, study: str) -> None:
        """Types lines, kills them, types them again at once; then lets them end."""
        folder = self.runs / study
        for words in way.lines:
            for _ in range(way.times):
                before = ended_runs(folder)
                counts = way.workers if way.at_once else [self.draw.choice(way.workers)]
                typed = [self.type(study, [*words, f"workers={count}"]) for count in counts]
                victim = self.draw.choice(typed)
                self.wait_for_a_moment(victim.pid or 0, folder)
                self.kill(self.draw.choice(way.killers), victim.pid or 0)
                codes = [self.end(study, process, EXIT_CODES) for process in typed]
                self.problems += torn_files(folder) + rewritten(folder, before)
                if codes == [way.code] * len(codes):
                    break
            before = ended_runs(folder)
            self.finish(study, [*words, f"workers={way.workers[-1]}"], way.code)
            self.problems += rewritten(folder, before)

    def wait_for_a_moment(self, pid: int, study: Path) -> None:
        """Sleeps for a random time, or until a file is written."""
        if self.draw.random() < 0.5:
            time.sleep(self.draw.uniform(0, self.seconds))
            return
        name = self.draw.choice(MOMENTS)
        before = _found(study, name)
        deadline = time.monotonic() + self.seconds
        while time.monotonic() < deadline and is_alive(pid) and not _found(study, name) - before:
            time.sleep(0.003)

    def kill(self, kind: str, pid: int) -> None:
        """Kills a command, a worker or all of them; Ctrl-C is perhaps followed by another."""
        workers = _workers_of(pid)
        if kind == "Ctrl-C":
            self._send(kind, [pid], signal.SIGINT)
            after = self.draw.random()
            if after < 0.6:
                time.sleep(self.draw.uniform(0, 1))
            if after < 0.3:
                self._send("second Ctrl-C", [pid], signal.SIGINT)
            elif after < 0.6:
                self.kill("all", pid)
        elif kind == "worker" and workers:
            self._send(kind, [self.draw.choice(workers)])
            if self.draw.random() < 0.5:  # else the command goes on with another
                self._send("parent", [pid])
        elif kind == "all":
            self._send(kind, self.draw.sample([pid, *workers], len(workers) + 1))
        else:
            self._send("parent", [pid])

    def _send(self, kind: str, pids: list[int], number: int = signal.SIGKILL) -> None:
        self.kills[kind] += is_alive(pids[0])
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def processes(self) -> set[int]:
        """The processes of the campaign that are alive."""
        mark = f"{MARK}={self.folder}".encode()
        found = set()
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                is_own = mark in (path / "environ").read_bytes().split(b"\0")
                if is_own and is_alive(int(path.name)):
                    found.add(int(path.name))
        return found

    def orphans(self) -> set[int]:
        """Processes that are still alive a minute after the last command has ended."""
        deadline = time.monotonic() + 60
        while (left := self.processes() - self.idle) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def fill_disk(self, study: str) -> Path | None:
        """Trains a study on a disk with room for half of it, then for all; returns its folder.

        None where only root could mount a small disk.
        """
        disk = self.folder / f"disk-{study}"
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(disk)]
        if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
            return None
        words = [*GRID, "replicas=4", f"workers={self.draw.choice([0, 2])}"]
        files = [path for path in (self.runs / "whole").rglob("*") if path.is_file()]
        room = int(sum(path.stat().st_size for path in files) * self.draw.uniform(0.3, 0.7))
        (disk / "ballast").write_bytes(b"\0" * (DISK - room))
        self.end(study, self.type(study, words, disk / "runs"), {1})
        if "the disk is full" not in self.log(study).read_text(errors="replace"):
            self.problems.append(f"{study} does not say that the disk is full")
        self.kills["full disk"] += 1
        (disk / "ballast").unlink()
        self.end(study, self.type(study, words, disk / "runs"), {0})
        return disk / "runs" / study


def begin(log: Path, words: list[str], forks: bool) -> None:
    """Trains in this process, as `python -m normexp.train` does, with a checkpoint often."""
    os.setsid()
    sys.path.insert(0, str(log.parent))  # of the failing norm
    code = 70
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        if forks:
            save_often()
            worker_process.SPAWN = multiprocessing.get_context("fork")  # type: ignore[assignment]
        from normexp.train import main as train

        code = train(words)
    except KeyboardInterrupt:  # before the entry could handle it, or after it had
        code = 130
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def save_often() -> None:
    from normexp.training import fit

    fit.SECONDS_BETWEEN_SAVES = SAVE_SECONDS


@contextmanager
def unmounted(study: Path | None) -> Iterator[Path | None]:
    """Removes the disk of `Campaign.fill_disk` after the block."""
    try:
        yield study
    finally:
        if study is not None:
            subprocess.run(["umount", "-l", str(study.parents[1])], check=True)


# --- Processes and files -------------------------------------------------------------------------


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
    return [int(word) for word in words]


def _found(study: Path, name: str) -> set[Path]:
    """The files of a study of this name; none while folders come and go."""
    try:
        return {path for path in study.rglob(name) if path.suffix != ".log"}
    except FileNotFoundError:
        return set()


# --- What must hold ------------------------------------------------------------------------------


def results_of(study: Path) -> list[Path]:
    """Every result.json; not by Path.glob, which raises where a folder is removed meanwhile."""
    paths = (run_dir / "result.json" for run_dir in list_runs(study))
    return [path for path in paths if path.exists()]


def runs_of(study: Path) -> dict[str, dict[str, object]]:
    """The numbers of each ended run, in all their digits; only how it ended if it is apart."""
    runs = {}
    for path in results_of(study):
        result = json.loads(path.read_text())
        run = {"status": result["status"]}
        if result.get("apart") is None:
            run |= {key: result.get(key) for key in ("config", "metrics", "diverged_at_step")}
            run["rows"] = (path.parent / "metrics.csv").read_bytes()
        runs[str(path.parent.relative_to(study))] = run
    return runs


def differing(study: Path, whole: Path) -> list[str]:
    """The runs that one study lacks, or whose numbers differ and were not trained apart."""
    here, there = runs_of(study), runs_of(whole)
    return [
        name
        for name in sorted(here.keys() | there.keys())
        if name not in here
        or name not in there
        or any(here[name][key] != there[name][key] for key in here[name].keys() & there[name])
    ]


def left_over(study: Path) -> list[Path]:
    """The files that are there only while something trains."""
    names = (".lock", ".*.tmp", "last.ckpt", "members.json")
    return [path for name in names for path in study.rglob(name)]


def torn_files(study: Path) -> list[str]:
    """The files that a reader would find incomplete."""
    torn = []
    try:
        for path in results_of(study):
            if json.loads(path.read_text())["status"] == "finished":
                with zipfile.ZipFile(path.parent / "weights.pt") as weights:
                    torn += [f"{path.parent}: {weights.testzip()}"] if weights.testzip() else []
        for path in (run_dir / "metrics.csv" for run_dir in list_runs(study)):
            if path.exists():
                read_metrics(path)
        read_history(study)
    except (OSError, ValueError, zipfile.BadZipFile, UserError) as error:
        torn.append(f"{study}: {error}")
    return torn


def ended_runs(study: Path) -> dict[Path, tuple[int, int]]:
    """Identity of every ended result.json: one that was written anew has another."""
    ended = [
        path for path in results_of(study) if json.loads(path.read_text())["status"] != "failed"
    ]
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in ended}


def rewritten(study: Path, before: dict[Path, tuple[int, int]]) -> list[str]:
    """The results that were there before and have been written again."""
    after = ended_runs(study)
    return [f"{path} was written twice" for path in before if after.get(path) != before[path]]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cold", type=float, default=0.1, help="share of spawned commands")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="kill-campaign-"))
    campaign = Campaign(folder.resolve(), options.seed, options.cold)
    print(f"{folder}: the whole study takes {campaign.seconds:.0f} s", flush=True)
    names = [*WAYS, "full disk"]
    number = num_runs = 0
    while campaign.kills.total() < options.kills and not campaign.problems:
        name, study = names[number % len(names)], f"cut{number + 1}"
        began = time.monotonic()
        if name in WAYS:
            campaign.disturb(WAYS[name], study)
        disk = None if name in WAYS else campaign.fill_disk(study)
        with unmounted(disk):
            ended = disk or campaign.runs / study
            whole = campaign.runs / (WAYS[name].whole if name in WAYS else "whole")
            if name in WAYS or disk is not None:
                campaign.problems += [f"{ended}: {run} differs" for run in differing(ended, whole)]
                campaign.problems += [f"{path} is left" for path in left_over(ended)]
                campaign.problems += [f"process {pid} is left" for pid in campaign.orphans()]
                num_runs += len(runs_of(ended))
        number += 1
        seconds = time.monotonic() - began
        print(f"{number:3} {name:14} {seconds:4.0f} s  {dict(campaign.kills)}", flush=True)
    print(
        f"{campaign.kills.total()} disturbances in {number} studies by {campaign.num_commands} "
        f"commands ({campaign.num_cold} of them by new interpreters): {dict(campaign.kills)}; "
        f"{num_runs} runs compared; "
        f"left in TMPDIR: {[path.name for path in (campaign.folder / 'tmp').iterdir()]}"
    )
    print(*campaign.problems or ["no problem"], sep="\n")
    return 1 if campaign.problems else 0


if __name__ == "__mp_main__":  # also in spawned workers
    save_often()
if __name__ == "__main__":
    sys.exit(main())
