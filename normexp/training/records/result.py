"""result.json and evaluation.json of a run."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from normexp.errors import UserError
from normexp.training.records.files import read_json, write_json
from normexp.training.records.layout import (
    EVALUATION_FILE,
    RESULT_FILE,
    list_cells,
    list_seeds,
    seed_dir,
)
from normexp.training.records.schema import SCHEMA, check_schema
from normexp.verdicts.metric import KINDS
from normexp.verdicts.rows import Status

log = logging.getLogger(__name__)


ENDED = (Status.FINISHED, Status.DIVERGED)  # runs that no command trains again


# Keys that act on a training through derived values alone.
ACT_THROUGH_DERIVED = ("base_batch_size", "norm.half_life")


@dataclass(frozen=True)
class Measured:
    """What was measured of a run. A missing value is None or an empty dict, and absent on disk.

    Attributes:
        metrics: finite numbers by name, such as `val/accuracy`.
        environment: versions and machine, see `describe_environment`.
        diverged_at_step: the first optimizer step whose loss was not finite; set if diverged.
        last_step: the last optimizer step; the planned one, unless diverged or `stopped`.
        stopped: why a callback ended the training before the planned steps.
        invalid: why the numbers must not be compared, such as a model that reads future tokens.
        apart: why the run was taken out of its stack, so that its last digits may differ.
        is_stacked: True if the run was trained under vmap, together with others.
        traits: whether the network mixes samples or leaks the future, as probed.
        chance_accuracy: accuracy of predicting the most frequent class; classification only.
        chance: test metrics of predicting the most frequent class for every pixel; segmentation
            only.
        data_set: shapes, classes and moments, from which the network can be built again.
        timing: train_seconds, step_ms of one optimizer step of the whole stack, stack_size,
            samples_per_second; on a GPU also peak_memory_mb of the whole stack, in 10^6 bytes.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    diverged_at_step: int | None = None
    last_step: int | None = None
    stopped: str | None = None
    invalid: str | None = None
    apart: str | None = None
    is_stacked: bool | None = None
    traits: dict[str, bool] = field(default_factory=dict)
    chance_accuracy: float | None = None
    chance: dict[str, float] = field(default_factory=dict)
    num_parameters: int | None = None
    data_set: dict[str, Any] = field(default_factory=dict)
    timing: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """One ended run, (cell, seed).

    Attributes:
        defines: what the id of the cell hashes (see `identity_of`), and `digests` of what was
            loaded: data, initial weights, and installed packages by group.
        derived: effective sizes, steps, epochs, learning rate and other values that follow from
            what was typed and from the data; and the names of parts that are not shipped choices.
        error: one line; set if failed.
        defaults: the settings that the id leaves out, because they have their defaults.
    """

    cell_id: str
    seed: int
    status: Status
    defines: dict[str, Any]
    derived: dict[str, Any]
    measured: Measured
    error: str | None = None
    defaults: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Short, since `normexp.run` returns a list of results."""
        facts = [str(self.status)]
        for name, value in self.metrics.items():
            if name.startswith("test/") and "@" not in name:
                facts.append(f"{name}={value:.4g}")
        if self.error:
            facts.append(self.error)
        return f"<{self.cell_id} seed {self.seed}: {', '.join(facts)}>"

    @property
    def metrics(self) -> dict[str, float]:
        return self.measured.metrics

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The values that define the training, see `settings_of`."""
        return settings_of(self.defines, self.derived)

    @cached_property
    def values(self) -> dict[str, Any]:
        """Every setting by dotted key, defaults included."""
        return self.defaults | flatten(self.defines) | self.settings

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON: metrics sorted by name, missing values absent."""
        metrics = {name: float(self.metrics[name]) for name in sorted(self.metrics)}
        measured = asdict(self.measured) | {"metrics": metrics}
        present = {name: value for name, value in measured.items() if value not in (None, {})}
        content = {
            "schema": SCHEMA,
            "cell_id": self.cell_id,
            "seed": self.seed,
            "status": str(self.status),
            "defines": self.defines,
            "derived": self.derived,
            "defaults": self.defaults,
            "measured": present,
        }
        return content if self.error is None else content | {"error": self.error}


def settings_of(defines: Mapping[str, Any], derived: Mapping[str, Any]) -> dict[str, Any]:
    """The values that define a training: {"norm": "group", "norm.num_groups": 4, "lr": 0.1}.

    They are the choice of each group, the values that differ from its defaults, and derived values.
    """
    values = flatten(defines)
    # A part that has a name keeps its choice as well: resnet18 is a model of torchvision.
    parts = [key for key in derived if isinstance(defines.get(key), Mapping) and key in values]
    values |= {f"{key}.choice": values[key] for key in parts}
    values |= derived
    if "devices" not in defines:
        values.pop("devices", None)  # a device's share of a batch is counted in the sizes
    values.pop("channels_last", None)  # it moves last digits alone
    return {key: value for key, value in values.items() if key not in ACT_THROUGH_DERIVED}


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"norm": {"choice": "group", "eps": 1}} gives {"norm": "group", "norm.eps": 1}.

    Lists become tuples.
    """
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            name = prefix.rstrip(".") if key == "choice" else f"{prefix}{key}"
            flat[name] = tuple(value) if isinstance(value, list) else value
    return flat


def write_result(run_dir: Path, result: Result) -> None:
    """Writes result.json atomically. Write it last: its presence means that the run has ended."""
    write_json(run_dir / RESULT_FILE, result.to_dict())


