"""A submission: a folder with the runs of an entered norm, its source and where it stands.

entry.json   norm, words of the command, benchmark, digest of its rules, digests of the sources
table.npz    every run: seed, rate, metrics, result of each test sample, versions, machine
source/      the files of a norm that is not shipped
card.json    what its contract says
report.json  where it stood, computed from table.npz

None of it is trusted: see normexp.benchmark.verify.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from normexp.benchmark.protocol import digest
from normexp.benchmark.report import BenchmarkReport
from normexp.benchmark.score import compare, tune
from normexp.benchmark.table import Table, TableCell, read_table, write_table
from normexp.errors import UserError
from normexp.records.files import read_json, write_json, write_text
from normexp.records.sources import source_files

ENTRY_FILE, TABLE_FILE, SOURCE_DIR = "entry.json", "table.npz", "source"
CARD_FILE, REPORT_FILE = "card.json", "report.json"
# Names that would replace what a verification rests on.
RESERVED_SOURCES = ("normexp", "torch", "numpy", "sitecustomize.py", "usercustomize.py")
MOST_SHOWN = 10  # numbers of report.json that its table does not give
SAME_NUMBER = 1e-6  # numbers computed on another machine differ by less
ROUNDED = 2e-6  # metrics are written with six decimals
MACHINE_ERRORS = 4.0  # standard errors by which means of another machine may differ
MACHINE_POINTS = 0.5  # of accuracy in percent (or 0.005 bits): less is never listed for a cell
CLAIMED_TOO_MUCH = 0.002  # one-sided p of a tuned value above the one that came again


@dataclass(frozen=True)
class Submission:
    """What a folder claims."""

    folder: Path
    norm: str
    words: list[str]
    benchmark: str
    table: Table

    @property
    def workloads(self) -> list[str]:
        return sorted({cell.recipe for cell in self.table.cells})


def write_submission(
    folder: Path,
    norm: str,
    words: Sequence[str],
    target: str,
    entered: Table,
) -> Submission:
    """Writes all but card.json and report.json, and returns what `verify` will read.

    target: of the norm; its source is copied if it is the user's own
    """
    sources = {}
    for module, path in source_files(target).items():
        parts = [*module.split("."), "__init__"] if path.stem == "__init__" else module.split(".")
        name = "/".join(parts) + ".py"
        (folder / SOURCE_DIR / name).parent.mkdir(parents=True, exist_ok=True)
        write_text(folder / SOURCE_DIR / name, path.read_text(encoding="utf-8"))
        sources[name] = _sha256(folder / SOURCE_DIR / name)
    folder.mkdir(parents=True, exist_ok=True)
    write_table(entered, folder / TABLE_FILE)
    about = entered.about
    entry = {"norm": norm, "words": list(words), "benchmark": about["benchmark"]}
    entry |= {"rules": about["rules"], "sources": sources, "table": _sha256(folder / TABLE_FILE)}
    write_json(folder / ENTRY_FILE, entry)
    return read_submission(folder)[0]


def read_submission(folder: Path) -> tuple[Submission, list[str]]:
    """A submission, and what contradicts itself in it, without training anything.

    Raises:
        UserError: the folder is no submission, or of other rules.
    """
    if not (folder / ENTRY_FILE).is_file():
        raise UserError(f"verify={folder}: no submission is there, since it has no {ENTRY_FILE}")
    entry = read_json(folder / ENTRY_FILE)
    table = read_table(folder / TABLE_FILE)
    name = str(entry["benchmark"])
    if entry["rules"] != digest(name) or table.about["rules"] != digest(name):
        raise UserError(f"{folder}: made under other rules than conf/experiment/{name} has")
    problems = [
        f"{SOURCE_DIR}/{file} is not the file that was submitted"
        for file, sha in entry["sources"].items()
        if _sha256(folder / SOURCE_DIR / file) != sha
    ]
    problems += [
        f"{SOURCE_DIR}/{file} does not belong to the submission"
        for path in sorted((folder / SOURCE_DIR).rglob("*.py"))
        if (file := path.relative_to(folder / SOURCE_DIR).as_posix()) not in entry["sources"]
        or file.split("/")[0] in RESERVED_SOURCES
    ]
    if _sha256(folder / TABLE_FILE) != entry["table"]:
        problems.append(f"{TABLE_FILE} is not the file that was submitted")
    problems += [problem for cell in table.cells for problem in contradictions(cell)]
    return Submission(folder, str(entry["norm"]), entry["words"], name, table), problems


def contradictions(cell: TableCell) -> Iterator[str]:
    """Accuracies that are not the mean over the recorded test samples."""
    for kind, samples in cell.samples.items():
        name = "test/accuracy" + ("" if kind == "running" else f"@{kind}")
        if samples.dtype != bool or name not in cell.metrics:
            continue
        apart = np.abs(samples.mean(axis=1) - cell.metrics[name]) > ROUNDED
        for seed in np.array(cell.seeds)[apart & ~cell.diverged]:
            yield f"{describe(cell)}, seed {seed}: {name} is not that of its test samples"


def report_of(submission: Submission, reference: Table) -> dict[str, Any]:
    """The content of report.json, computed from the table of a submission."""
    table = reference.with_entry(submission.table)
    return BenchmarkReport(table, submission.norm).as_json()


def is_beside(submission: Submission, reference: Table) -> bool:
    """True if an entry was made beside this reference table."""
    return all(submission.table.about[key] == reference.about[key] for key in ("time", "commits"))


def report_problems(submission: Submission, reference: Table) -> Iterator[str]:
    """Numbers of report.json that its table does not give.

    Beside another reference table than that of the entry, which may rank it elsewhere, the norm's
    own numbers alone.
    """
    path = submission.folder / REPORT_FILE
    if not path.is_file():
        yield f"{REPORT_FILE} is missing"
        return
    claimed = read_json(path)
    computed = json.loads(json.dumps(report_of(submission, reference)))
    if is_beside(submission, reference):
        del computed["about"]
    else:
        claimed, computed = (_own_numbers(one, submission.norm) for one in (claimed, computed))
    found = list(_differences(claimed, computed))
    yield from (f"{REPORT_FILE}: {place}, from its table" for place in found[:MOST_SHOWN])
    if len(found) > MOST_SHOWN:
        yield f"{REPORT_FILE}: {len(found) - MOST_SHOWN} more"


def _own_numbers(report: Mapping[str, Any], norm: str) -> dict[str, Any]:
    """The places of a norm without what another reference changes, by workload."""
    return {
        workload: [
            {key: value for key, value in place.items() if key not in ("group", "ratio")}
            for place in places
            if place["norm"] == norm
        ]
        for workload, places in report["workloads"].items()
    }


def _differences(claimed: Any, computed: Any, place: str = "") -> Iterator[str]:
    """`workloads.convnet.3.ratio.0 is 0.8, but 0.9`: where plain values differ from computed."""
    if isinstance(computed, dict) and isinstance(claimed, dict):
        for key, value in computed.items():
            yield from _differences(claimed.get(key), value, f"{place}.{key}".lstrip("."))
    elif isinstance(computed, list) and isinstance(claimed, list) and len(computed) == len(claimed):
        for number, (one, other) in enumerate(zip(claimed, computed, strict=True)):
            yield from _differences(one, other, f"{place}.{number}")
    elif isinstance(computed, float) and isinstance(claimed, float | int):
        if not math.isclose(claimed, computed, rel_tol=SAME_NUMBER, abs_tol=SAME_NUMBER):
            yield f"{place} is {claimed:.6g}, but {computed:.6g}"
    elif claimed != computed:
        yield f"{place} is {_short(claimed)}, but {_short(computed)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 80 else f"{text[:77]}..."


def describe(cell: TableCell) -> str:
    """`convnet, rms at rate 0.1`, with the norm batch size where samples mix."""
    size = f" at norm batch {cell.norm_batch_size}" if cell.norm_batch_size else ""
    return f"{cell.recipe}, {cell.norm}{size} at rate {cell.lr:g}"


def draw(salt: str, submission: Submission, purpose: str) -> int:
    """A number that only who knows the salt can know, for one purpose."""
    content = f"{salt}/{purpose}/{_sha256(submission.folder / TABLE_FILE)}"
    return int(hashlib.sha256(content.encode()).hexdigest(), 16)


def differences(claimed: Sequence[TableCell], again: Sequence[TableCell]) -> list[str]:
    """What did not come again: missing cells, other divergences, other values.

    Runs of the same code on the same machine are equal, so where most runs are, all must be. On
    another machine float32 sums differ and runs drift apart, as if by other seeds, so there means
    are compared with the spread over seeds.
    """
    trained = {_place(cell): cell for cell in again}
    runs = [
        (cell, seed, list(_unequal(cell, trained[_place(cell)], seed)))
        for cell in claimed
        if _place(cell) in trained
        for seed in cell.seeds
        if seed in trained[_place(cell)].seeds
    ]
    num_equal = sum(not unequal for _, _, unequal in runs)
    problems = []
    if 2 * num_equal > len(runs):
        came_again = f"{num_equal} of {len(runs)} runs came again exactly"
        problems = [
            f"{describe(cell)}, seed {seed}: {', '.join(unequal)}; {came_again}"
            for cell, seed, unequal in runs
            if unequal
        ]
    for cell in claimed:
        other = trained.get(_place(cell))
        if other is None:
            problems.append(f"{describe(cell)}: no run came again")
            continue
        shared = [seed for seed in cell.seeds if seed in other.seeds]
        if not shared:
            problems.append(f"{describe(cell)}: no run came again")
            continue
        problems += _other_values(cell, other, shared)
    return [*problems, *_better_than_again(claimed, again)]


def _unequal(cell: TableCell, other: TableCell, seed: int) -> Iterator[str]:
    """`val/accuracy is 0.856, now 0.956`: what a run has otherwise than the same run again."""
    first, second = cell.seeds.index(seed), other.seeds.index(seed)
    for name in sorted(cell.metrics.keys() & other.metrics.keys()):
        before, after = float(cell.metrics[name][first]), float(other.metrics[name][second])
        same = math.isclose(before, after, rel_tol=SAME_NUMBER, abs_tol=ROUNDED)
        if not same and not (math.isnan(before) and math.isnan(after)):
            yield f"{name} is {before:.6g}, now {after:.6g}"
    for kind in cell.samples.keys() & other.samples.keys():
        if not np.array_equal(cell.samples[kind][first], other.samples[kind][second]):
            yield "other test samples are right"


def _better_than_again(claimed: Sequence[TableCell], again: Sequence[TableCell]) -> Iterator[str]:
    """Tuned values that are better than those that came again, by more than chance.

    The test samples are the same, so seeds alone are the luck.
    """
    for size in {cell.norm_batch_size: None for cell in claimed}:
        grids = [
            sorted((cell for cell in cells if cell.norm_batch_size == size), key=lambda c: c.lr)
            for cells in (claimed, again)
        ]
        first, second = ([(cell.recipe, cell.lr, tuple(cell.seeds)) for cell in g] for g in grids)
        if first != second or len(grids[0][0].seeds) < 3 or len(grids[0]) < 2:
            continue
        before, after = (tune(grid) for grid in grids)
        gap = compare(before, after).gap
        freedom, error = gap.over_seeds or (gap.df, gap.error)
        if not gap.estimate or gap.estimate < 0 or freedom is None or error is None:
            continue
        if error == 0 or stats.t.sf(gap.estimate / error, freedom) < CLAIMED_TOO_MUCH:
            words = f"tuned value {before.mean.estimate:.2f}, now {after.mean.estimate:.2f}"
            yield f"{describe(grids[0][0])} and other rates: {words}"


def _other_values(cell: TableCell, other: TableCell, shared: Collection[int]) -> Iterator[str]:
    first, second = ([one.seeds.index(seed) for seed in shared] for one in (cell, other))
    lost, lost_again = int(cell.diverged[first].sum()), int(other.diverged[second].sum())
    if abs(lost - lost_again) > max(1, len(shared) // 4):
        yield f"{describe(cell)}: {lost} of {len(shared)} seeds diverged, now {lost_again}"
    name = "test/accuracy" if "test/accuracy" in cell.metrics else "test/bits_per_byte"
    scale = 100 if name == "test/accuracy" else 1
    least = MACHINE_POINTS if name == "test/accuracy" else MACHINE_POINTS / 100
    if name not in cell.metrics or name not in other.metrics:
        return
    before, after = scale * cell.metrics[name][first], scale * other.metrics[name][second]
    is_known = np.isfinite(before) & np.isfinite(after)
    gaps = (before - after)[is_known]
    if not len(gaps):
        return
    spread = float(np.std(after[is_known], ddof=1)) if len(gaps) > 1 else least
    allowed = max(least, MACHINE_ERRORS * spread * math.sqrt(2 / len(gaps)))
    if abs(gaps.mean()) > allowed:
        yield (
            f"{describe(cell)}: {name} is {before[is_known].mean():.2f}, now "
            f"{after[is_known].mean():.2f}, n = {len(gaps)}"
        )
    elif (worst := float(np.abs(gaps).max())) > max(4 * least, 2 * MACHINE_ERRORS * spread):
        yield f"{describe(cell)}: {name} of a run differs by {worst:.2f}"


def _place(cell: TableCell) -> tuple[str, int | None, float]:
    return cell.recipe, cell.norm_batch_size, cell.lr


@contextmanager
def source_on_path(submission: Submission) -> Iterator[None]:
    """Lets this process and its workers import the submitted source inside the block."""
    folder = str((submission.folder / SOURCE_DIR).resolve())
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, before)))
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"
