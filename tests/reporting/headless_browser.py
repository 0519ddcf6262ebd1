"""A headless Chromium, driven over the W3C WebDriver protocol by the standard library alone."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
MISSING = "needs chromium and chromedriver (Debian: apt install chromium chromium-driver)"
ARGUMENTS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
]


class Browser:
    """One session; `close` ends it and its driver."""

    def __init__(self, profile: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.root = f"http://127.0.0.1:{port}"
        self.driver = subprocess.Popen(
            [str(DRIVER), f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        options = {"binary": CHROMIUM, "args": [*ARGUMENTS, f"--user-data-dir={profile}"]}
        wanted = {
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        self._wait_for_driver()
        session = self._send("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.session = f"/session/{session['sessionId']}"

    def close(self) -> None:
        try:
            self._send("DELETE", self.session)
        finally:
            self.driver.terminate()
            self.driver.wait(10)

    def open(self, url: str) -> None:
        self._send("POST", f"{self.session}/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Value of a script's `return`; a promise is awaited."""
        body = {"script": script, "args": list(arguments)}
        return self._send("POST", f"{self.session}/execute/sync", body)

    def command(self, name: str, **parameters: Any) -> Any:
        """A command of Chrome's own protocol, as `Emulation.setEmulatedMedia`."""
        body = {"cmd": name, "params": parameters}
        return self._send("POST", f"{self.session}/goog/cdp/execute", body)

    def resize(self, width: int, height: int = 1200) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def dark(self, on: bool) -> None:
        value = "dark" if on else "light"
        feature = {"name": "prefers-color-scheme", "value": value}
        self.command("Emulation.setEmulatedMedia", features=[feature])

    def move_to(self, x: float, y: float) -> None:
        self.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        if whole:
            height = self.run("return document.documentElement.scrollHeight")
            width = self.run("return window.innerWidth")
            self.resize(width, min(int(height), 12000))
            time.sleep(1.5)
        path.write_bytes(base64.b64decode(self._send("GET", f"{self.session}/screenshot")))

    def wait(self, condition: str, seconds: float = 20) -> None:
        """Until the expression is true; TimeoutError otherwise."""
        end = time.monotonic() + seconds
        while not self.run(f"return Boolean({condition})"):
            if time.monotonic() > end:
                raise TimeoutError(condition)
            time.sleep(0.05)

    def errors(self) -> list[str]:
        """What went to the console as an error, since the last call."""
        entries = self._send("POST", f"{self.session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def requests(self) -> list[str]:
        """Addresses that the page asked for, since the last call; data and blob ones left out."""
        entries = self._send("POST", f"{self.session}/se/log", {"type": "performance"})
        messages = [json.loads(entry["message"])["message"] for entry in entries]
        urls = [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in urls if not url.startswith(("data:", "blob:"))]

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.root + path, content, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise RuntimeError(json.load(error)["value"]["message"]) from error

    def _wait_for_driver(self) -> None:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            try:
                self._send("GET", "/status")
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.05)
        raise TimeoutError("chromedriver does not answer")
