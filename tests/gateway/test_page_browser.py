"""The page in a real browser, before a real gateway with the bundled pair: what a person does with it, and sees."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from outrider.engines.load import BUNDLED
from tests.support import chromium
from tests.support.chromium import Page
from tests.support.gateway_page import CHROMIUM, NEEDS, TEXT, faults, shown_text, status, submit_prompt, tooltip

pytestmark = NEEDS
MICROPHONE = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")  # it beeps


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    assert CHROMIUM is not None
    with chromium.browsing(CHROMIUM, *MICROPHONE) as page:
        yield page


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, "-m", "outrider", "edge", "--listen", "127.0.0.1:0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["listening"] + "/"
    finally:
        process.terminate()
        process.wait(timeout=300)
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def fresh(page: Page, url: str) -> Page:
    show(page, url)
    return page


def show(page: Page, url: str, width: int = 1280, *, dark: bool = False) -> None:
    page.open(url, width, dark=dark)
    page.until("document.querySelectorAll('.clip').length === 12")


def put(page: Page, name: str, value: str) -> None:
    """Set a control as a person does: with the event that tells the page."""
    page.evaluate(f"""(one => {{ one.value = {json.dumps(value)};
        one.dispatchEvent(new Event('input', {{ bubbles: true }})); }})(document.getElementById('{name}'))""")


def press(page: Page, name: str) -> None:
    page.evaluate(f"document.getElementById('{name}').click()")


def caption(page: Page, clip: int = 0) -> None:
    page.evaluate(f"document.querySelectorAll('.clip')[{clip}].click()")


def wait(page: Page) -> str:
    """Until what runs has ended; the status in words."""
    page.until("document.getElementById('output').getAttribute('aria-busy') === 'false'")
    page.evaluate("document.getAnimations().forEach(one => one.finish())")  # colours fade in
    return status(page)


def asked(page: Page) -> list[dict[str, Any]]:
    """The bodies of the requests that were sent since the page was opened."""
    sent = [e["params"] for e in page.events if e.get("method") == "Network.requestWillBeSent"]
    posts = [one["requestId"] for one in sent if one["request"]["method"] == "POST"]
    return [json.loads(page.call("Network.getRequestPostData", requestId=one)["postData"]) for one in posts]


def text_of(page: Page, selector: str) -> str:
    return str(page.evaluate(f"document.querySelector('{selector}').innerText"))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_asked_of_others_and_nothing_fails(page: Page, url: str, width: int, dark: bool) -> None:
    show(page, url, width, dark=dark)
    caption(page)
    assert wait(page) == "Done"
    sent = [e["params"]["request"]["url"] for e in page.events if e.get("method") == "Network.requestWillBeSent"]
    assert sent
    assert all(one.startswith(url) for one in sent)
    assert faults(page) == []


def test_a_clip_is_captioned_by_a_click_and_streams(fresh: Page) -> None:
    put(fresh, "rtt", "100ms")
    caption(fresh)
    fresh.until("document.querySelectorAll('.strip .t:not(.p)').length > 0")
    assert fresh.evaluate("document.getElementById('output').getAttribute('aria-busy')") == "true"
    assert fresh.evaluate("document.querySelector('.verdict').hidden")
    assert wait(fresh) == "Done"
    assert len(shown_text(fresh)) > 20
    assert text_of(fresh, ".word") == "exact"
    assert shown_text(fresh).strip() in fresh.evaluate("document.getElementById('said').textContent")


def test_tokens_are_coloured_by_their_source(fresh: Page) -> None:
    put(fresh, "gate", "signal")
    put(fresh, "threshold", "0.3")
    caption(fresh)
    assert wait(fresh) == "Done"
    looks = fresh.evaluate("""[...document.querySelectorAll('.strip .t')].map(one => {
        const style = getComputedStyle(one);
        return [one.className.split(' ')[1], style.backgroundColor, style.textDecorationStyle]; })""")
    kinds = {kind for kind, _, _ in looks}
    assert {"e", "a"} <= kinds <= set("esacb")
    assert len({colour for _, colour, _ in looks}) == len({mark for *_, mark in looks}) == len(kinds)
    counts = {"edge, unverified": "e", "drafted, verified": "a", "corrected by the cloud": "c"}
    for name, kind in counts.items():
        shown = [one[0] for one in looks].count(kind)
        assert not shown or f"{shown} {name}" in text_of(fresh, ".share p")
    assert fresh.evaluate("document.querySelectorAll('.line .limit').length") == 1
    assert text_of(fresh, ".word") == "best-effort"


def test_changed_settings_apply_to_the_next_run(fresh: Page) -> None:
    submit_prompt(fresh, "Hello")
    wait(fresh)
    put(fresh, "gate", "signal")
    put(fresh, "signal", "margin")
    put(fresh, "threshold", "0.25")
    press(fresh, "trigger")
    put(fresh, "k", "auto")
    put(fresh, "driver", "pipelined")
    put(fresh, "rtt", "50ms")
    put(fresh, "bandwidth", "2Mbit")
    put(fresh, "max-tokens", "12")
    press(fresh, "again")
    assert wait(fresh) == "Done"
    before, after = asked(fresh)
    assert before["outrider"]["gate"] == "always"
    expected = {"gate": "trigger:margin:0.25", "k": "auto", "driver": "pipelined", "net": "rtt=50ms,bw=2Mbit"}
    assert {name: after["outrider"][name] for name in expected} == expected
    assert after["max_tokens"] == 12
    assert text_of(fresh, ".word") == "exact"


def test_with_the_cable_cut_the_edge_goes_on_alone(fresh: Page) -> None:
    press(fresh, "cut")
    state = "document.getElementById('path').dataset.state"
    assert fresh.evaluate(state) == "planned", "red is for a cloud that is away"
    caption(fresh)
    fresh.until(f"{state} === 'cut'")
    assert wait(fresh) == "Done"
    assert text_of(fresh, ".word") == "edge-only"
    assert "the edge went on alone" in text_of(fresh, ".meaning")
    assert "lost" in text_of(fresh, ".warnings")
    assert fresh.evaluate("document.querySelector('.gain').hidden")
    assert text_of(fresh, "#path-net") == "to be cut in the next run"
    assert fresh.evaluate("document.querySelectorAll('.strip .t:not(.e, .s)').length") == 0
    press(fresh, "cut")
    caption(fresh)
    assert wait(fresh) == "Done"
    assert text_of(fresh, ".word") == "exact", "plugged in again"


def test_cutting_the_cable_cuts_the_run_in_progress(fresh: Page) -> None:
    put(fresh, "rtt", "200ms")
    caption(fresh)
    fresh.until("document.querySelectorAll('.strip .t:not(.p)').length > 0")
    press(fresh, "cut")
    fresh.until("document.getElementById('path').dataset.state === 'cut'")
    assert wait(fresh) == "Done"
    assert "the edge went on alone" in text_of(fresh, ".meaning")
    kinds = fresh.evaluate("[...document.querySelectorAll('.strip .t')].map(one => one.classList[1])")
    assert kinds[0] not in ("e", "s"), "before the cut the cloud decided"
    assert kinds[-1] in ("e", "s")
    assert faults(fresh) == []


def test_the_gain_is_shown_in_one_sentence(fresh: Page) -> None:
    put(fresh, "gate", "signal")
    assert text_of(fresh, "#threshold-said") == "0.30", "the threshold that the documentation shows"
    caption(fresh)
    assert wait(fresh) == "Done"
    words = text_of(fresh, ".gain")
    escalated, blocks = (int(word) for word in text_of(fresh, ".meters .note").split()[::2][:2])
    assert 0 < escalated < blocks, "something happens"
    count = len(fresh.evaluate("[...document.querySelectorAll('.strip .t')].map(one => 1)"))
    assert f"{escalated} round trip" in words
    assert f"alone it takes {count} steps" in words


def test_the_three_ways_side_by_side(fresh: Page) -> None:
    caption(fresh)
    wait(fresh)
    put(fresh, "gate", "signal")
    put(fresh, "threshold", "0.3")
    press(fresh, "compare")
    assert wait(fresh) == "Done"
    titles = fresh.evaluate("[...document.querySelectorAll('.panel h3')].map(one => one.textContent)")
    assert titles == ["Edge alone", "Together, gate entropy:0.3", "Cloud alone"]
    words = fresh.evaluate("[...document.querySelectorAll('.word')].map(one => one.textContent)")
    assert words == ["edge-only", "best-effort", "exact"]
    columns = fresh.evaluate("""[...document.querySelectorAll('.panel')].map(one => [
        one.querySelectorAll('.t').length, one.querySelectorAll('.d').length,
        one.querySelector('.panel-state').innerText])""")
    for count, differs, said in columns[:2]:
        assert said == f"{count - differs} of {count} tokens as the cloud alone writes them"
    gains = fresh.evaluate("[...document.querySelectorAll('.gain')].map(one => one.hidden ? '' : one.innerText)")
    assert gains[0] == gains[2] == ""
    assert f"instead of {columns[2][0]} steps of the cloud; " in gains[1]
    assert columns[0][1] > 0, "the edge alone hears this clip otherwise"
    lefts = fresh.evaluate("[...document.querySelectorAll('.panel')].map(one => one.getBoundingClientRect().left)")
    assert lefts == sorted(set(lefts))


def test_a_column_that_fails_leaves_the_others(fresh: Page) -> None:
    press(fresh, "cut")
    caption(fresh)
    wait(fresh)
    press(fresh, "compare")
    assert wait(fresh) == "Done"
    failed = "[...document.querySelectorAll('.panel')].map(one => !one.querySelector('.fault').hidden)"
    assert fresh.evaluate(failed) == [False, False, True]


def test_an_error_is_shown_as_a_sentence(fresh: Page) -> None:
    put(fresh, "max-tokens", "1000000")
    caption(fresh)
    said = wait(fresh)
    assert "1000000" in said
    assert text_of(fresh, ".fault") == said
    put(fresh, "max-tokens", "")
    caption(fresh)
    assert wait(fresh) == "Most tokens is a number of 1 or more."
    put(fresh, "max-tokens", "8")
    put(fresh, "k", "65")
    caption(fresh)
    assert "k) is 1 to 64, or auto, not “65”" in wait(fresh)


def test_every_control_works_with_the_keyboard(fresh: Page) -> None:
    put(fresh, "max-tokens", "12")
    fresh.evaluate("document.querySelectorAll('.clip')[1].focus()")
    fresh.press("Enter")
    assert wait(fresh) == "Done"
    fresh.evaluate(TEXT)
    fresh.evaluate("document.getElementById('prompt').focus()")
    fresh.type("Hello")
    fresh.press("Enter", ctrl=True)
    assert wait(fresh) == "Done"
    assert asked(fresh)[-1]["messages"] == [{"role": "user", "content": "Hello"}]
    fresh.evaluate("document.getElementById('max-tokens').focus()")
    fresh.press("Enter")
    assert wait(fresh) == "Done"
    assert len(asked(fresh)) == 3
    put(fresh, "rtt", "500ms")
    fresh.press("Enter")
    fresh.press("Escape")
    assert wait(fresh) == "Stopped"


def test_every_stop_of_the_tab_key_has_a_name(fresh: Page) -> None:
    caption(fresh)
    wait(fresh)
    fresh.evaluate("document.activeElement.blur()")
    stops = []
    for _ in range(80):
        fresh.press("Tab")
        stops.append(
            fresh.evaluate("""(one => one === document.body ? '' : one.id || one.className
            || `${one.name}=${one.value}`)(document.activeElement).replace(' on', '')""")
        )
        if stops[-1] == "" and len(stops) > 1:
            break
    wanted = [
        "kind=audio",
        "play",
        "clip",
        "file",
        "record",
        "task",
        "run",
        "compare",
        "stop",
        "t c",
        "again",
        "gate",
        "k",
    ]
    places = [stops.index(one) for one in wanted]
    assert places == sorted(places)
    tree = fresh.call("Accessibility.getFullAXTree")["nodes"]
    controls = ("button", "combobox", "textbox", "slider", "checkbox", "switch", "radio", "spinbutton")
    shown = [node for node in tree if not node["ignored"] and node["role"]["value"] in controls]
    assert len(shown) > 40
    assert [node for node in shown if not node.get("name", {}).get("value")] == []


def test_a_token_s_tooltip_names_its_source(fresh: Page) -> None:
    caption(fresh)
    wait(fresh)
    fresh.evaluate("document.querySelector('.strip .t').focus()")
    assert (tooltip(fresh) or "").startswith("token 1, id ")
    assert "entropy" in (tooltip(fresh) or "")
    fresh.press("ArrowRight")
    assert (tooltip(fresh) or "").startswith("token 2, id ")
    assert fresh.evaluate("document.querySelectorAll('.line .cursor').length") == 1
    fresh.press("Escape")
    assert tooltip(fresh) is None
    x, y = fresh.evaluate("""(box => [box.left + 60, box.top + 40])(document.querySelector('.line svg')
        .getBoundingClientRect())""")
    fresh.hover(x, y)
    assert (tooltip(fresh) or "").startswith("token ")


@pytest.mark.parametrize("width", [1280, 390, 320])
def test_nothing_overflows(page: Page, url: str, width: int) -> None:
    show(page, url, width)
    put(page, "gate", "signal")
    press(page, "sent")
    caption(page)
    wait(page)
    press(page, "compare")
    wait(page)
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = """[...document.querySelectorAll('main *')].filter(one => !one.closest('svg, .hidden')
        && one.getBoundingClientRect().right > innerWidth + 1).map(one => one.className)"""
    assert page.evaluate(outside) == []


def test_a_file_is_sent_as_16_khz_mono(fresh: Page, tmp_path: Path) -> None:
    wave, rate = soundfile.read(BUNDLED / "clips" / "en-1.ogg", dtype="float32")
    soundfile.write(tmp_path / "own.wav", np.stack([wave, wave], 1).repeat(2, 0), 2 * rate)
    fresh.upload("#file", tmp_path / "own.wav")
    fresh.until("document.getElementById('chosen-name').textContent.startsWith('own.wav')")
    press(fresh, "run")
    assert wait(fresh) == "Done"
    part = asked(fresh)[0]["messages"][0]["content"][0]["input_audio"]
    sent, at = soundfile.read(io.BytesIO(base64.b64decode(part["data"])), dtype="float32")
    assert (part["format"], at, sent.ndim) == ("wav", 16_000, 1)
    assert abs(len(sent) / at - len(wave) / rate) < 0.01
    assert np.corrcoef(sent[: len(wave)], wave[: len(sent)])[0, 1] > 0.99
    (tmp_path / "none.wav").write_bytes(b"this is no recording")
    fresh.upload("#file", tmp_path / "none.wav")
    refusal = "none.wav: The browser cannot read this recording"
    fresh.until(f"document.getElementById('status').textContent.startsWith('{refusal}')")


def test_a_clip_can_be_played_and_stopped(fresh: Page) -> None:
    fresh.evaluate("document.querySelectorAll('.play')[0].focus()")
    for shown in ("■", "▶"):
        fresh.press("Enter")
        fresh.until(f"document.activeElement.textContent === '{shown}'")
    assert asked(fresh) == [], "to hear a clip is not to caption it"
    assert faults(fresh) == []


def test_a_recording_can_be_made(fresh: Page) -> None:
    press(fresh, "record")
    fresh.until("document.getElementById('record').textContent.startsWith('Stop recording')")
    fresh.evaluate("new Promise(done => setTimeout(done, 1200))")
    press(fresh, "record")
    fresh.until("document.getElementById('chosen-name').textContent.startsWith('your recording')")
    put(fresh, "max-tokens", "8")
    press(fresh, "run")
    assert wait(fresh) == "Done"
    assert faults(fresh) == []


def test_texts_stand_out_from_what_is_behind_them(page: Page, url: str) -> None:
    """WCAG AA: at least 4.5 to 1, in both themes."""
    contrast = (
        "(() => {"
        + chromium.CONTRAST
        + """
      const texts = [...document.querySelectorAll('.t, .lead, .soft, .small, label, legend, a, h1, h2, h3, .reason,'
        + '.word, dt, dd, .segments span, button:not(:disabled, [aria-disabled=true]), summary, .fault, .way small')];
      return texts.filter(one => one.getClientRects().length && !one.closest('.hidden')).map(one => {
        return [contrast(one), one.className || one.tagName]; })
        .filter(([value]) => value < 4.5); })()"""
    )
    for dark in (False, True):
        show(page, url, dark=dark)
        put(page, "gate", "signal")
        caption(page)
        wait(page)
        assert page.evaluate(contrast) == []
