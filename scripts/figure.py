"""Draws .pictures/batch_size.png, the first figure of the README, from the shipped records.

    python scripts/figure.py [FOLDER [PICTURE]]

FOLDER has the studies of PANELS, as zips or folders; it is conf/experiment/records unless given.
The numbers are in the report of each:

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
PANELS = {
    "batch_size_cifar_tuned": "CIFAR-10, residual network",
    "batch_size_text_tuned": "Shakespeare, small GPT",
}
COLOURS = {
    "batch": "#d55e00",
    "layer": "#0072b2",
    "instance": "#009e73",
    "group": "#7a4bc4",
    "rms": "#c98a00",
}
WIDTH, HEIGHT = 330, 320
FONT = 21  # pixels; a phone of 390 pixels shows the picture at less than half its size
TEXTS = {
    "axis": CONFIG["axis"] | {"labelFontSize": FONT, "titleFontSize": FONT},
    "legend": CONFIG["legend"]
    | {"labelFontSize": FONT, "columns": 5, "symbolSize": 200, "title": None},
    "padding": 12,  # of white, on a dark page
}


def main(folder: Path = RECORDS, picture: Path = PICTURE) -> None:
    panels = []
    for study, title in PANELS.items():
        (slice_,) = normexp.load_report(study, runs_dir=folder).slices
        panels.append(draw_panel(slice_, title))
    chart = alt.hconcat(*panels, spacing=140, bounds="flush").resolve_scale(color="shared")
    chart.configure(**CONFIG | TEXTS).save(picture, scale_factor=2)


def draw_panel(slice_: Slice, title: str) -> Any:
    """Means, from four seeds on with 95 % intervals, and a faint dot per seed.

    A norm that mixes no samples was run at one size, and its line and band reach over all.
    """
    error = "test error (%)" if slice_.metric.unit == "pp" else f"test, {slice_.metric.unit}"
    x = alt.X("size:Q", title="norm batch size").scale(type="log", base=2, padding=20)
    x = x.axis(values=sorted(slice_.sizes), format="d", grid=False)
    y = alt.Y("value:Q", title=error).scale(zero=False, nice=False, padding=12)
    y = y.axis(tickCount=6)
    low, high = alt.Y("low:Q", title=error), alt.Y2("high:Q")
    colour = alt.Color("norm:N").scale(domain=[*COLOURS], range=[*COLOURS.values()])
    base = alt.Chart(alt.Data(values=[*marks_of(slice_)])).encode(x, colour)
    seeds, means, levels = (
        base.transform_filter(f"datum.kind == '{kind}'") for kind in ("seed", "mean", "level")
    )
    has_interval = "isValid(datum.low)"
    layers = [
        levels.transform_filter(has_interval).mark_area(opacity=0.15).encode(low, high),
        seeds.mark_circle(size=30, opacity=0.35).encode(y),
        levels.mark_line(strokeWidth=2.5).encode(y),
        means.mark_line(strokeWidth=2.5, point=alt.OverlayMarkDef(size=90)).encode(y),
        means.transform_filter(has_interval).mark_rule(strokeWidth=2.5).encode(low, high),
        _heading(title),
    ]
    return alt.layer(*layers).properties(width=WIDTH, height=HEIGHT)


def _heading(title: str) -> Any:
    """Level in all panels; a chart's own title is pushed up by the labels of its axis."""
    chart = alt.Chart(alt.Data(values=[{}]))
    text = chart.mark_text(text=title, align="left", baseline="bottom", fontSize=FONT)
    return text.encode(alt.XValue(0), alt.YValue(-16))


def marks_of(slice_: Slice) -> Iterator[dict[str, Any]]:
    """Each norm's mean at each size, `level` if it mixes no samples; its seeds, at its best lr."""

    def shown(value: float | None) -> float | None:
        """As an error or in bits: lower is better."""
        return value if value is None or slice_.metric.unit != "pp" else 100 - value

    for norm, line in slice_.lines.items():
        is_level = norm in slice_.independent
        for size, norm_at_size in line.items():
            place, mean = {"norm": norm, "size": size}, norm_at_size.mean
            bounds = {"low": shown(mean.low), "high": shown(mean.high)}
            kind = "level" if is_level else "mean"
            yield place | {"kind": kind, "value": shown(mean.estimate)} | bounds
            n = len(norm_at_size.seeds)
            print(slice_.heading, norm, size, norm_at_size.estimate(), f"n = {n}")
            if is_level and size != norm_at_size.best.norm_batch_size:
                continue  # where nothing was run
            for value in norm_at_size.best.values(slice_.metric).values():
                yield place | {"kind": "seed", "value": shown(value)}


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
