"""What a diagnosis says: the gap and its terms, a row per site, findings with remedies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import altair as alt

TERMS = {  # by the two stages whose difference each is, in order
    "rest": ("training", "batch", "dropout and other modules that act in training alone"),
    "small_batch": ("batch", "share", "statistics of few samples: the other samples of a batch"),
    "own_share": ("share", "precise", "own share of a sample in its statistics"),
    "dropout_shift": ("precise", "noisy_precise", "statistics taken behind dropout"),
    "averages": ("noisy_precise", "running", "running averages against precise statistics"),
    "not_analysed": ("running", "quiet", "norms that were not analysed"),
    "left_in_training": ("quiet", "evaluation", "modules that eval() leaves in training mode"),
}
WIDTH = 100  # characters of a printed line
MAX_ROWS = 12  # sites in the printed table


@dataclass(frozen=True)
class Estimate:
    """A mean over batches and its standard error, in units of the loss."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:+.4f} ± {self.error:.4f}"


@dataclass(frozen=True)
class Finding:
    """Something wrong, or a note, with its remedy.

    Attributes:
        kind: a short name, such as `never_updated`.
        level: a fault explains a worse evaluation or wrong numbers; a note is worth knowing.
        sites: the norms concerned.
    """

    kind: str
    level: Literal["fault", "note"]
    cause: str
    remedy: str
    sites: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = fill(f"{self.level}: {self.cause}", WIDTH, subsequent_indent="  ")
        remedy = fill(
            f"remedy: {self.remedy}", WIDTH, initial_indent="  ", subsequent_indent="    "
        )
        return f"{lines}\n{remedy}"


@dataclass(frozen=True)
class SiteRow:
    """One norm with running moments.

    Attributes:
        use: `batch` if it uses batch statistics in training, else `fixed`.
        mean_distance, var_distance: median over channels of |running - precise| in standard
            deviations between batches; None where the batches do not differ.
        largest_distance: of any channel, of mean or variance.
        smallest_var: of the precise variances over eps; of the running ones if `use` is fixed.
        initial_share: weight of the initial values, (1 - momentum) ** updates; None if unknown.
        half_life: in updates; None for momentum null, 0 or 1.
    """

    name: str
    kind: str
    use: Literal["batch", "fixed"]
    channels: int
    momentum: float | None
    updates: int | None
    half_life: float | None
    initial_share: float | None
    mean_distance: float | None
    var_distance: float | None
    largest_distance: float | None
    smallest_var: float | None
    dead: int = 0
    never_updated: int = 0


@dataclass(frozen=True)
class Diagnosis:
    """The answer to: why does this network evaluate worse than it trains?

    Attributes:
        training, evaluation: mean loss of the batches in each mode.
        gap: evaluation minus training.
        terms: what the gap consists of, by the names in `TERMS`; they add up to it.
        other_data: loss of the evaluation batches minus that of the batches, both in evaluation
            mode; None without evaluation batches.
        loss_at_size: loss with batch statistics of k samples, all else as in evaluation mode.
        acts_in_training: the loss that each class of modules adds in training mode.
        not_analysed: norms with running state of a kind that is not known.
    """

    summary: str
    training: float
    evaluation: float
    gap: Estimate
    terms: Mapping[str, Estimate]
    findings: tuple[Finding, ...]
    sites: tuple[SiteRow, ...]
    loss_at_size: Mapping[int, Estimate]
    acts_in_training: Mapping[str, float]
    not_analysed: tuple[str, ...]
    num_batches: int
    batch_size: int
    inputs: Mapping[str, Mapping[str, float]]
    tolerance: float
    other_data: Estimate | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def faults(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.level == "fault")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; numbers that are not finite are None."""
        return _plain(asdict(self))

    def __str__(self) -> str:
        blocks = [
            [fill(self.summary, WIDTH)],
            self._terms(),
            self._findings(),
            self._sites(),
            [*self.notes],
        ]
        return "\n\n".join("\n".join(block) for block in blocks if block)

    def _terms(self) -> list[str]:
        shown = {n: t for n, t in self.terms.items() if t.value or t.error or _always(n)}
        lines = [f"{'loss in training mode':<58}{self.training:>8.4f}"]
        for name, term in shown.items():
            lines.append(f"  {TERMS[name][2]:<56}{term.value:>+8.4f} ± {term.error:.4f}")
            if name == "rest":
                for kind, value in self.acts_in_training.items():
                    lines.append(f"    {kind + ' in training':<54}{-value:>+8.4f}")
        lines.append(f"{'loss in evaluation mode':<58}{self.evaluation:>8.4f}")
        if self.other_data is not None:
            total = self.evaluation + self.other_data.value
            lines.append(f"  {'evaluation batches, other data':<56}{self.other_data}")
            lines.append(f"{'loss of the evaluation batches':<58}{total:>8.4f}")
        if self.loss_at_size:
            lines.append("loss with batch statistics of k samples:")
            lines.append(
                "  " + "  ".join(f"{k}: {e.value:.4f}" for k, e in self.loss_at_size.items())
            )
        return lines

    def _findings(self) -> list[str]:
        return [str(finding) for finding in self.findings]

    def _sites(self) -> list[str]:
        if not self.sites:
            return []
        if not self.faults and self.gap.value <= self.tolerance:
            return [f"Evaluation mode costs nothing that {len(self.sites)} norms could explain."]
        # The most distant sites first.
        rows = sorted(
            self.sites, key=lambda row: -max(row.mean_distance or 0, row.var_distance or 0)
        )
        width = max(4, *(len(row.name) for row in rows[:MAX_ROWS]))
        heads = ("mean off", "var off", "min var/eps", "momentum", "updates", "initial")
        lines = [f"{'site':<{width}}" + "".join(f"{head:>13}" for head in heads)]
        for row in rows[:MAX_ROWS]:
            values = (
                _short(row.mean_distance),
                _short(row.var_distance),
                _short(row.smallest_var),
                "fixed" if row.use == "fixed" else _short(row.momentum),
                "-" if row.updates is None else str(row.updates),
                "-" if row.initial_share is None else f"{row.initial_share:.1%}",
            )
            lines.append(f"{row.name:<{width}}" + "".join(f"{value:>13}" for value in values))
        more = len(rows) - MAX_ROWS
        if more > 0:
            lines.append(f"... and {more} more, nearer; all in .sites")
        lines += [
            "off: running against precise, in standard deviations between batches, median channel",
            "min var/eps: smallest variance of a channel, in units of eps; near 1, eps matters",
        ]
        return lines

    def figure(self) -> alt.Chart | alt.VConcatChart:
        """An Altair chart of the terms and the sites; `.save("gap.svg")` or .png or .html."""
        from normexp.diagnosis.figure import draw

        return draw(self.to_dict())


def cancelling(terms: Sequence[float]) -> str:
    """That terms of opposite signs cancel, by more than is left of them; empty if they do not."""
    up, down = sum(term for term in terms if term > 0), sum(term for term in terms if term < 0)
    if min(up, -down) <= abs(up + down):
        return ""
    return f"the terms cancel: {up:+.4f} and {down:+.4f} leave {up + down:+.4f}"


def _always(name: str) -> bool:
    return name in ("rest", "small_batch", "own_share", "averages")


def _short(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.3g}"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
