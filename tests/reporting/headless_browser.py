"""A headless Chromium, driven over the W3C WebDriver protocol by the standard library alone."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
MISSING = "needs chromium and chromedriver (Debian: apt install chromium chromium-driver)"
ARGUMENTS = [
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--force-device-scale-factor=1", "--disable-dev-shm-usage"),
]


class Browser:
    """One session; `close` ends it, its driver and the browser, also those that answer no more."""

    def __init__(self, profile: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.root = f"http://127.0.0.1:{port}"
        self.driver = subprocess.Popen(
            [str(DRIVER), f"--port={port}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a group that holds the browser's processes too
        )
        options = {"binary": CHROMIUM, "args": [*ARGUMENTS, f"--user-data-dir={profile}"]}
        wanted = {
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        _wait("chromedriver", self._answers)
        session = self._send("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.session = f"/session/{session['sessionId']}"

    def close(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self._send("DELETE", self.session, timeout=10)
        os.killpg(self.driver.pid, signal.SIGKILL)
        self.driver.wait(10)

    def open(self, url: str) -> None:
        self._send("POST", f"{self.session}/url", {"url": url})

    def run(self, script: str) -> Any:
        """Runs a script and returns its value; a promise is awaited."""
        body = {"script": script, "args": []}
        return self._send("POST", f"{self.session}/execute/sync", body)

    def wait(self, condition: str) -> None:
        """Waits until the expression is true; raises TimeoutError otherwise."""
        _wait(condition, lambda: self.run(f"return Boolean({condition})"))

    def command(self, name: str, **parameters: Any) -> Any:
        """A command of Chrome's own protocol, as `Emulation.setEmulatedMedia`."""
        body = {"cmd": name, "params": parameters}
        return self._send("POST", f"{self.session}/goog/cdp/execute", body)

    def resize(self, width: int) -> None:
        size = {"width": width, "height": 1200, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", **size)

    def dark(self, on: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        self.command("Emulation.setEmulatedMedia", features=[feature])

    def move_to(self, x: float, y: float) -> None:
        self.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def errors(self) -> list[str]:
        """Errors on the console since the last call."""
        entries = self._send("POST", f"{self.session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def requests(self) -> list[str]:
        """Addresses that the page requested since the last call, without data and blob URLs."""
        entries = self._send("POST", f"{self.session}/se/log", {"type": "performance"})
        messages = [json.loads(entry["message"])["message"] for entry in entries]
        urls = [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in urls if not url.startswith(("data:", "blob:"))]

    def _send(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout: float = 60
    ) -> Any:
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.root + path, content, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise RuntimeError(json.load(error)["value"]["message"]) from error

    def _answers(self) -> bool:
        try:
            return bool(self._send("GET", "/status"))
        except (urllib.error.URLError, ConnectionError):
            return False


def _wait(what: str, is_there: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not is_there():
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.05)
