"""Kills trainings at random, types them again, and compares what they leave with a whole study.

    python scripts/kill_campaign.py --kills 100 [--seed 0] [--folder DIR]

Each command sees 1, 2 or 4 cores, so that most trainings resume with another number than before.
After each round nothing may be missing, nothing left over, and every result and metrics.csv must
equal, to the bit, those of a study that nothing disturbed, but for runs that are recorded as
trained apart. Exit code 1 for a problem.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

from normexp.errors import UserError
from normexp.training.records.journal import read_entries
from normexp.training.records.layout import list_runs
from normexp.training.records.metrics import read_metrics
from normexp.training.sweeps import worker

SAVE_SECONDS = 0.2  # between checkpoints
# Seeds train stacked at batch size 32, in turn at 128.
GRID = ["-m", "norm=batch,group", "lr=0.03,0.3", "batch_size=32,128", "norm_batch_size=4"]
ALWAYS = ["steps=120", "log_every=5", "replicas=3", "save_weights=true", "trainer=cpu"]
# How a study is disturbed: `workers` of the commands that are typed at once.
WAYS = {"one process": ["0"], "workers": ["null"], "two terminals": ["0", "null"]}
CORES = (1, 2, 4)  # that a command sees
KILLERS = ("parent", "worker", "all", "Ctrl-C")
# Also of Ctrl-C while Python itself starts or ends, when no program can answer it.
EXIT_CODES = {0, 1, 130, -signal.SIGINT, -signal.SIGKILL}
# Files whose appearance is a moment worth dying at; a dot file is one that is being written.
MOMENTS = (
    *("config.yaml", "attempts.json", ".last.ckpt.*", "last.ckpt", ".results.json.*"),
    *("results.json", "weights.pt", ".result.json.*", "result.json", ".metrics.csv.*"),
)


class Campaign:
    """Where studies go, how commands are typed, and what has happened so far.

    Attributes:
        problems: what must never happen, in words.
        kills: by kind, of processes that were still alive.
        cores: how many commands saw 1, 2 or 4.
        seconds: of a study that nothing disturbs.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.runs = folder, folder / "runs"
        self.draw = random.Random(seed)
        self.problems: list[str] = []
        self.kills: Counter[str] = Counter()
        self.cores: Counter[int] = Counter()
        self.runs.mkdir(parents=True, exist_ok=True)
        multiprocessing.set_forkserver_preload(["normexp.training.cells.run"])
        os.environ |= {"OMP_WAIT_POLICY": "passive", "XDG_RUNTIME_DIR": str(folder)}
        imports = multiprocessing.get_context("forkserver").Process(target=int)
        imports.start()
        imports.join()
        began = time.monotonic()
        self.finish("whole", "null")
        self.seconds = time.monotonic() - began

    def type(self, study: str, workers: str) -> BaseProcess:
        """Begins a command in a process of its own, forked from one that has torch imported."""
        cores = self.draw.choice(CORES)
        self.cores[cores] += 1
        if workers == "null" and cores > len(os.sched_getaffinity(0)):
            workers = str(cores)  # as many as it would start if it saw them
        line = [*GRID, *ALWAYS, f"workers={workers}", f"runs_dir={self.runs}", f"study={study}"]
        process = multiprocessing.get_context("forkserver").Process(
            target=begin, args=(self.log(study), cores, line)
        )
        process.start()
        return process

    def end(self, study: str, process: BaseProcess, expected: set[int]) -> int:
        """Waits for the end of a command; an exit code that is not expected is a problem."""
        process.join()
        code = process.exitcode or 0
        if code not in expected:
            self.problems.append(f"{study} ended with {code}, see {self.log(study)}")
        return code

    def finish(self, study: str, workers: str) -> None:
        """Types a line again until it ends."""
        for _ in range(9):
            if self.end(study, self.type(study, workers), {0, 1, 130}) == 0:
                return
        self.problems.append(f"{study} does not end, see {self.log(study)}")

    def log(self, study: str) -> Path:
        return self.folder / f"{study}.log"

    def disturb(self, ways: Sequence[str], study: str, times: int = 3) -> None:
        """Types commands, kills them, types them again at once; then lets them end."""
        folder = self.runs / study
        for _ in range(times):
            typed = [self.type(study, workers) for workers in ways]
            victim = self.draw.choice(typed)
            self.wait_for_a_moment(victim.pid or 0, folder)
            self.kill(self.draw.choice(KILLERS), victim.pid or 0)
            codes = [self.end(study, process, EXIT_CODES) for process in typed]
            self.problems += torn_files(folder)
            if set(codes) == {0}:
                break
        self.finish(study, ways[-1])
        self.problems += [
            f"{folder}: {run} differs" for run in differing(folder, self.runs / "whole")
        ]
        self.problems += [f"{path} is left" for path in left_over(folder)]

    def wait_for_a_moment(self, pid: int, study: Path) -> None:
        """Sleeps for a random time, or until a file is written."""
        if self.draw.random() < 0.5:
            time.sleep(self.draw.uniform(0, self.seconds / 2))  # the rest is short
            return
        name = self.draw.choice(MOMENTS)
        before, deadline = _found(study, name), time.monotonic() + self.seconds
        while time.monotonic() < deadline and is_alive(pid) and not _found(study, name) - before:
            time.sleep(0.003)

    def kill(self, kind: str, pid: int) -> None:
        """Kills a command, a worker or all of them; Ctrl-C is perhaps followed by another."""
        workers = _workers_of(pid)
        if kind == "Ctrl-C":
            self._send(kind, [pid], signal.SIGINT)
            if self.draw.random() < 0.5:
                time.sleep(self.draw.uniform(0, 1))
                self._send("second Ctrl-C", [pid], signal.SIGINT)
        elif kind == "worker" and workers:
            self._send(kind, [self.draw.choice(workers)])
            if self.draw.random() < 0.5:  # else the command goes on with another
                self._send("parent", [pid])
        else:
            self._send(kind, [pid, *workers] if kind == "all" else [pid])

    def _send(self, kind: str, pids: list[int], number: int = signal.SIGKILL) -> None:
        self.kills[kind] += is_alive(pids[0])
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def begin(log: Path, cores: int, words: list[str]) -> None:
    """Trains in this process, as `python -m normexp.train` does, with a checkpoint often."""
    os.setsid()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    import torch

    torch.set_num_threads(min(torch.get_num_threads(), cores))  # as its import here would do
    code = 70
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        from normexp.train import main as train
        from normexp.training import fit

        fit.SECONDS_BETWEEN_SAVES = SAVE_SECONDS
        worker.SPAWN = multiprocessing.get_context("fork")  # type: ignore[assignment]
        code = train(words)
    except KeyboardInterrupt:  # before the entry could handle it, or after it had
        code = 130
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


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
        return set(study.rglob(name))
    except FileNotFoundError:
        return set()


