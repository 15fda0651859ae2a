"""Take a picture of the gateway's page in headless Chromium, after a comparison on a bundled recording.

    python -m tools.page_picture docs/images/page.png

Chromium must be installed (`apt-get install chromium`).
"""

from __future__ import annotations

import sys
from base64 import b64decode
from pathlib import Path

from tests.support.chromium import browsing, found
from tests.support.gateway_process import edge

WIDTH, HEIGHT = 1280, 858  # pixels of the part that is saved
CLIP = 0  # in English
DONE = "document.getElementById('output').getAttribute('aria-busy') === 'false'"
SECONDS = 120.0


def main(out: Path) -> None:
    """Start a gateway, compare the three modes on one recording, and save the picture.

    Raises:
        SystemExit: there is no Chromium.
    """
    browser = found()
    if browser is None:
        raise SystemExit("no Chromium found; install it with: apt-get install chromium")
    with edge("--net", "rtt=50ms") as (url, _), browsing(browser) as page:
        page.open(f"{url}/", WIDTH)
        page.until("document.querySelectorAll('.clip').length === 12", SECONDS)
        page.evaluate(f"document.querySelectorAll('.clip')[{CLIP}].click()")
        page.until("document.querySelector('.verdict') && !document.querySelector('.verdict').hidden", SECONDS)
        page.until(DONE, SECONDS)
        page.evaluate("document.getElementById('compare').click()")
        page.until("document.querySelectorAll('.panel').length === 3", SECONDS)
        page.until(DONE, SECONDS)
        page.evaluate("document.getAnimations().forEach(one => one.finish())")
        page.evaluate("window.scrollTo(0, 0)")
        part = {"x": 0, "y": 0, "width": WIDTH, "height": HEIGHT, "scale": 1}
        out.write_bytes(b64decode(page.call("Page.captureScreenshot", clip=part)["data"]))
    print(f"{out}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
