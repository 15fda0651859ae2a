"""The page in a real browser, before a gateway that plays a script: broken streams, refusals, what is not there."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import chromium
from tests.support.chromium import Page
from tests.support.fake_gateway import Script, StandIn, ended, standing_in, token, tokens
from tests.support.gateway_page import CHROMIUM, NEEDS, faults, shown_text, status, submit_prompt, tooltip
from tests.support.processes import HANG_S

pytestmark = NEEDS


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    assert CHROMIUM is not None
    with chromium.browsing(CHROMIUM) as page:
        yield page


@pytest.fixture(scope="module")
def server() -> Iterator[StandIn]:
    with standing_in() as server:
        yield server


def play(page: Page, server: StandIn, script: Script, *, width: int = 1280) -> Script:
    """Show the page of a gateway with this script, and run a prompt."""
    server.script = script
    page.open(server.url, width)
    page.until("document.getElementById('version').textContent")
    submit_prompt(page, "Hello")
    return script


def text(pieces: list[str], source: str = "accepted") -> list[dict[str, Any]]:
    return [token("confirmed", n, piece, source) for n, piece in enumerate(pieces)]


def wait(page: Page, word: str) -> None:
    page.until(f"document.getElementById('status').textContent.startsWith({json.dumps(word)})")


@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"])
def test_a_stream_may_be_cut_anywhere(page: Page, server: StandIn, size: int, ending: bytes) -> None:
    pieces = ["社区", " 삼겹살", "👩\u200d💻", " é\n", "end"]
    whole = (b": a comment\n\n" + tokens(*text(pieces)) + ended()).replace(b"\n", ending)
    play(page, server, Script([whole[at : at + size] for at in range(0, len(whole), size)]))
    wait(page, "Done")
    assert shown_text(page) == "".join(pieces)
    assert faults(page) == []


def test_a_revised_token_voids_what_is_behind_it(page: Page, server: StandIn) -> None:
    drafts = [token("provisional", n, f" w{n}", "edge") for n in range(5)]
    verdict = [token("confirmed", 0, " w0", "accepted"), token("revised", 1, " new", "correction", signals=None)]
    play(page, server, Script([tokens(*drafts), tokens(*verdict), ended()]))
    wait(page, "Done")
    assert shown_text(page) == " w0 new"
    page.evaluate("document.querySelector('.strip .c').focus()")
    assert "the edge had drafted “ w1”" in (tooltip(page) or "")
    assert "corrected by the cloud" in (tooltip(page) or "")
    assert "entropy 0.100" in (tooltip(page) or "")


def test_a_repair_takes_back_what_was_confirmed(page: Page, server: StandIn) -> None:
    repaired = tokens(token("revised", 1, " new", "correction", signals=None))
    play(page, server, Script([tokens(*text([" w0", " w1", " w2", " w3"], "edge")), repaired, ended()], pause=0.3))
    page.until("document.querySelectorAll('.strip .c').length === 1")
    assert shown_text(page) == " w0 new", "at once, not only at the end"
    wait(page, "Done")
    assert shown_text(page) == " w0 new"
    assert "The cloud decided 1 of 2 tokens" in page.evaluate("document.querySelector('.share p').textContent")


def test_drafts_are_faint_until_they_are_decided(page: Page, server: StandIn) -> None:
    drafts = [token("provisional", n, f" w{n}", "edge") for n in range(3)]
    kept = [token("confirmed", n, f" w{n}", "accepted") for n in range(2)]
    play(page, server, Script([tokens(*drafts), tokens(*kept), ended()], pause=0.4))
    page.until("document.querySelectorAll('.strip .p').length === 3")
    page.until("document.querySelectorAll('.strip .a').length === 2")
    wait(page, "Done")
    assert shown_text(page) == " w0 w1", "what is still provisional at the end is void"


def test_an_error_in_mid_stream_is_shown_and_the_text_stays(page: Page, server: StandIn) -> None:
    error = {"message": "the cloud does not answer", "type": "cloud_error", "param": None, "code": None}
    broken = b"data: " + json.dumps({"error": error}).encode() + b"\n\n"
    play(page, server, Script([tokens(*text(["so", " far"])), broken]))
    wait(page, "the cloud does not answer")
    assert page.evaluate("document.querySelector('.fault').textContent") == "the cloud does not answer"
    assert shown_text(page) == "so far"
    assert page.evaluate("document.getElementById('stop').getAttribute('aria-disabled')") == "true"


def test_a_stream_that_ends_too_early_is_no_answer(page: Page, server: StandIn) -> None:
    play(page, server, Script([tokens(*text(["so"]))]))
    wait(page, "The stream ended before the text was complete")
    assert page.evaluate("document.querySelector('.verdict').hidden")


@pytest.mark.parametrize(
    ("status_", "headers", "said"),
    [
        (400, {}, "outrider.gate: no such gate"),
        (413, {}, "outrider.gate: no such gate"),
        (429, {"Retry-After": "3"}, "outrider.gate: no such gate. Try again in 3 s."),
    ],
)
def test_a_refusal_is_shown_as_a_sentence(
    page: Page, server: StandIn, status_: int, headers: dict[str, str], said: str
) -> None:
    error = {"message": "no such gate", "type": "invalid_request_error", "param": "outrider.gate", "code": None}
    play(page, server, Script(status=status_, error=error, headers=headers))
    wait(page, said)


def test_a_key_is_asked_for_only_when_it_is_needed(page: Page, server: StandIn) -> None:
    server.script = Script([tokens(*text(["in"])), ended()], key="sesame")
    page.open(server.url, 1280)
    page.until("!document.getElementById('key-form').hidden")
    assert page.evaluate("document.activeElement.id") == "key"
    page.type("sesame")
    page.press("Enter")
    page.until("document.getElementById('key-form').hidden")
    submit_prompt(page, "Hello")
    wait(page, "Done")
    assert shown_text(page) == "in"
    assert page.evaluate("Object.keys(localStorage).length + Object.keys(sessionStorage).length") == 0


def test_a_key_that_is_no_longer_taken_is_asked_for_again(page: Page, server: StandIn) -> None:
    script = play(page, server, Script([tokens(*text(["in"])), ended()], audio=True))
    wait(page, "Done")
    script.key, script.status, script.error = "sesame", 401, {"message": "This key is not known.", "param": None}
    submit_prompt(page, "Hello")
    wait(page, "This key is not known.")
    script.status = 200
    page.evaluate("document.getElementById('key').focus()")
    page.type("sesame")
    page.press("Enter")
    page.until("document.getElementById('key-form').hidden")
    submit_prompt(page, "Hello")
    wait(page, "Done")
    assert page.evaluate("document.getElementById('max-tokens').value") == "99", "as the gateway was started"
    assert faults(page)[-1]["params"]["entry"]["text"].startswith("Failed to load resource"), "the 401 alone"


def test_what_cannot_work_is_disabled_and_says_why(page: Page, server: StandIn) -> None:
    play(page, server, Script([tokens(*text(["alone"], "edge")), ended()], cloud="none"))
    wait(page, "Done")
    disabled = "[...document.querySelectorAll(':disabled')].map(one => one.value || one.id)"
    assert {"audio", "speculative", "cloud-only"} <= set(page.evaluate(disabled))
    assert page.evaluate("['gate', 'rtt', 'cut', 'compare'].every(id => document.getElementById(id).disabled)")
    reasons = page.evaluate("[...document.querySelectorAll('.reason:not([hidden])')].map(one => one.textContent)")
    assert "This gateway's model takes no recordings." in reasons
    assert "This gateway was started without a cloud: the edge writes alone." in reasons
    asked = server.script.asked[0]["outrider"]
    assert (asked["way"], asked["gate"]) == ("edge-only", "always")


def test_without_an_edge_the_options_of_drafting_are_empty_and_say_why(page: Page, server: StandIn) -> None:
    play(page, server, Script([tokens(*text(["alone"])), ended()], edge="none"))
    wait(page, "Done")
    assert page.evaluate("['gate', 'k', 'driver', 'compare'].every(id => document.getElementById(id).disabled)")
    reasons = page.evaluate("[...document.querySelectorAll('.reason:not([hidden])')].map(one => one.textContent)")
    assert "This gateway was started without an edge model: the cloud writes alone." in reasons
    assert "These are about edge and cloud together, which this gateway cannot run." in reasons
    asked = server.script.asked[0]["outrider"]
    assert (asked["way"], asked["net"], "k" in asked) == ("cloud-only", "none", False)
    assert faults(page) == []


def test_the_line_is_red_while_the_gateway_says_that_the_cloud_is_away(page: Page, server: StandIn) -> None:
    play(page, server, Script([tokens(*text(["in"])), ended()], trouble="the cloud process ended"))
    page.until("document.getElementById('path').dataset.state === 'away'")
    assert page.evaluate("document.getElementById('path-net').title") == "the cloud process ended"
    server.script.trouble = ""
    page.until("document.getElementById('path').dataset.state === 'up'")


def test_a_cable_that_cannot_be_cut_is_not_offered(page: Page, server: StandIn) -> None:
    play(page, server, Script([tokens(*text(["in"])), ended()], cut=False))
    wait(page, "Done")
    assert page.evaluate("document.getElementById('cut').disabled && !document.getElementById('rtt').disabled")
    reason = page.evaluate("document.getElementById('network-reason').textContent")
    assert reason == "The cable can only be cut to one of Outrider's clouds."


def test_a_risk_budget_says_of_what(page: Page, server: StandIn) -> None:
    risk = {"budget": 0.05, "loss": "outputs", "audited": 0, "disagreed": 0, "estimate": None}
    play(page, server, Script([tokens(*text(["in"])), ended(risk=risk)]))
    wait(page, "Done")
    said = page.evaluate("document.querySelector('.warnings').textContent")
    assert said == "risk budget 5.0 % of all outputs; no audit yet"


def test_a_double_click_opens_one_microphone_and_it_is_closed(page: Page, server: StandIn) -> None:
    server.script = Script(audio=True)
    page.open(server.url, 1280)
    page.until("document.getElementById('version').textContent")
    page.evaluate("""(() => { window.opened = 0; window.stopped = 0;
        navigator.mediaDevices.getUserMedia = () => new Promise((resolve) => { window.opened += 1;
            setTimeout(() => resolve({ getTracks: () => [{ stop: () => { window.stopped += 1; } }] }), 100); });
        window.MediaRecorder = class { start() {} stop() { this.onstop(); } }; })()""")
    page.evaluate("document.getElementById('record').click(); document.getElementById('record').click()")
    page.until("document.getElementById('record').textContent.startsWith('Stop')")
    page.evaluate("document.getElementById('record').click()")
    page.until("document.getElementById('record').textContent === 'Record'")
    page.evaluate("new Promise((resolve) => setTimeout(resolve, 200))")
    assert page.evaluate("[window.opened, window.stopped]") == [1, 1]


def test_escape_stops_and_the_gateway_sees_it(page: Page, server: StandIn) -> None:
    pieces = [tokens(token("confirmed", n, f" {n}", "edge")) for n in range(2000)]
    script = play(page, server, Script([*pieces, ended()], pause=0.005))
    page.until("document.querySelectorAll('.strip .t').length > 20")
    page.press("Escape")
    wait(page, "Stopped")
    assert script.left.wait(HANG_S)
    assert len(shown_text(page)) > 20


def test_another_run_stops_the_one_before(page: Page, server: StandIn) -> None:
    pieces = [tokens(token("confirmed", n, " old", "edge")) for n in range(2000)]
    first = play(page, server, Script([*pieces, ended()], pause=0.005))
    page.until("document.querySelectorAll('.strip .t').length > 5")
    server.script = Script([tokens(*text(["new"])), ended()])
    submit_prompt(page, "Again")
    wait(page, "Done")
    assert shown_text(page) == "new"
    assert first.left.wait(HANG_S)


def test_thousands_of_tokens_stay_fluid(page: Page, server: StandIn) -> None:
    pieces = [tokens(*[token("confirmed", 5 * n + m, f" {m}", "accepted") for m in range(5)]) for n in range(1000)]
    server.script = Script([*pieces, ended()])
    page.open(server.url, 1280)
    page.until("document.getElementById('version').textContent")
    page.evaluate("""(() => { window.gap = 0; let last = performance.now();
        (function frame() { const now = performance.now(); window.gap = Math.max(window.gap, now - last); last = now;
        requestAnimationFrame(frame); })(); })()""")
    submit_prompt(page, "Hello")
    wait(page, "Done")
    assert page.evaluate("document.querySelectorAll('.strip .t').length") == 5000
    assert page.evaluate("window.gap") < 1000, "ms between two frames, on a machine that others use too"


def test_a_piece_is_text_and_nothing_else(page: Page, server: StandIn) -> None:
    pieces = ["</script><script>window.hacked = 1</script>", '<img src=x onerror="window.hacked = 1">', "", "w" * 300]
    play(page, server, Script([tokens(*text(pieces)), ended(warnings=["<b>bold</b>"])]), width=390)
    wait(page, "Done")
    assert page.evaluate("typeof window.hacked") == "undefined"
    assert page.evaluate("document.querySelector('.warnings').textContent") == "<b>bold</b>"
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert faults(page) == []


def test_a_lost_gateway_is_shown(page: Page) -> None:
    with standing_in() as server:
        page.open(server.url, 1280)
        page.until("document.getElementById('version').textContent")
    submit_prompt(page, "Hello")
    wait(page, "The gateway cannot be reached")
    assert "Is outrider edge still running?" in status(page)


def test_columns_that_fail_leave_the_others(page: Page, server: StandIn) -> None:
    script = Script([tokens(*text(["one", " two", " three"])), ended()])
    server.script = script
    page.open(server.url, 1280)
    page.until("document.getElementById('version').textContent")

    def fail_the_first() -> None:
        while not script.asked:
            pass
        script.status, script.error = 200, None

    script.status, script.error = 503, {"message": "the cloud is away", "type": "cloud_error"}
    watcher = threading.Thread(target=fail_the_first, daemon=True)
    watcher.start()
    page.evaluate("document.getElementById('prompt').value = 'Hello'; document.getElementById('compare').click()")
    wait(page, "Done")
    watcher.join()
    ways = [asked["outrider"]["way"] for asked in script.asked]
    assert ways == ["cloud-only", "edge-only", "speculative"]
    assert page.evaluate("document.querySelectorAll('#panels .verdict:not([hidden])').length") >= 1
