"""Serving a report on this machine alone, rebuilt whenever a result of its study changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from glob import escape, glob
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from normexp.errors import UserError
from normexp.records.paths import EVALUATION_FILE, RESULT_FILE

HOST = "127.0.0.1"
FIRST_PORT = 8000
TRIED_PORTS = 20
LOOK_EVERY = 2.0  # seconds


def serve_report(
    directory: Path, studies: Sequence[Path], rebuild: Callable[[], None], *, stop: threading.Event
) -> None:
    """Serves `directory` until `stop` is set or Ctrl-C; calls `rebuild` when results have changed.

    A rebuild that finds a broken study says so and leaves the last page standing.
    """
    server = _open_server(directory)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    print(f"serving http://{HOST}:{server.server_port}/index.html, Ctrl-C stops", flush=True)
    before = stamp_of(studies)
    try:
        while not stop.wait(LOOK_EVERY):
            now = stamp_of(studies)
            if now != before:
                before = now
                _try(rebuild)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def stamp_of(studies: Sequence[Path]) -> frozenset[tuple[str, int]]:
    """Every result of the studies with the time it was written."""
    # Not Path.glob, which raises where a folder goes away while it looks.
    files = (
        Path(file)
        for study in studies
        for name in (RESULT_FILE, EVALUATION_FILE)
        for file in glob(f"{escape(str(study))}/*/seed-*/{name}")
    )
    found = set()
    for file in files:
        with suppress(FileNotFoundError):  # removed just now, by a rerun
            found.add((str(file), file.stat().st_mtime_ns))
    return frozenset(found)


def _try(rebuild: Callable[[], None]) -> None:
    try:
        rebuild()
    except UserError as error:
        print(f"normexp: {error}", flush=True)


class _Handler(SimpleHTTPRequestHandler):
    """Files of the report; silent, and with the tag by which the page sees a new version."""

    def end_headers(self) -> None:
        path = Path(self.translate_path(self.path))
        if path.is_file():
            self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002, ARG002
        return

    def list_directory(self, path: object) -> None:  # noqa: ARG002
        self.send_error(404)


def _open_server(directory: Path) -> ThreadingHTTPServer:
    handler = partial(_Handler, directory=str(directory))
    for port in range(FIRST_PORT, FIRST_PORT + TRIED_PORTS):
        try:
            return ThreadingHTTPServer((HOST, port), handler)
        except OSError:  # taken
            continue
    last = FIRST_PORT + TRIED_PORTS - 1
    raise UserError(f"serve=true: ports {FIRST_PORT} to {last} of {HOST} are taken; free one")
