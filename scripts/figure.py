"""Draws .pictures/batch_size.png, the first figure of the README, from the shipped records.

    python scripts/figure.py [FOLDER]

FOLDER has the studies batch_size_cifar and batch_size_text, as zips or folders; it is
conf/experiment/records unless given. The numbers are in the report of each:

    python -m normexp.report study=batch_size_cifar runs_dir=FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import altair as alt

import normexp
from normexp.verdicts.figures import CONFIG
from normexp.verdicts.slices import Slice

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "conf" / "experiment" / "records"
PICTURE = ROOT / ".pictures" / "batch_size.png"
COLOURS = {
    "batch": "#d55e00",
    "layer": "#0072b2",
    "instance": "#009e73",
    "group": "#7a4bc4",
    "rms": "#c98a00",
}
TITLES = {
    "batch_size_cifar": "CIFAR-10, residual network",
    "batch_size_text": "Shakespeare, small GPT",
}
FONT = 19  # pixels; a phone shows the picture at half its size
TEXTS = {
    "axis": CONFIG["axis"] | {"labelFontSize": FONT, "titleFontSize": FONT},
    "legend": CONFIG["legend"]
    | {"labelFontSize": FONT + 1, "columns": 5, "symbolSize": 160, "title": None},
}


def main(folder: Path = RECORDS) -> None:
    panels = []
    for study, title in TITLES.items():
        if (folder / f"{study}.zip").exists() or (folder / study).exists():
            (slice_,) = normexp.load_report(study, runs_dir=folder).slices
            panels.append(draw_panel(slice_, title))
    if not panels:
        sys.exit(f"{folder} has none of the studies {', '.join(TITLES)}")
    chart = alt.hconcat(*panels, spacing=130, bounds="flush").resolve_scale(color="shared")
    chart.configure(**CONFIG | TEXTS).save(PICTURE, scale_factor=2)


def draw_panel(slice_: Slice, title: str) -> Any:
    """A line per norm, a dot per seed, and from four seeds on a 95 % band."""
    rows = [*rows_of(slice_)]
    is_accuracy = slice_.metric.unit == "pp"
    words = "test error (%)" if is_accuracy else f"test, {slice_.metric.unit}"
    x = alt.X("size:Q", title="norm batch size").scale(type="log", base=2, padding=12)
    x = x.axis(values=sorted(slice_.sizes), format="d", grid=False)
    y = alt.Y("value:Q", title=words).scale(zero=False, nice=False, padding=12)
    y = y.axis(tickCount=6)
    colour = alt.Color("norm:N").scale(domain=[*COLOURS], range=[*COLOURS.values()])
    base = alt.Chart(alt.Data(values=rows)).encode(x, colour)
    mean, seed = (base.transform_filter(f"datum.kind == '{kind}'") for kind in ("mean", "seed"))
    band = mean.transform_filter("isValid(datum.low)").mark_area(opacity=0.15)
    band = band.encode(alt.Y("low:Q", title=words), alt.Y2("high:Q"))
    dots = seed.mark_circle(size=25, opacity=0.6).encode(y)
    line = mean.mark_line(strokeWidth=2.5, point=alt.OverlayMarkDef(size=70)).encode(y)
    # A chart's own title is pushed up by labels of its axis, and would not be level in both panels.
    heading = alt.Chart(alt.Data(values=[{}])).mark_text(
        text=title, align="left", baseline="bottom", fontSize=FONT + 1
    )
    heading = heading.encode(alt.XValue(0), alt.YValue(-20))
    return alt.layer(band, dots, line, heading).properties(width=330, height=300)


def rows_of(slice_: Slice) -> Iterator[dict[str, Any]]:
    """The mean and the seeds of each norm at each size, as errors or bits: lower is better."""

    def shown(value: float | None) -> float | None:
        return value if value is None or slice_.metric.unit != "pp" else 100 - value

    for norm, line in slice_.lines.items():
        for size, norm_at_size in line.items():
            place, mean = {"norm": norm, "size": size}, norm_at_size.mean
            bounds = {"low": shown(mean.low), "high": shown(mean.high)}
            yield place | {"kind": "mean", "value": shown(mean.estimate)} | bounds
            n = len(norm_at_size.seeds)
            print(slice_.heading, norm, size, norm_at_size.estimate(), f"n = {n}")
            for value in norm_at_size.values.values():
                yield place | {"kind": "seed", "value": shown(value)}


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
