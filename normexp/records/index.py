"""cells.csv: what a study was asked for, one line per cell and news of it, only ever appended to.

The digest stands for a cell as it was composed, before anything is built; its id is known only once
it is. So a study also lists the cells that were never begun, and why some were refused.
"""

from __future__ import annotations

import csv
import fcntl
import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from normexp.records.layout import INDEX_FILE
from normexp.records.writer import append_whole

FIELDS = ("digest", "title", "seeds", "cell_id", "error")


@dataclass(frozen=True)
class News:
    """One line: that a cell is asked for, what its id is, or why it cannot be trained."""

    digest: str
    title: str
    seeds: Sequence[int]
    cell_id: str = ""
    error: str = ""


@dataclass
class Asked:
    """All that the lines say of one cell; the latest counts, and seeds add up.

    Attributes:
        earlier_ids: those it had before its source or data changed.
    """

    title: str
    seeds: set[int] = field(default_factory=set)
    cell_id: str = ""
    error: str = ""
    earlier_ids: set[str] = field(default_factory=set)

    def hear(self, news: News) -> None:
        self.title = news.title
        self.seeds |= set(news.seeds)
        if news.cell_id or news.error:
            if news.cell_id:
                self.earlier_ids = (self.earlier_ids | {self.cell_id}) - {news.cell_id, ""}
                self.cell_id = news.cell_id
            self.error = news.error

    def knows(self, news: News) -> bool:
        """Whether a line would say nothing new."""
        is_known = set(news.seeds) <= self.seeds
        if news.cell_id or news.error:
            is_known &= (news.cell_id or self.cell_id, news.error) == (self.cell_id, self.error)
        return is_known


def append_news(study_dir: Path, all_news: Iterable[News]) -> None:
    """Adds the lines that are new to cells.csv; safe while other processes add theirs."""
    all_news = list(all_news)
    cells = read_index(study_dir)
    if all(news.digest in cells and cells[news.digest].knows(news) for news in all_news):
        return  # so that a study that is only read need not be writable
    descriptor = os.open(study_dir / INDEX_FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # until close
        content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        whole = content[: content.rfind(b"\n") + 1]  # a killed writer may have torn its last line
        if len(whole) < len(content):
            os.ftruncate(descriptor, len(whole))
        cells = _read(whole.decode(errors="replace"))
        new = []
        for news in all_news:
            asked = cells.setdefault(news.digest, Asked(news.title))
            if not asked.knows(news):
                asked.hear(news)
                new.append(_line(news))
        header = "" if whole else ",".join(FIELDS) + "\n"
        if new:
            append_whole(descriptor, (header + "".join(new)).encode())
    finally:
        os.close(descriptor)


def read_index(study_dir: Path) -> dict[str, Asked]:
    """The cells that were asked for, by digest, in the order of their first line."""
    path = study_dir / INDEX_FILE
    if not path.is_file():
        return {}
    text = path.read_text(encoding="utf-8", errors="replace")
    return _read(text[: text.rfind("\n") + 1])


def _read(text: str) -> dict[str, Asked]:
    """Lines that are not as `_line` writes them are passed over: results do not depend on them."""
    cells: dict[str, Asked] = {}
    for row in csv.reader(io.StringIO(text)):
        if len(row) != len(FIELDS) or tuple(row) == FIELDS:
            continue
        digest, title, seeds, cell_id, error = row
        if seeds and not seeds.replace(" ", "").isdecimal():
            continue
        news = News(digest, title, [int(seed) for seed in seeds.split()], cell_id, error)
        cells.setdefault(digest, Asked(title)).hear(news)
    return cells


def _line(news: News) -> str:
    seeds = " ".join(map(str, sorted(news.seeds)))
    row = [news.digest, news.title, seeds, news.cell_id, news.error]
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerow([" ".join(value.split()) for value in row])
    return file.getvalue()
