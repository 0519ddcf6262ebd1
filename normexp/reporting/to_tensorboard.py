"""A written report in TensorBoard: figures as images, main table and verdict as text.

TensorBoard's own event writer is used, the one that torch's SummaryWriter builds on, so that a
report needs no torch.
"""

from __future__ import annotations

import struct
import time
from importlib.util import find_spec

from normexp.errors import UserError
from normexp.reporting.report import Report


def require_tensorboard() -> None:
    """UserError where the package is not installed; asked before any work."""
    if find_spec("tensorboard") is None:
        raise UserError(
            "log=tensorboard needs the package tensorboard; pip install 'normexp[tensorboard]'"
        )


def log_to_tensorboard(report: Report) -> str:
    """Logs figures, main table and verdict of a written report; returns where they are, in words.

    They lie in tensorboard/report beside the report's folder, at the number of ended runs as step,
    so that the reports of a growing study follow each other.
    """
    # Generated modules, whose names no type checker sees.
    from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
    from tensorboard.compat.proto.summary_pb2 import (
        Summary,  # pyright: ignore[reportAttributeAccessIssue]
    )
    from tensorboard.plugins.text.summary_v2 import text_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    directory = report.directory.parent / "tensorboard" / "report"
    main = report.tables[0]
    parts = [
        text_pb("report/verdict", _verdict(report)),
        text_pb(f"report/{main.name}", main.to_markdown()),
    ]
    for section in report.sections:
        for figure in section.figures:
            png = (report.directory / "figures" / f"{figure.name}.png").read_bytes()
            width, height = size_of_png(png)
            image = Summary.Image(width=width, height=height, encoded_image_string=png)
            parts.append(Summary(value=[Summary.Value(tag=f"report/{figure.name}", image=image)]))
    step = sum(len(cell.runs) for cell in report.cells)
    writer = EventFileWriter(str(directory))
    try:
        for summary in parts:
            writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
    finally:
        writer.close()
    return f"TensorBoard: tensorboard --logdir {directory.parent}"


def size_of_png(png: bytes) -> tuple[int, int]:
    """Width and height in pixels, from the header: bytes 16 to 23 (RFC 2083, section 4.1.1)."""
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def _verdict(report: Report) -> str:
    """Markdown: a heading per slice and a line per sentence."""
    lines = [
        line
        for verdict in report.verdicts
        for line in [
            f"### {verdict.heading}\n",
            *(f"- {one.text}" for one in [*verdict.losses, *verdict.comparisons]),
            "",
        ]
    ]
    return "\n".join(lines)
