"""A headless Chromium over its debugging pipe: no driver, no port."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"),
    "--remote-debugging-pipe",
)
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
TEXTS = {"Enter": "\r", " ": " "}
# Chromium reads commands from descriptor 3 and answers on 4.
START = """import fcntl, os, sys
read, write = (fcntl.fcntl(int(word), fcntl.F_DUPFD, 100) for word in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])"""

# JavaScript: contrast(element), of a text with what is behind it, as WCAG defines it.
CONTRAST = """
      const linear = x => x <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4;
      const light = c => { const v = c.map(x => linear(x / 255));
        return .2126 * v[0] + .7152 * v[1] + .0722 * v[2]; };
      const parse = c => c.match(/[\\d.]+/g).map(Number);
      const behind = one => {
        const c = parse(getComputedStyle(one).backgroundColor);
        return c.length < 4 || c[3] > 0 ? c.slice(0, 3) : behind(one.parentElement); };
      const contrast = one => {
        const a = light(parse(getComputedStyle(one).color).slice(0, 3)), b = light(behind(one));
        return (Math.max(a, b) + .05) / (Math.min(a, b) + .05); };
"""


def found() -> str | None:
    """Where a Chromium is, if there is one."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for name in names if (path := shutil.which(name))), None)


class Page:
    """One tab. events: what it told about itself, since it was opened."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._read, self._count, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.bringToFront")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._count:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            more = os.read(self._back, 1 << 16)
            if not more:
                raise RuntimeError("the browser has ended")
            self._read += more
        line, _, self._read = self._read.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def open(self, at: Path | str, width: int, *, dark: bool = False) -> None:
        """Show a file, or an address, at this width, and wait until it is loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        url = at.resolve().as_uri() if isinstance(at, Path) else at
        self.call("Page.navigate", url=url)
        self.until(f"document.readyState == 'complete' && location.href.startsWith({json.dumps(url)})")

    def until(self, expression: str, seconds: float = 300.0) -> None:
        """Wait until an expression is true.

        Raises:
            RuntimeError: it was not true in time.
        """
        deadline = time.monotonic() + seconds
        while not self.evaluate(expression):
            if time.monotonic() > deadline:
                raise RuntimeError(f"still not true after {seconds:g} s: {expression}")
            time.sleep(0.02)  # the pause of a poll

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def press(self, key: str, *, ctrl: bool = False) -> None:
        code = KEYS[key]
        text = {"text": TEXTS[key]} if key in TEXTS and not ctrl else {}
        for kind in ("keyDown", "keyUp"):
            more: dict[str, Any] = {**(text if kind == "keyDown" else {}), "modifiers": 2 if ctrl else 0}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def upload(self, selector: str, file: Path) -> None:
        """Choose a file as a person does in the dialogue of an input."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", files=[str(file.resolve())], nodeId=node)

    def hover(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def shoot(self, path: Path, *, whole: bool = True) -> None:
        """Save a picture of the whole page, or of what is in view."""
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=whole, **(self._clip() if whole else {}))
        path.write_bytes(b64decode(picture["data"]))

    def _clip(self) -> dict[str, Any]:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 8000), "scale": 1}}


@contextmanager
def browsing(executable: str, *flags: str) -> Iterator[Page]:
    """A page of a browser that ends with the block, and leaves no profile behind."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        start = [sys.executable, "-S", "-c", START, str(theirs_in), str(theirs_out)]
        child = subprocess.Popen(
            [*start, executable, *FLAGS, *flags, f"--user-data-dir={profile}"],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            page = Page(ours_out, ours_in)
            yield page
        finally:
            os.close(ours_out)  # without its pipe the browser ends
            os.close(ours_in)
            try:
                child.wait(timeout=10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def shoot(report: Path, out: Path) -> None:
    """Pictures of a report at both widths, in both themes."""
    executable = found()
    assert executable, "no Chromium here"
    with browsing(executable) as page:
        for width in (1280, 390):
            for dark in (False, True):
                page.open(report, width, dark=dark)
                page.shoot(out / f"report-{width}-{'dark' if dark else 'light'}.png")


if __name__ == "__main__":
    shoot(Path(sys.argv[1]), Path(sys.argv[2]))
