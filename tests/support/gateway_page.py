"""What the tests of the page share: how to run something, and how to read what is shown."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support import chromium
from tests.support.chromium import Page

CHROMIUM = chromium.found()
NEEDS = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium"),
]
FAULTS = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")


# The page lets nobody write to the bundled pair, which captions only; its tests do, for want of a text pair.
TEXT = (
    "(choice => { choice.disabled = false; choice.click(); })(document.querySelector('input[name=kind][value=text]'))"
)


def run(page: Page, prompt: str) -> None:
    """Write a prompt and press Run."""
    page.evaluate(TEXT)
    page.evaluate(f"document.getElementById('prompt').value = {json.dumps(prompt)}")
    page.evaluate("document.getElementById('run').click()")


def status(page: Page) -> str:
    return str(page.evaluate("document.getElementById('status').textContent"))


def strip(page: Page) -> str:
    """The text of the first run that is shown; a token without text counts as none."""
    return str(page.evaluate("[...document.querySelectorAll('.strip')][0].textContent")).replace("◌", "")


def tip(page: Page) -> str | None:
    text: str | None = page.evaluate("(t => t.hidden ? null : t.innerText)(document.getElementById('tip'))")
    return text


def faults(page: Page) -> list[dict[str, Any]]:
    """Exceptions, messages on the console, and violations of the Content-Security-Policy."""
    return [event for event in page.events if event.get("method") in FAULTS]
