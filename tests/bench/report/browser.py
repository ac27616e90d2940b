"""A headless Chromium, driven through chromedriver's own protocol (W3C WebDriver)."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_S = 60.0


def missing() -> str | None:
    """Returns which program is not there, None where both are."""
    wanted = [("chromium", "google-chrome", "chrome"), ("chromedriver",)]
    absent = [names[0] for names in wanted if not any(shutil.which(name) for name in names)]
    return f"not installed: {', '.join(absent)}" if absent else None


class Browser:
    """One window."""

    def __init__(self, address: str, session: str) -> None:
        self._root = f"{address}/session/{session}"
        self._features: list[dict[str, str]] = []

    def open(self, path: Path, fragment: str = "") -> None:
        """Opens a file anew, with what comes after its `#`, and waits until it is loaded."""
        self.visit(path.resolve().as_uri() + fragment)

    def visit(self, address: str) -> None:
        """Opens an address anew."""
        self._post("/url", url="about:blank")
        self._post("/url", url=address)

    @contextmanager
    def before_pages(self, script: str) -> Iterator[None]:
        """Runs a script in every page before its own, as long as the context lasts."""
        added = self._post(
            "/goog/cdp/execute",
            cmd="Page.addScriptToEvaluateOnNewDocument",
            params={"source": script},
        )
        yield
        self._post(
            "/goog/cdp/execute",
            cmd="Page.removeScriptToEvaluateOnNewDocument",
            params={"identifier": added["identifier"]},
        )

    def resize(self, width: int, height: int) -> None:
        """Makes the page this wide: an emulated screen, since windows have a least width."""
        self._post(
            "/goog/cdp/execute",
            cmd="Emulation.setDeviceMetricsOverride",
            params={
                "width": width,
                "height": height,
                "deviceScaleFactor": 1,
                "mobile": width < 600,
            },
        )

    def paper(self, on: bool) -> None:
        """Lays the page out as for A4 paper between margins of 12 mm, or for the screen again."""
        if on:
            self.resize(703, 1032)
        self._post(
            "/goog/cdp/execute",
            cmd="Emulation.setEmulatedMedia",
            params={"media": "print" if on else "", "features": self._features},
        )

    def colour_scheme(self, name: str) -> None:
        """Makes the page believe that the reader prefers `light` or `dark`."""
        self._features = [{"name": "prefers-color-scheme", "value": name}]
        self._post(
            "/goog/cdp/execute",
            cmd="Emulation.setEmulatedMedia",
            params={"features": self._features},
        )

    def run(self, script: str, *arguments: object) -> Any:
        """Runs a script in the page and returns what it returns."""
        return self._post("/execute/sync", script=script, args=list(arguments))

    def wait(self, script: str, seconds: float = 30.0) -> Any:
        """Runs a script until it returns something true, and returns that."""
        end = time.monotonic() + seconds
        while True:
            found = self.run(script)
            if found or time.monotonic() > end:
                return found
            time.sleep(0.1)

    def console(self) -> list[str]:
        """Returns what the page has written to the console since the last call."""
        return [entry["message"] for entry in self._post("/se/log", type="browser")]

    def screenshot(self, path: Path) -> None:
        """Writes a picture of the whole page."""
        shot = self._post(
            "/goog/cdp/execute",
            cmd="Page.captureScreenshot",
            params={"format": "png", "captureBeyondViewport": True},
        )
        path.write_bytes(base64.b64decode(shot["data"]))

    def _post(self, place: str, **body: Any) -> Any:
        return request(f"{self._root}{place}", body)


@contextmanager
def browser(folder: Path, flags: Sequence[str] = ("--disable-gpu",)) -> Iterator[Browser]:
    """Yields a browser whose driver logs to a folder; both programs end with it."""
    log = folder / "chromedriver.log"
    driver = subprocess.Popen(
        ["chromedriver", "--port=0"], stdout=log.open("w"), stderr=subprocess.STDOUT
    )
    try:
        address = f"http://127.0.0.1:{_port(log)}"
        options = {"args": ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", *flags]}
        always = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = request(f"{address}/session", {"capabilities": {"alwaysMatch": always}})
        try:
            yield Browser(address, session["sessionId"])
        finally:
            request(f"{address}/session/{session['sessionId']}", None, method="DELETE")
    finally:
        driver.terminate()
        driver.wait(timeout=30)


def _port(log: Path) -> int:
    """The port that the driver has chosen, from what it prints."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        for word in log.read_text(encoding="utf-8", errors="replace").split("on port ")[1:]:
            digits = word.split()[0].strip(".")
            if digits.isdigit() and digits != "0":
                return int(digits)
        time.sleep(0.05)
    raise TimeoutError(f"chromedriver did not start: {log.read_text(encoding='utf-8')}")


def request(address: str, body: dict[str, Any] | None, *, method: str = "POST") -> Any:
    """Sends a command; returns its value, and raises RuntimeError with what the driver says."""
    data = None if body is None else json.dumps(body).encode()
    sent = urllib.request.Request(
        address, data, {"Content-Type": "application/json"}, method=method
    )
    try:
        with urllib.request.urlopen(sent, timeout=120) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(error.read().decode(errors="replace")) from None
