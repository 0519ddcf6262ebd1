"""Draws .pictures/batch_size.png, the first figure of the README, from runs and the shipped table.

    python scripts/figure.py runs

The folder has the study of experiment=batch_size_cifar, batch_size_cifar_long with all images
(dashed), and encoder_at_8, which adds a size to the encoder of the benchmark's table of runs, the
panel of text; conf/experiment/README.md has the commands.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import altair as alt

import normexp
from normexp.benchmark.table import BENCHMARK, WORKLOADS, read_table, shipped_path
from normexp.reporting.figures import CONFIG
from normexp.reporting.report import report_on
from normexp.reporting.slices import Slice

NORMS = {"batch": "#d55e00", "layer": "#0072b2", "instance": "#009e73", "group": "#7a4bc4"}
PICTURE = Path(__file__).parents[1] / ".pictures" / "batch_size.png"


def main() -> None:
    records = read_table(shipped_path(BENCHMARK)).records(WORKLOADS)
    texts = report_on(records, Path("runs"), [BENCHMARK])
    images, more_images, eight = map(
        _only_slice, ("batch_size_cifar", "batch_size_cifar_long", "encoder_at_8")
    )
    (text,) = [part for part in texts.slices if part.heading.startswith("encoder on langid")]
    panels = [
        _panel([images], "Residual network, CIFAR-10 at 16 x 16", more_images),
        _panel([text, eight], "Transformer encoder, language identification"),
    ]
    chart = alt.hconcat(*panels).resolve_scale(color="shared").configure(**CONFIG)
    chart.save(PICTURE, scale_factor=2)


def _only_slice(study: str) -> Slice:
    (part,) = normexp.load_report(study, runs_dir=sys.argv[1]).slices
    return part


def _panel(parts: list[Slice], title: str, dashed: Slice | None = None) -> Any:
    """A line per norm with its 95 % band; `dashed` is of a larger budget."""
    sizes = sorted(size for part in parts for size in part.sizes)
    x = alt.X("size:Q", title="norm batch size (samples per statistic)")
    x = x.axis(values=sizes, format="d", grid=False).scale(type="log", base=2, padding=8)
    y = alt.Y("error:Q", title="test error (%)").scale(zero=False)
    colour = alt.Color("norm:N").legend(columns=len(NORMS))
    colour = colour.scale(domain=[*NORMS], range=[*NORMS.values()])
    base = alt.Chart(alt.Data(values=[row for part in parts for row in _rows(part)])).encode(
        x, colour
    )
    band = base.mark_area(opacity=0.18).encode(
        alt.Y("low:Q", title="test error (%)"), alt.Y2("high:Q")
    )
    chart = alt.layer(band, base.mark_line(point=True).encode(y))
    if dashed is not None:
        more = alt.Chart(alt.Data(values=[*_rows(dashed)])).encode(x, colour)
        chart += more.mark_line(strokeWidth=1.2, strokeDash=[4, 3]).encode(y)
    return chart.properties(width=330, height=260, title=title)


def _rows(part: Slice) -> Iterator[dict[str, Any]]:
    for norm in NORMS:
        for size, grid in part.lines.get(norm, {}).items():
            mean = grid.mean
            if mean.low is not None and mean.high is not None and mean.estimate is not None:
                low, high = 100 - mean.high, 100 - mean.low
                row = {"error": 100 - mean.estimate, "low": low, "high": high}
                yield {"norm": norm, "size": size, **row}
                print(part.heading, norm, size, {k: round(v, 1) for k, v in row.items()})


if __name__ == "__main__":
    main()
