"""Errors name what was typed, in the words of the command line."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.cli.exit_codes import run_guarded, use_option_names
from outrider.errors import DataError, ModelError, OutriderError


@pytest.mark.parametrize(
    ("typed", "message", "shown"),
    [
        (["--top-k", "5"], "top_k needs a temperature above 0", "--top-k needs a temperature above 0"),
        (["--max-new-tokens=0"], "max_new_tokens is 1 or more, not 0", "--max-new-tokens is 1 or more, not 0"),
        (["--no-repeat-ngram", "-1"], "no_repeat_ngram_size is 0 or more", "--no-repeat-ngram is 0 or more"),
        (["--gate", "x"], "gate 'x': expected always", "--gate 'x': expected always"),
        (["--gate", "x"], "the gate is open", "the gate is open"),
        (["--gate", "g.json"], "gate.json: not valid JSON", "gate.json: not valid JSON"),
        (["--top-k", "5"], "--top-k: already named", "--top-k: already named"),
        (
            ["--repetition-window", "8"],
            "repetition_window needs a repetition_penalty other than 1",
            "--repetition-window needs a --repetition-penalty other than 1",
        ),
        ([], "top_k of a gate file", "top_k of a gate file"),
    ],
)
def test_settings_are_named_as_they_were_typed(typed: list[str], message: str, shown: str) -> None:
    assert use_option_names(message, typed) == shown


NO_TEMPORARY = "outrider: no temporary directory is writable (is the disk full?)"


def caused(outer: Exception, inner: Exception) -> Exception:
    outer.__cause__ = inner
    return outer


@given(st.text(), st.lists(st.text()))
def test_any_message_and_any_words_are_taken(message: str, typed: list[str]) -> None:
    use_option_names(message, typed)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (DataError("bad"), 2, "outrider: bad"),
        (OutriderError("failed"), 1, "outrider: failed"),
        (MemoryError(), 1, "outrider: out of memory"),
        (OSError(errno.ENOSPC, "No space left on device", "a"), 1, "outrider: a cannot be written: No space left on"),
        (caused(ModelError("bad"), OSError(errno.ENOSPC, "No space left on device")), 1, "outrider: output cannot be"),
        (caused(ModelError("bad"), FileNotFoundError(2, "No usable temporary directory found")), 1, NO_TEMPORARY),
        (FileNotFoundError(2, "No usable temporary directory found in ['/tmp']"), 1, NO_TEMPORARY),
        (RuntimeError("x"), 1, "outrider: unexpected RuntimeError: x (see --verbose)"),
    ],
)
def test_every_error_is_a_line_and_a_code(
    error: Exception, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise error

    assert run_guarded(fail) == code
    assert capsys.readouterr().err.startswith(said)
    run_guarded(fail, ["--verbose"])
    assert ("Traceback" in capsys.readouterr().err) == (not isinstance(error, DataError))
