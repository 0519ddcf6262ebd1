"""The page in a real browser: filters, hover, sorting, dark and light, widths, and no network."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from headless_browser import CHROMIUM, DRIVER, MISSING, Browser
from synthetic_study import write_cell, write_study

from normexp.report import main

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason=MISSING),
    # A browser on a loaded machine stops answering now and then; the next one does not.
    pytest.mark.flaky(reruns=2, only_rerun="TimeoutError"),
]

MANY = ("layer", "instance", "group", "rms", "layer2d", "none", "dyt", "frn", "evonorm", "my_norm",
        "your_norm_with_a_name")  # fmt: skip
CHART = "document.querySelectorAll('.chart')"
AXIS_TITLE = "document.querySelector('.role-axis-title text')"
CUT = """return [...document.querySelectorAll('.chart, .scroll')]
    .filter(e => e.scrollWidth > e.clientWidth)
    .map(e => e.dataset.figure ?? e.textContent.trim().slice(0, 50))"""
# Pairs of texts in one chart whose boxes share more than a pixel or two of rounding.
OVERLAPS = """
const found = [];
for (const svg of document.querySelectorAll('.chart svg.marks')) {
  const texts = [...svg.querySelectorAll('text')].filter(t => t.textContent && t.style.opacity != 0
    && getComputedStyle(t).opacity != 0);
  const boxes = texts.map(
    t => [t.textContent, t.getBoundingClientRect(), t.getAttribute('transform')]);
  for (let i = 0; i < boxes.length; i++) for (let j = i + 1; j < boxes.length; j++) {
    const [a, b] = [boxes[i][1], boxes[j][1]];
    if ([boxes[i][2], boxes[j][2]].some(t => /rotate\\((?!0|-90|90)/.test(t))) continue;
    const x = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (x > 2 && y > 3) found.push([boxes[i][0], boxes[j][0]]);
  }
}
return found;
"""


@pytest.fixture
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a report of four norms, one with diverged and missing seeds."""
    root = tmp_path_factory.mktemp("page")
    write_study(root, np.random.default_rng(0))
    values = {0: 0.8, 1: None, 2: 0.81, 3: 0.79}
    write_cell(root, "instance", values, norm_batch_size=2)
    write_cell(root, "batch", {0: 0.9, 1: 0.91}, norm_batch_size=2, data="digits")
    assert main(["study=synthetic", f"runs_dir={root}"]) == 0
    return (root / "synthetic" / "report" / "index.html").as_uri()


def show(browser: Browser, url: str, *, width: int = 1000, dark: bool = False) -> None:
    browser.resize(width)
    browser.dark(dark)
    browser.errors(), browser.requests()
    browser.open(url)
    for index in range(browser.run(f"return {CHART}.length")):  # each is drawn when it is seen
        browser.run(f"{CHART}[{index}].scrollIntoView()")
        browser.wait(f"{CHART}[{index}].dataset.ready")
    browser.run("scrollTo(0, 0)")


def test_page_opens_without_errors_or_requests(browser: Browser, page: str):
    show(browser, page)
    assert browser.errors() == []
    assert [url for url in browser.requests() if not url.startswith("chrome:")] == [page]


@pytest.mark.parametrize("width", [390, 1000, 2000])
@pytest.mark.parametrize("dark", [False, True])
def test_page_fits_its_width(browser: Browser, page: str, width: int, dark: bool):
    show(browser, page, width=width, dark=dark)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    paper = browser.run("return getComputedStyle(document.body).backgroundColor")
    label = browser.run(f"return {AXIS_TITLE}.getAttribute('fill')")
    assert (paper, label) == (
        ("rgb(22, 25, 29)", "#e6e9ed") if dark else ("rgb(255, 255, 255)", "#1b1f24")
    )
    assert browser.run(OVERLAPS) == []
    assert browser.run(CUT) == []


def test_changing_the_scheme_redraws(browser: Browser, page: str):
    show(browser, page)
    browser.dark(True)
    browser.wait(f"{AXIS_TITLE}.getAttribute('fill') === '#e6e9ed'")


def test_filters_hide_rows_lines_and_sections(browser: Browser, page: str):
    show(browser, page)
    rows = "[...document.querySelectorAll('tbody tr[data-norm=batch]')]"
    shown = f"return {rows}.some(r => r.offsetParent)"
    colours = (
        "[...document.querySelectorAll('[data-figure^=metric] .mark-rule line')]"
        ".map(l => l.getAttribute('stroke'))"
    )
    assert browser.run(f"return {colours}").count("#d55e00") >= 4 and browser.run(shown)
    browser.run("document.querySelector('[data-filter=norm][data-value=batch]').click()")
    browser.wait(f"!{colours}.includes('#d55e00')")
    assert not browser.run(shown)
    browser.run("document.querySelector('[data-filter=data][data-value=digits]').click()")
    sections = "return [...document.querySelectorAll('section')].map(s => s.hidden)"
    assert sorted(browser.run(sections)) == [False, True]
    browser.run("document.querySelector('[data-filter=size][data-value=\"2\"]').click()")
    browser.wait(f"{colours}.length > 0")
    assert browser.run("return document.querySelector('.filters summary').textContent") == (
        "Filters: 3 hidden"
    )


def test_the_address_holds_what_is_hidden(browser: Browser, page: str):
    browser.open(f"{page}#norm=group&size=8")
    state = """return [...document.querySelectorAll('[data-filter]')].filter(b => !b.checked)
        .map(b => b.dataset.filter + ' ' + b.dataset.value)"""
    assert browser.run(state) == ["norm group", "size 8"]
    assert browser.run("return document.querySelector('.ranking tr[data-norm=group]').hidden")
    browser.run("document.querySelector('[data-value=group]').click()")
    assert browser.run("return location.hash") == "#size=8"


def test_filters_mark_the_sentences_that_no_longer_apply(browser: Browser, page: str):
    show(browser, page)
    stale = """return [...document.querySelectorAll('section:first-of-type [data-norms]')]
        .filter(s => s.classList.contains('stale')).map(s => s.textContent.split(' (')[0])"""
    box = "document.querySelector('[data-filter={}][data-value=\"{}\"]').click()"
    assert browser.run(stale) == []
    browser.run(box.format("norm", "layer"))
    assert [text[:31] for text in browser.run(stale)] == ["At norm batch size 2, layer is "]
    browser.run(box.format("norm", "layer"))
    browser.run(box.format("size", "8"))  # no sentence is about it
    assert browser.run(stale) == []
    browser.run(box.format("size", "128"))
    assert {text.split()[0] for text in browser.run(stale)} == {"batch", "To"}  # also the headline
    browser.run(box.format("norm", "batch"))
    assert len(browser.run(stale)) == 6  # all but the norms that do not depend on the size
    note = "getComputedStyle(document.querySelector('.headline'), '::after').content"
    assert "filtered" in browser.run(f"return {note}")


def test_hover_shows_values_seeds_and_directory(browser: Browser, page: str):
    show(browser, page)
    figure = "[data-figure^=metric] .mark-symbol path"
    point = browser.run(
        f"const p = document.querySelector('{figure}'); p.scrollIntoView({{block: 'center'}});"
        "const r = p.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]"
    )
    browser.move_to(point[0] - 30, point[1] - 30)
    browser.move_to(*point)
    browser.wait("document.querySelector('#vg-tooltip-element.visible')")
    text = browser.run("return document.querySelector('#vg-tooltip-element').textContent")
    assert "values by seed" in text and "0: " in text and "synthetic/" in text


def test_a_click_on_a_heading_sorts_numbers_as_numbers(browser: Browser, page: str):
    show(browser, page)
    heads = "[...document.querySelector('#cells').querySelectorAll('th')]"
    place = browser.run(f"return {heads}.findIndex(h => h.textContent === 'norm batch size')")
    cells = f"document.querySelector('#cells').querySelectorAll('td:nth-child({place + 1})')"
    browser.run(f"{heads}[{place}].firstChild.click()")
    up = browser.run(f"return [...{cells}].map(c => c.textContent)")
    browser.run(f"{heads}[{place}].firstChild.click()")
    down = browser.run(f"return [...{cells}].map(c => c.textContent)")
    assert [text for text in up if text != "any"] == ["2", "2", "8", "32", "128"]
    assert down == up[::-1] or [t for t in down if t != "any"] == ["128", "32", "8", "2", "2"]


@pytest.mark.parametrize("width", [390, 1400])
def test_a_cell_opens_its_runs_and_closes_them(browser: Browser, page: str, width: int):
    show(browser, page, width=width)
    browser.run("document.querySelector('[data-cell]').click()")
    browser.wait("document.querySelectorAll('.opened .chart svg.marks').length === 2")
    text = browser.run("return document.querySelector('.opened').textContent")
    for words in ("synthetic/batch", "test/\u200baccuracy", "batch_size: 128", "python: 3.11"):
        assert words in text
    rows = "return document.querySelectorAll('.opened tbody tr').length"
    seeds = "return document.querySelectorAll('.opened .chart .mark-line path').length"
    assert browser.run(rows) == 8 and browser.run(seeds) == 16
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.run(CUT) == browser.errors() == []
    browser.run("document.querySelector('[data-cell]').click()")
    assert browser.run("return document.querySelector('.opened')") is None


def test_printing_shows_every_figure_also_those_not_yet_seen(browser: Browser, page: str):
    browser.resize(1000)
    browser.open(page)
    browser.command("Emulation.setEmulatedMedia", media="print")
    shown = """return [...document.querySelectorAll('figure > img')].map(
        i => i.complete && i.naturalWidth > 100 && i.getBoundingClientRect().height > 50)"""
    figures = browser.run(f"return {CHART}.length")
    assert browser.run(shown) == [True] * figures and figures > 8
    live = f"return [...{CHART}].some(c => c.offsetParent)"
    assert browser.run(live) is False
    browser.command("Emulation.setEmulatedMedia", media="")
    # On the screen each figure is its chart or, until that is drawn, its picture.
    drawn = """return [...document.querySelectorAll('figure > img')].map(
        i => i.parentElement.querySelector('.chart svg.marks') !== null)"""
    assert browser.run(shown) == [not one for one in browser.run(drawn)]


def test_every_chart_and_table_can_be_saved(browser: Browser, page: str, tmp_path: Path):
    show(browser, page)
    browser.command("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    buttons = "document.querySelectorAll('button[data-table]')"
    count = browser.run(f"return {buttons}.length")
    for index in range(count):
        browser.run(f"{buttons}[{index}].click()")
        time.sleep(0.1)  # Chromium lets a page save ten files at a time
    end = time.monotonic() + 10
    while len(files := list(tmp_path.glob("*.csv"))) < count and time.monotonic() < end:
        time.sleep(0.1)
    assert len(files) == count > 5
    assert "norm" in next(tmp_path.glob("metric_by_size*.csv")).read_text().splitlines()[0]


@pytest.mark.parametrize("count", [0, 4, 11])
def test_no_text_overlaps(browser: Browser, tmp_path: Path, count: int):
    rng = np.random.default_rng(0)
    for position, norm in enumerate(("batch", *MANY[:count])):
        for size in (1, 2, 4, 8, 16, 64, 256, 1024):
            level = 0.8 + 0.01 * position
            values = {k: None if rng.random() < 0.2 else rng.normal(level, 0.01) for k in range(8)}
            options = {"norm_batch_size": size, "batch_size": 1024, "mixes_samples": True}
            write_cell(tmp_path, norm, values, with_history=True, **options)
    assert main(["study=synthetic", f"runs_dir={tmp_path}"]) == 0
    url = (tmp_path / "synthetic" / "report" / "index.html").as_uri()
    for width in (400, 1000, 2000):
        show(browser, url, width=width)
        assert browser.run("return document.querySelectorAll('.chart svg text').length") > 50
        assert browser.run(OVERLAPS) == []
        assert browser.run("return document.documentElement.scrollWidth") <= width