def read_result(path: Path) -> Result:
    """Reads a result.

    Args:
        path: result.json, or the run directory that holds it.

    Raises:
        UserError: a missing, torn or foreign file, or one that was edited by hand.
    """
    path = path / RESULT_FILE if path.is_dir() else path
    if not path.exists():
        read_json(path)  # raises
    stat = path.stat()
    return _read(path, stat.st_ino, stat.st_mtime_ns)


@cache  # a study is read every second while it is trained
def _read(path: Path, _inode: int, _time: int) -> Result:
    return result_of(read_json(path), path)


def read_result_of_study(run_dir: Path) -> Result:
    """The result of a run in a study. Raises UserError, also for one under another's name."""
    result = read_result(run_dir)
    if seed_dir(Path(result.cell_id), result.seed).parts != run_dir.parts[-2:]:
        raise UserError(
            f"{run_dir} is a copy of seed {result.seed} of {result.cell_id}, or was renamed; move "
            "it out of the study"
        )
    return result


def result_of(content: dict[str, Any], path: Path) -> Result:
    """The result whose `to_dict` gave this content. Raises UserError, naming the file."""
    study = path if path.suffix == ".zip" else path.parents[2]
    check_schema(content.pop("schema", None), path, study)
    try:
        content["status"] = Status(content["status"])
        content["measured"] = Measured(**content["measured"])
        result = Result(**content)
        _check_metrics(result.metrics)
        return result
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} was edited by hand: {error}; remove it, and the same command trains the run "
            "again"
        ) from error


def _check_metrics(metrics: Mapping[str, Any]) -> None:
    """Raises ValueError for a metric that no training can have."""
    for name, value in metrics.items():
        kind = KINDS.get(name.partition("@")[0].rpartition("/")[2])
        highest = 1.0 if kind and kind.unit == "pp" else math.inf
        lowest = 0.0 if highest == 1.0 else -math.inf
        is_number = isinstance(value, float | int) and math.isfinite(value)
        if not is_number or not lowest <= value <= highest:
            raise ValueError(f"{name}={value}")


# Names of what has a digest; the others are groups with a part of an installed package.
LOADED = {"data": "the data set", "weights": "model.weights"}
# Keys that ids count as typed, and the digest of what they name.
PLACES = {"data.root": "data", "data.path": "data", "model.weights": "weights"}


def check_joins(cell_dir: Path, defines: Mapping[str, Any]) -> None:
    """Refuses to add runs to a cell whose recorded runs had other data, weights or packages.

    The id of a cell hashes its config and the user's source, but not what they load. If other cells
    of the study name the same contents by another path, a line says so.

    Args:
        defines: of the new runs.

    Raises:
        UserError: a digest differs; names what was loaded, and the remedy.
    """
    digests = defines["digests"]
    for result in _trained_runs(cell_dir):
        recorded = result.defines.get("digests", {})
        for name in recorded.keys() & digests.keys():
            if recorded[name] != digests[name]:
                what = LOADED.get(name, f"the package of {name}")
                raise UserError(
                    f"{what} is not what the recorded runs of {cell_dir} were trained with; train "
                    "in a study of its own: study=..."
                )
    study_dir, places = cell_dir.parent, places_of(defines)
    if not places:
        return
    others = [next(_trained_runs(cell), None) for cell in list_cells(study_dir)]
    spellings = first_spellings(result.defines for result in others if result)
    for (key, digest), value in places.items():
        recorded = spellings.get((key, digest), value)
        if recorded != value:
            log.info(
                "%s=%s has the contents that study=%s records as %s=%s; reports compare them as "
                "one, but the ids differ",
                *(key, value, study_dir.name, key, recorded),
            )


def _trained_runs(cell_dir: Path) -> Iterator[Result]:
    """The readable results of a cell, without failed ones."""
    for seed in list_seeds(cell_dir):
        run_dir = seed_dir(cell_dir, seed)
        if (run_dir / RESULT_FILE).exists():
            result = read_result(run_dir)
            if result.status != Status.FAILED:
                yield result


def places_of(defines: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """The value of each key of PLACES that is given, by the key and the digest of the contents."""
    values = flatten(defines)
    return {
        (key, values[f"digests.{name}"]): values[key]
        for key, name in PLACES.items()
        if key in values and f"digests.{name}" in values
    }


def first_spellings(defined: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], str]:
    """The first of the values by which several runs name the same contents, see `places_of`."""
    spellings: dict[tuple[str, str], str] = {}
    for defines in defined:
        spellings = places_of(defines) | spellings
    return spellings


def values_of(results: Sequence[Result], name: str) -> list[float]:
    """The values of a metric over the runs that have it."""
    return [result.metrics[name] for result in results if name in result.metrics]


def read_evaluation(run_dir: Path) -> dict[str, float]:
    """Metrics of evaluation.json: {"precise": {"test/loss": 1.0}} gives `test/loss@precise`."""
    path = run_dir / EVALUATION_FILE
    found: dict[str, float] = {}
    if not path.exists():
        return found
    for statistics, metrics in read_json(path).items():
        if not isinstance(metrics, dict):
            continue
        suffix = "" if statistics == "running" else f"@{statistics}"
        for name, value in metrics.items():
            if "/" in name and isinstance(value, float) and math.isfinite(value):
                found[name + suffix] = value
    return found
