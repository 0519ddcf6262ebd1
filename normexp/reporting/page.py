"""A page and its folder: figures as files, one self-contained index.html, swapped in at once."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import vl_convert
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from normexp.errors import UserError
from normexp.reporting.charts import Figure
from normexp.reporting.tables import to_csv

PNG_SCALE = 2.0  # pixels per point of the figure
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:"
)
PACKAGE = "normexp.reporting"


def replace_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Writes to a temporary folder, then swaps it in: readers see old or new files.

    Raises:
        UserError: the folder cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=".report-", dir=target.parent))
    except OSError as error:
        raise UserError(f"{target} cannot be written ({error.strerror})") from error
    try:
        write(fresh / "new")
        with suppress(FileNotFoundError):
            os.replace(target, fresh / "old")
        os.replace(fresh / "new", target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def write_page(
    folder: Path,
    template: str,
    figures: Sequence[Figure],
    downloads: Mapping[str, str],
    *,
    package: str = PACKAGE,
    **values: Any,
) -> None:
    """Writes index.html and the files of its figures; it loads nothing from anywhere.

    Texts from configs, file names and error messages are escaped by the template, or are JSON
    without `<`.

    Args:
        template: in `package`, or of reports.
        downloads: CSV by the name of a table.
        values: what the template shows.
    """
    drawings = folder / "figures"
    (drawings / "paper").mkdir(parents=True)
    # Drawing and bundling release Python's lock, so threads use all cores.
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        bundle = pool.submit(_bundle)
        drawn = pool.map(partial(_write_figure, drawings), figures)
        images = {
            figure.name: b64encode(svg.encode()).decode()
            for figure, svg in zip(figures, drawn, strict=True)
        }
    content = {
        "figures": {figure.name: figure.spec for figure in figures},
        "tables": {**downloads, **{figure.name: to_csv(figure.table) for figure in figures}},
    }
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package, "."), PackageLoader(PACKAGE, ".")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template(template).render(
        images=images,
        policy=Markup(POLICY),
        bundle=Markup(bundle.result()),
        data=Markup(json.dumps(content, allow_nan=False).replace("<", "\\u003c")),
        css=_asset("page.css"),
        js=_asset("page.js"),
        **values,
    )
    (folder / "index.html").write_text(page, encoding="utf-8")


def _write_figure(folder: Path, figure: Figure) -> str:
    """Writes the files of a figure; returns its SVG, in base 64 on the page, for printing."""
    (folder / f"{figure.name}.csv").write_text(to_csv(figure.table), encoding="utf-8")
    svg = ""
    for place, spec in ((folder / "paper", figure.for_paper), (folder, figure.spec)):
        svg = vl_convert.vegalite_to_svg(json.dumps(spec))
        (place / f"{figure.name}.svg").write_text(svg, encoding="utf-8")
        (place / f"{figure.name}.pdf").write_bytes(vl_convert.svg_to_pdf(svg))
    (folder / f"{figure.name}.png").write_bytes(vl_convert.svg_to_png(svg, scale=PNG_SCALE))
    return svg


def _asset(name: str) -> Markup:
    return Markup(files(PACKAGE).joinpath(name).read_text(encoding="utf-8"))


@cache
def _bundle() -> str:
    """Vega, Vega-Lite and vega-embed as one script that sets window.vegaEmbed."""
    # The stub lacks the default of the argument `snippet`.
    bundle: str = vl_convert.javascript_bundle()  # pyright: ignore[reportCallIssue]
    return bundle.replace("</script", "<\\/script")
