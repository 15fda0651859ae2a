"""No control sequence from outside reaches a terminal, whatever way it takes."""

from __future__ import annotations

import io
import json
import logging
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from outrider.cli import exit_codes, rendering, terminal
from outrider.cli.escape import escape_controls, one_line, print_error, to_json
from outrider.decoding.result import Result, Stats
from outrider.decoding.sequence import Source
from outrider.errors import CloudRefused

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b2J\u202eevil\u2066\x7f\r[red]bold[/red] :smile:"
RAW = ("\x1b", "\x07", "\x9b", "\u202e", "\u2066", "\x7f", "\r")
KEPT = "tab\there\nand a line, 好, \u00a0, \u3000, e\u0301, \u0644\u200c\u0645, \U0001f469\u200d\U0001f4bb"


def harmless(text: str) -> bool:
    return not any(c in text for c in RAW)


def test_what_texts_are_made_of_stays() -> None:
    assert escape_controls(KEPT) == KEPT


@given(st.text())
def test_no_control_character_is_left(text: str) -> None:
    shown = escape_controls(text)
    assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t"]
    assert escape_controls(shown) == shown
    assert "\n" not in one_line(text)
    assert not [c for c in to_json({text: [text]}) if unicodedata.category(c) in ("Cc", "Cs")]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_json_says_the_same_in_escapes(text: str) -> None:
    assert json.loads(to_json({"a": text})) == {"a": text}


def shown(renderable: object, width: int = 80) -> str:
    console = terminal.Terminal()
    console.file, console.width = io.StringIO(), width
    console.print(renderable)
    return console.file.getvalue()


@pytest.mark.parametrize("kind", ["text", "str", "cell", "title"])
def test_a_console_escapes_whatever_it_renders_and_takes_no_markup(kind: str) -> None:
    table = Table(title=HOSTILE if kind == "title" else None)
    table.add_column("name", overflow="fold")
    table.add_row(HOSTILE if kind == "cell" else "")
    made = {"text": Text(HOSTILE), "str": HOSTILE}.get(kind, table)
    out = shown(made, 400)
    assert harmless(out)
    assert "[red]bold[/red]" in "".join(out.split())
    assert ":smile:" in out


def test_messages_and_logs_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(f"{HOSTILE}\noutrider: all is well")
    exit_codes.run_guarded(lambda: (_ for _ in ()).throw(CloudRefused(f"the cloud says {HOSTILE}")))
    exit_codes.run_guarded(lambda: (_ for _ in ()).throw(RuntimeError(HOSTILE)))
    handler = terminal.LogHandler()
    record = logging.LogRecord("outrider", logging.WARNING, "", 0, "peer %s\nwarning: no", (HOSTILE,), None)
    terminal.STDERR.file = sys.stderr
    handler.emit(record)
    terminal.STDERR.file = None
    said = capsys.readouterr().err
    assert harmless(said)
    assert all(line.startswith(("outrider: ", "warning: ", "  ")) for line in said.splitlines())
    assert "\n  outrider: all is well" in said


def test_warnings_titles_and_pieces_are_escaped() -> None:
    result = Result("", [1], "eos", "exact", 1, Stats(), [Source.ACCEPTED], warnings=[HOSTILE])
    console = terminal.Terminal()
    console.file = io.StringIO()
    rendering.show_title(console, HOSTILE)
    rendering.show_warnings(console, result)
    console.print(rendering.coloured([HOSTILE], [Source.ACCEPTED]))
    console.print(rendering.table([(HOSTILE, result)], 400))
    assert harmless(console.file.getvalue())


# Tables -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("guarantee", ["exact", "bounded", "best-effort", "edge-only"])
def test_a_table_never_cuts_the_guarantee_or_a_name(width: int, guarantee: str) -> None:
    stats = Stats(blocks=10, escalated=10, verified=3, accepted=3, cloud_tokens=999, near_ties=12, total_s=123.45)
    result = Result("", [1] * 12345, "eos", guarantee, 1, stats, [])  # type: ignore[arg-type]
    name = "a-recording-with-a-rather-long-name-of-2026-11-28.wav"
    out = shown(rendering.table([(name, result)], width), width)
    assert "…" not in out
    assert guarantee in out
    first = "".join(line.split(" ")[0] for line in out.splitlines())
    assert name in first.replace(" ", "")
