"""Diagnostics per norm site at the end of training, where a study recorded them."""

from __future__ import annotations

from statistics import fmean

import altair as alt

from normexp.reporting.curves import History
from normexp.reporting.figures import ROWS, VISIBLE, Figure, encode_norm, finish
from normexp.reporting.rows import Row
from normexp.reporting.slices import AXIS_WORDS, Slice
from normexp.reporting.style import Style

PREFIX = "diagnostics/"
TITLES = {
    "output_rms": "rms of the output",
    "input_std": "sd of the input",
    "dead": "share of channels that are dead behind a ReLU",
    "running_gap": "|batch mean - running mean| / running sd",
    "saturated": "share of values where the norm is flat",
    "grad_norm": "gradient norm of the norm's parameters",
}


def draw_sites(
    part: Slice, styles: dict[str, Style], histories: dict[str, History]
) -> list[Figure]:
    """One figure per diagnostic at the smallest size: sites in order of depth, a line per norm."""
    rows = _rows(part, histories)
    return [
        _draw(part, styles, name, title, own)
        for name, title in TITLES.items()
        if (own := [row for row in rows if row["diagnostic"] == name])
    ]


def _draw(part: Slice, styles: dict[str, Style], name: str, title: str, rows: list[Row]) -> Figure:
    sites = list(dict.fromkeys(row["site"] for row in rows))
    colour, shape, dash = encode_norm(list(part.lines), styles)
    x = alt.X("site:N", title="norm site, by depth", sort=sites).axis(
        labelAngle=-45, labelLimit=130, labelOverlap="greedy"
    )
    y = alt.Y("value:Q", title=title).scale(zero=False)
    base = alt.Chart().transform_filter(VISIBLE)
    tip = ["norm:N", "site:N", "value:Q", "n:Q", "directory:N"]
    chart = alt.layer(
        base.mark_line(strokeWidth=1.4).encode(x, y, colour, dash),
        base.mark_point(filled=True, opacity=1, size=44).encode(x, y, colour, shape, tooltip=tip),
        data=ROWS,
    ).properties(width=560, height=220)
    where = f"{AXIS_WORDS[part.axis]} {part.sizes[0]}"
    caption = f"{title} at each norm site at the end of training, {where}; mean over seeds."
    return finish(f"sites_{name}", f"{title}, {where}", caption, chart, rows, part)


def _rows(part: Slice, histories: dict[str, History]) -> list[Row]:
    rows, size = [], part.sizes[0]
    for line in part.lines.values():
        cell = line.at(size)
        if cell is None:
            continue
        for name, points in histories.get(cell.id, {}).items():
            if name.startswith(PREFIX):
                site, _, diagnostic = name.removeprefix(PREFIX).rpartition("/")
                values = points[max(points)]
                rows.append(
                    {
                        "norm": cell.norm,
                        "size": size,
                        "site": site,
                        "diagnostic": diagnostic,
                        "value": fmean(values),
                        "n": len(values),
                        "directory": str(cell.directory),
                    }
                )
    return rows