def runs_of(study: Path) -> dict[str, dict[str, object]]:
    """The numbers of each ended run, in all their digits; only how it ended if it is apart."""
    runs = {}
    for run_dir in list_runs(study):
        result = json.loads((run_dir / "result.json").read_text())
        run = {"status": result["status"]}
        measured = result["measured"]
        if measured.get("apart") is None:
            run |= {"defines": result["defines"], "derived": result["derived"]}
            run |= {key: measured.get(key) for key in ("metrics", "diverged_at_step")}
            run["rows"] = (run_dir / "metrics.csv").read_bytes()
        runs[str(run_dir.relative_to(study))] = run
    return runs


def differing(study: Path, whole: Path) -> list[str]:
    """The runs that one study lacks, or whose numbers differ and were not trained apart."""
    here, there = runs_of(study), runs_of(whole)
    both = here.keys() & there.keys()
    shared = {name: here[name].keys() & there[name].keys() for name in both}
    differ = {n for n, keys in shared.items() if any(here[n][k] != there[n][k] for k in keys)}
    return sorted(differ | (here.keys() ^ there.keys()))


def left_over(study: Path) -> list[Path]:
    """The files that are there only while something trains."""
    return [path for name in (".lock*", ".*.tmp", "stacks/*") for path in study.rglob(name)]


def torn_files(study: Path) -> list[str]:
    """The files that a reader would find incomplete."""
    try:
        for run_dir in list_runs(study):
            if (run_dir / "result.json").exists():
                json.loads((run_dir / "result.json").read_text())
            if (run_dir / "metrics.csv").exists():
                read_metrics(run_dir / "metrics.csv")
        read_entries(study)
    except (ValueError, UserError) as error:
        return [f"{study}: {error}"]
    return []


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="kill-campaign-"))
    campaign = Campaign(folder.resolve(), options.seed)
    print(f"{folder}: the whole study takes {campaign.seconds:.0f} s", flush=True)
    number = 0
    while campaign.kills.total() < options.kills and not campaign.problems:
        name = [*WAYS][number % len(WAYS)]
        number, began = number + 1, time.monotonic()
        campaign.disturb(WAYS[name], f"cut{number}")
        seconds = time.monotonic() - began
        print(f"{number:3} {name:14} {seconds:4.0f} s  {dict(campaign.kills)}", flush=True)
    print(f"{campaign.kills.total()} disturbances in {number} studies: {dict(campaign.kills)}")
    print(f"{campaign.cores.total()} commands, by cores: {dict(campaign.cores)}")
    print(*campaign.problems or ["no problem"], sep="\n")
    return 1 if campaign.problems else 0


if __name__ == "__main__":
    sys.exit(main())
