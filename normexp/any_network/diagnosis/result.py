"""What a diagnosis says: the gap and its terms, findings with remedies, a row per norm."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd

from normexp.words import name_some

Losses = np.ndarray  # of each batch (B,)
WIDTH = 100  # characters of a printed line
MAX_ROWS = 12  # norms in the printed table
ROOT = "the model"
TERMS = {  # of the gap, each from one stage of `measure` to the next
    "rest": "dropout and whatever else acts in training alone",
    "small_batch": "statistics of the current batch",
    "own_share": "own share of a sample in its statistics",
    "dropout_shift": "statistics taken behind dropout",
    "averages": "running averages",
    "not_analysed": "running state of another kind",
    "left_in_training": "modules left in training mode",
}


@dataclass(frozen=True)
class LossEstimate:
    """A mean over batches and its standard error, in units of the loss."""

    value: float
    error: float

    @classmethod
    def of(cls, values: Losses, weights: Losses) -> LossEstimate:
        """The weighted mean of values that are independent from batch to batch."""
        shares, count = weights / weights.sum(), len(values)
        mean = float((shares * values).sum())
        squares = (shares**2 * (values - mean) ** 2).sum()
        return cls(mean, float(np.sqrt(squares * count / (count - 1))))

    def __str__(self) -> str:
        return f"{self.value:+.4f} ± {self.error:.4f}"


@dataclass(frozen=True)
class Finding:
    """Something wrong, and a remedy that has been tried on a copy of the model.

    Attributes:
        kind: a short name, such as `never_updated`.
        sites: paths of the modules concerned.
        term: the term of the gap that it explains.
        cost: how much the gap loses by this remedy alone, or by it after those of the findings
            before it, if that is less; None if the remedy mends something else, or is untried.
    """

    kind: str
    cause: str
    remedy: str
    sites: tuple[str, ...] = ()
    term: str | None = None
    cost: LossEstimate | None = None

    def __str__(self) -> str:
        cost = "" if self.cost is None else f" ({self.cost})"
        cause = fill(f"{self.kind}{cost}: {self.cause}", WIDTH, subsequent_indent="  ")
        remedy = fill(f"  remedy: {self.remedy}", WIDTH, subsequent_indent="    ")
        return f"{cause}\n{remedy}"


@dataclass(frozen=True)
class SiteRow:
    """One norm that uses batch statistics in training and running averages in evaluation.

    Attributes:
        updates: None if the norm does not count them.
        initial_share: weight of mean 0 and variance 1, (1 - momentum) ** updates; None if unknown.
        mean_distance, var_distance: median over channels of |running - batches| in standard
            deviations between batches; 0 if a single batch reached the norm.
        largest_distance: of any channel, of mean or variance.
        state: `averaged`, or what is wrong: `not finite`, `held` if training does not move them,
            `never updated`, `initial` if the initial values weigh more than a tenth.
    """

    name: str
    momentum: float | None
    updates: int | None
    initial_share: float | None
    mean_distance: float
    var_distance: float
    largest_distance: float
    state: str


@dataclass(frozen=True)
class Diagnosis:
    """The answer to: why does this network evaluate worse than it trains?

    Attributes:
        training, evaluation: mean loss of the batches in each mode.
        gap: evaluation minus training.
        terms: what the gap consists of, by the names in `TERMS`; they add up to it.
        findings: the most expensive first.
        loss_at_size: if evaluation depends on the batch, its loss for single samples, by their
            number 1; for pairs, if it takes no single ones.
        not_analysed: modules with running state of a kind that is not known.
    """

    summary: str
    training: float
    evaluation: float
    gap: LossEstimate
    terms: Mapping[str, LossEstimate]
    findings: tuple[Finding, ...]
    sites: tuple[SiteRow, ...]
    loss_at_size: Mapping[int, LossEstimate]
    not_analysed: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; numbers that are not finite are None."""
        return json.loads(json.dumps(asdict(self)), parse_constant=lambda _: None)

    def __str__(self) -> str:
        blocks = [fill(self.summary, WIDTH), "\n".join(self._terms())]
        blocks += [str(finding) for finding in self.findings]
        if self.findings and self.sites:
            blocks.append(self._sites())
        if self.not_analysed:
            names = f"Not analysed, running state of another kind: {name_some(self.not_analysed)}."
            blocks.append(fill(names, WIDTH))
        return "\n\n".join(blocks)

    def _terms(self) -> list[str]:
        lines = [f"{'loss in training mode':<58}{self.training:>8.4f}"]
        for name, term in self.terms.items():
            if term.value or term.error:
                lines.append(f"  {TERMS[name]:<56}{term.value:>+8.4f} ± {term.error:.4f}")
        lines.append(f"{'loss in evaluation mode':<58}{self.evaluation:>8.4f}")
        for size, loss in self.loss_at_size.items():
            lines.append(f"{f'loss in evaluation in batches of {size}':<58}{loss.value:>8.4f}")
        return lines

    def _sites(self) -> str:
        rows = sorted(self.sites, key=lambda row: -row.largest_distance)
        table = pd.DataFrame(rows)
        text = table.where(table.notna(), "-").to_string(
            index=False, float_format="{:.3g}".format, max_rows=MAX_ROWS
        )
        return f"running averages from batches, median channel, in standard deviations:\n{text}"
