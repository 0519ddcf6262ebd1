"""One colour, marker and place per norm, whatever else is in the report."""

from __future__ import annotations

import pytest

from normexp.reporting.style import ORDER, SLOTS, assign_styles, order_norms


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb` as WCAG 2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_a_shipped_norm_looks_the_same_in_every_report():
    alone = assign_styles(["group"])
    among = assign_styles([*ORDER, "mine", "yours"])
    assert alone["group"] == among["group"] == SLOTS[ORDER.index("group")]


def test_twelve_norms_have_twelve_colours_and_markers():
    labels = [*ORDER, "a", "b", "c", "d", "e"]
    styles = assign_styles(labels).values()
    assert len({style.colour for style in styles}) == len({s.marker for s in styles}) == 12


def test_a_variant_takes_the_colour_of_its_norm_and_the_next_one_another():
    styles = assign_styles(["group num_groups=4", "group num_groups=16", "batch"])
    assert styles["group num_groups=4"] == SLOTS[ORDER.index("group")]
    assert len(set(styles.values())) == 3


def test_of_forty_norms_no_two_share_colour_and_marker():
    labels = [*ORDER, *(f"norm{i}" for i in range(33))]
    styles = assign_styles(labels)
    assert list(styles) == labels
    assert len({(style.colour, style.marker) for style in styles.values()}) == 40


def test_numbers_are_ordered_by_value():
    labels = ["group num_groups=16", "mine", "group num_groups=4", "batch"]
    expected = ["batch", "group num_groups=4", "group num_groups=16", "mine"]
    assert order_norms(labels) == expected


@pytest.mark.parametrize("paper", ["#ffffff", "#16191d"])
def test_every_colour_stands_out_on_light_and_dark(paper: str):
    assert min(contrast(style.colour, paper) for style in SLOTS) > 2.4
