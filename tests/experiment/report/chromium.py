"""Headless Chromium, driven over a pipe with its own protocol: no driver and no package needed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PHONE, DESKTOP = 390, 1280


def executable() -> str | None:
    """Chromium as this machine has it; the variable says which, where there are several."""
    named = os.environ.get("PAGEAHEAD_TEST_CHROMIUM")
    return named or next(filter(None, map(shutil.which, NAMES)), None)


@dataclass
class Browser:
    """One tab.

    Attributes:
        errors: what was written to its console as an error, or raised by a page.
        addresses: whatever it wanted to load.
    """

    to: BinaryIO
    back: BinaryIO
    session: str = ""
    errors: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    _events: list[str] = field(default_factory=list)
    _last: int = 0

    def send(self, method: str, **parameters: object) -> dict[str, Any]:
        """Call a method and wait for its answer; what happens meanwhile is kept."""
        self._last += 1
        message: dict[str, object] = {"id": self._last, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        self.to.write(json.dumps(message).encode() + b"\0")
        self.to.flush()
        while True:
            answer = self._receive()
            if answer.get("id") == self._last:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, path: Path, *, width: int, scheme: str = "light", media: str = "") -> None:
        """Show a file without a network, as wide as a screen, and wait until it is there."""
        self.errors.clear()
        self.addresses.clear()
        self._events.clear()
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=844,
            deviceScaleFactor=1,
            mobile=width <= PHONE,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", media=media, features=features)
        self.send("Page.navigate", url=path.resolve().as_uri())
        while "Page.loadEventFired" not in self._events:
            self._receive()

    def evaluate(self, expression: str) -> Any:
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self) -> bytes:
        """The whole page, as PNG."""
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def pdf(self) -> bytes:
        printed = self.send("Page.printToPDF", printBackground=True, preferCSSPageSize=True)
        return base64.b64decode(printed["data"])

    def _receive(self) -> dict[str, Any]:
        received = bytearray()
        while not received.endswith(b"\0"):
            letter = self.back.read(1)
            assert letter, "Chromium has ended"
            received += letter
        message: dict[str, Any] = json.loads(received[:-1])
        self._keep(message.get("method", ""), message.get("params", {}))
        return message

    def _keep(self, method: str, parameters: dict[str, Any]) -> None:
        self._events.append(method)
        if method == "Network.requestWillBeSent":
            self.addresses.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.errors.append(str(parameters))
        elif method == "Log.entryAdded":
            self.errors.append(f"{parameters['entry']['level']}: {parameters['entry']['text']}")


#: Becomes Chromium, which reads commands from descriptor 3 and answers on 4.
BECOME = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""


@contextmanager
def running(program: str, folder: Path) -> Iterator[Browser]:
    """Chromium with one tab, offline, its profile in a folder."""
    read_command, write_command = _pipe()
    read_answer, write_answer = _pipe()
    words = [
        program,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--no-first-run",
        "--hide-scrollbars",
        f"--user-data-dir={folder}",
        "--remote-debugging-pipe",
        "about:blank",
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", BECOME, str(read_command), str(write_answer), *words],
        pass_fds=(read_command, write_answer),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read_command)
    os.close(write_answer)
    try:
        with open(write_command, "wb") as to, open(read_answer, "rb", buffering=1 << 16) as back:
            browser = Browser(to, back)
            target = browser.send("Target.createTarget", url="about:blank")["targetId"]
            attached = browser.send("Target.attachToTarget", targetId=target, flatten=True)
            browser.session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                browser.send(f"{domain}.enable")
            browser.send(
                "Network.emulateNetworkConditions",
                offline=True,
                latency=0,
                downloadThroughput=0,
                uploadThroughput=0,
            )
            yield browser
            browser.session = ""
            browser.send("Browser.close")
        process.wait(timeout=20)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _pipe() -> tuple[int, int]:
    """Its ends are neither 3 nor 4."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]
