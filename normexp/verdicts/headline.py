"""The answer to a sweep in one line."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normexp.verdicts.arm_at_size import ArmAtSize
from normexp.verdicts.cells import DIGESTS, CellRuns, setting_words
from normexp.verdicts.compare import Comparison, Ranking
from normexp.verdicts.rows import comparable
from normexp.verdicts.settings import AXES, SETUP
from normexp.verdicts.slices import Slice

MOST_WORDS = 15  # the length of its claims
ALONG_SIZES = {  # the claim for each verdict
    "worse": "At {first}, {arm} loses {gap} against {second}",
    "better": "At {first}, {arm} gains {gap} against {second}",
    "tie": "{arm} at {first} and {second} tie within {margin}",
    "undecided": "{arm} at {first} against {second}: undecided",
    None: "{arm} at {first} against {second}: no verdict",
}
BETWEEN_ARMS = {
    "worse": "{against} is {gap} ahead of {arm}",
    "better": "{arm} is {gap} ahead of {against}",
    "tie": "{arm} and {against} tie within {margin}",
    "undecided": "{arm} against {against}: undecided",
    None: "{arm} against {against}: no verdict",
}
PLAIN_NAMES = ("batch", "layer", "instance", "group", "rms")  # known as `batch norm`


def headline_of(
    slice_: Slice,
    comparisons: Sequence[Comparison],
    rankings: Sequence[Ranking],
    cells: Sequence[CellRuns],
) -> str:
    """First along the sizes, then between arms at the first size; then what limits it.

    comparisons, rankings: of the slice
    cells: of the report
    """
    if slice_.no_verdict:
        return _of_tries(slice_, cells)
    along = [one for one in comparisons if one.is_comparable and one.is_along_sizes]
    best = _best_claim(rankings[0], is_alone=not along) if rankings else ""
    if not along and not best:
        whys = [f"no verdict: {comparison.why}." for comparison in comparisons]
        return whys[0] if whys else _why_nothing(slice_, cells)
    claim = f"{best}{slice_.at_words(rankings[0].size)}" if best else ""
    if slice_.arm_key == SETUP:
        claim = "; ".join(map(_claim, comparisons))
    if along:
        drop = min(along, key=lambda pair: (pair.verdict != "worse", pair.gap.estimate or 0.0))
        claim = _with_best(drop, rankings[0] if best else None, best)
    searches = dict.fromkeys(comparison.of_one_search for comparison in comparisons)
    return "; ".join([claim, *filter(None, searches), *_diverged_words(slice_)]) + "."


def _of_tries(slice_: Slice, cells: Sequence[CellRuns]) -> str:
    """What the numbers of a loop are good for, and how its best tries get verdicts."""
    baseline = slice_.cells[0]
    num_tries = len(slice_.cells) - 1
    numbers = f"{num_tries} {'try' if num_tries == 1 else 'tries'}, numbers on validation"
    if any(cell.confirmation and cell.study == baseline.study for cell in cells):
        return f"{numbers}; verdicts are those of the confirmation on unused seeds."
    folder = baseline.directory.parent
    words = f"study={folder.name}"
    if folder.parent != Path("runs"):
        words += f" {shlex.quote(f'runs_dir={folder.parent}')}"
    return (
        f"{numbers}, no verdict: each command may have followed from the results of those before. "
        f"Confirm the best on unused seeds: python -m normexp.confirm {words}. If all were "
        f"planned before the first result: python -m normexp.report {words} tries={num_tries}."
    )


def _with_best(drop: Comparison, ranking: Ranking | None, best: str) -> str:
    """A drop along the sizes, and what is best, if both fit."""
    claim = _claim(drop)
    if ranking is None:
        return claim
    at = "" if ranking.size == drop.sizes[0] else f"at {ranking.size}, "
    shorter = claim.replace(f" against {drop.sizes[1]}", "")
    shorter = shorter.replace(f" within {_margin_words(drop)}", "")
    for along in (claim, shorter):
        both = f"{along}; {at}{best}"
        if len(both.split()) <= MOST_WORDS:
            return both
    return claim


def _diverged_words(slice_: Slice) -> list[str]:
    """`batch: 2 diverged` of each arm whose means count diverged seeds as chance level."""
    counts: dict[str, int] = {}
    for side in slice_.arms_at_sizes:
        if count := side.num_diverged:
            counts[side.arm] = counts.get(side.arm, 0) + count
    return [f"{arm}: {count} diverged" for arm, count in counts.items()]


def _claim(comparison: Comparison) -> str:
    """`At 2, batch norm loses 10.7 pp against 128`, `own is 5.0 pp ahead of batch norm`."""
    metric, gap = comparison.slice.metric, abs(comparison.gap.estimate or 0.0)
    sentences = ALONG_SIZES if comparison.is_along_sizes else BETWEEN_ARMS
    first, second = comparison.sizes
    claim = sentences[comparison.verdict].format(
        arm=_full_name(comparison.first),
        against=_full_name(comparison.second),
        first=first,
        second=second,
        gap=f"{gap:.{metric.digits}f} {metric.unit}".strip(),
        margin=_margin_words(comparison),
    )
    return claim + comparison.mark


def _margin_words(comparison: Comparison) -> str:
    """`0.02 bits per byte`."""
    metric = comparison.slice.metric
    return f"{metric.tolerance:g} {metric.unit}".strip()


def _best_claim(ranking: Ranking, *, is_alone: bool) -> str:
    """`layer norm is ahead`; an arm that is not ranked is named, or there is no best."""
    pairs = [place.comparison for place in ranking.places if place.comparison]
    if is_alone and len(pairs) == 1:
        return _claim(pairs[0])
    if all(place.side and place.side.is_at_chance for place in ranking.places):
        return "all are at chance"
    slice_ = ranking.slice
    arms = f"{slice_.arm_key}s" if slice_.is_main else f"values of {slice_.arm_key}"
    not_ranked = [pair.first for pair in pairs if pair.verdict is None]
    if len(not_ranked) > 1:
        return f"{len(not_ranked)} {arms} are not ranked"
    claims = []
    best, num_arms = ranking.best, len(ranking.places)
    if best:
        if len(best) > 2:
            claim = f"{len(best)} of {num_arms} {arms} may lead"
        else:
            sides = {place.arm: place.side for place in ranking.places}
            names = " or ".join(_full_name(side) for arm in best if (side := sides[arm]))
            claim = f"{names} is ahead" if len(best) == 1 else f"{names} may lead"
        mark = max(pair.mark for pair in pairs)  # that of any of them, since "" is less
        claims.append(claim + mark)
    elif not not_ranked:
        claims.append("none is shown to be above chance")
    claims += [f"{_full_name(side)} is not ranked" for side in not_ranked]
    return "; ".join(claims)


def _full_name(side: ArmAtSize) -> str:
    is_norm = side.best.roles.arm == "norm"
    return f"{side.arm} norm" if is_norm and side.arm in PLAIN_NAMES else side.arm


def _why_nothing(slice_: Slice, cells: Sequence[CellRuns]) -> str:
    """Why a slice of one arm and one size compares nothing: which settings stand in the way."""
    own, key = slice_.cells[0], slice_.arm_key
    folders = {cell.directory for cell in slice_.cells}
    different = []
    for cell in cells:
        if cell.directory not in folders:
            different.append(_differences(own, cell))
    values = min(different, key=len, default={})
    for name in values:
        if name in (*own.roles.task, *own.roles.budgets) or name.startswith(DIGESTS):
            both = " and ".join(setting_words(name, value) for value in values[name])
            return f"nothing to compare: {both} have tables of their own; train another {key}."
    if len(values) < 2:
        return f"nothing to compare: one {key}, one size; train another {key} in this study."
    # With the first value of one setting and the second of the others, one comparison is possible.
    wanted = [
        setting_words(name, pair[place > 0]) for place, (name, pair) in enumerate([*values.items()])
    ]
    names = " and ".join(values)
    return f"nothing to compare: {names} differ at once; train {' '.join(wanted)}, too."


def _differences(first: CellRuns, second: CellRuns) -> dict[str, tuple[Any, Any]]:
    """The values of two cells by setting, where they differ."""
    sizes = AXES if first.roles.sizes else ()
    keys = dict.fromkeys((*first.separating, *second.separating, first.roles.arm, *sizes))
    pairs = {key: (first.value_of(key), second.value_of(key)) for key in keys}
    return {key: (a, b) for key, (a, b) in pairs.items() if comparable(a) != comparable(b)}
