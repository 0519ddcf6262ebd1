"""What a study has lost: cells refused, runs that failed, seeds that diverged or are at chance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from normexp.config.rules import format_count
from normexp.reporting.metric import LOWER, chance_words
from normexp.reporting.model import AXIS_WORDS, CellRow, Slice
from normexp.reporting.read import RefusedCell
from normexp.reporting.sentences import listed

MOST_NAMES = 3  # in the summary
NOT_CHOSEN = "at rates that no seed chooses"


@dataclass(frozen=True)
class Losses:
    """Counts and reasons.

    summary: one line, `2 cells refused; norm=none: 4 of 4 seeds diverged`; empty without a loss

    lines: one for each reason, with the remedy
    """

    summary: str
    lines: Sequence[str]


def losses_of(
    slices: Sequence[Slice], cells: Iterable[CellRow], refused: Sequence[RefusedCell]
) -> Losses:
    """The losses of a report; those at rates that the search of a norm does not choose are summed.

    slices: whose cells count where seeds diverged or are at chance
    """
    errors = [(cell.norm, run.result.error) for cell in cells for run in cell.runs]
    failed = [(norm, error) for norm, error in errors if error]
    counts = [
        f"{format_count(len(refused), 'cell')} refused" * bool(refused),
        f"{format_count(len(failed), 'run')} failed" * bool(failed),
    ]
    lines = [
        *_by_reason(((cell.norm, cell.error) for cell in refused), "cell", ""),
        *_by_reason(failed, "run", "failed: "),
    ]
    lost: dict[str, dict[str, tuple[int, int]]] = {"diverged": {}, "at chance": {}}
    passed_over = {"diverged": 0, "at chance": 0}
    for part in slices:
        for cell in dict.fromkeys(cell for _, cell in part.points):
            diverged = {seed for c in part.chosen(cell) for seed in c.seeds_with("diverged")}
            count, at_chance, total = len(diverged), len(part.at_chance(cell)), len(cell.runs)
            words = chance_words(at_chance, total, cell.config.get("chance_accuracy") or 0.0)
            where = _place(part, cell) + (f", {part.heading}" if len(slices) > 1 else "")
            remedy = "at a rate that some seeds choose" if part.tuned(cell) else LOWER
            for kind, num_seeds, said in (
                ("diverged", count, f"{count} of {total} seeds diverged"),
                ("at chance", at_chance, words),
            ):
                if num_seeds:
                    known = lost[kind].get(cell.norm, (0, 0))
                    lost[kind][cell.norm] = (known[0] + num_seeds, known[1] + total)
                    lines.append(f"{where}: {said}; {remedy}")
            others = [other for other in part.grid(cell) if other not in part.chosen(cell)]
            counts_of_others = {
                "diverged": sum(len(other.seeds_with("diverged")) for other in others),
                "at chance": sum(len(other.at_chance) for other in others),
            }
            for kind, num_seeds in counts_of_others.items():
                if num_seeds:
                    passed_over[kind] += num_seeds
                    runs = sum(len(other.runs) for other in others)
                    lines.append(f"{where}: {num_seeds} of {runs} runs {kind} {NOT_CHOSEN}")
    for kind, norms in lost.items():
        named = [f"norm={norm}: {k} of {n} seeds {kind}" for norm, (k, n) in norms.items()]
        many = [f"{format_count(len(named), 'norm')} with seeds {kind}"] if named else []
        counts += named if sum(map(len, lost.values())) <= MOST_NAMES else many
    many = [f"{number} {kind}" for kind, number in passed_over.items() if number]
    counts.append(f"runs {NOT_CHOSEN}: {', '.join(many)}" * bool(many))
    return Losses("; ".join(filter(None, counts)), lines)


def _by_reason(pairs: Iterable[tuple[str, str]], noun: str, verb: str) -> list[str]:
    """`batch and group num_groups=7, 3 cells refused: ...`, a line for each reason."""
    norms: dict[str, list[str]] = {}
    for norm, reason in pairs:
        norms.setdefault(reason, []).append(norm)
    return [
        f"{listed([*dict.fromkeys(same)])}, {format_count(len(same), noun)} {verb}{reason}"
        for reason, same in norms.items()
    ]


def _place(part: Slice, cell: CellRow) -> str:
    """`norm=dyt lr=1`, with the size where there are several."""
    size = cell.norm_batch_size if part.axis == "norm_batch_size" else cell.batch_size
    has_size = len(part.sizes) > 1 and cell.norm not in part.independent
    words = [f"norm={cell.norm}", f"{AXIS_WORDS[part.axis]} {size}" if has_size else ""]
    words.append(f"lr={cell.lr:g}" if cell.lr is not None and not part.tuned(cell) else "")
    return " ".join(filter(None, words))
