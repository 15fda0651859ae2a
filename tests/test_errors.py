"""Errors' messages quote templates, checkpoints and clouds: control characters are escaped in all of them."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider import errors
from outrider.transport.status import CallFailed, Status
from outrider.verifiers.remote.errors import map_call_error, map_error_frame

CLASSES = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.OutriderError)]
FORGED = "no \x1b[2J\x9b1m way\u202e \r"
SHOWN = r"no \x1b[2J\x9b1m way\u202e \r"


@pytest.mark.parametrize("kind", CLASSES)
def test_every_message_is_shown_without_control_characters(kind: type[errors.OutriderError]) -> None:
    error = kind(FORGED)
    assert str(error) == SHOWN
    assert f"{error}" == SHOWN
    for same in (copy.copy(error), pickle.loads(pickle.dumps(error)), kind(str(error))):
        assert str(same) == SHOWN


@given(st.text(st.characters(categories=["L", "N", "P", "S", "Zs"])))
def test_all_scripts_stay(text: str) -> None:
    assert str(errors.PromptError(text)) == text


def test_what_a_cloud_says_is_escaped() -> None:
    assert str(map_call_error("cloud", CallFailed(Status.INVALID_ARGUMENT, FORGED))) == f"cloud refused: {SHOWN}"
    for code in range(12):
        said = str(map_error_frame("cloud", SimpleNamespace(code=code, message=FORGED, retry_after_ms=0)))
        assert isinstance(said, str)
        assert "\x1b" not in str(errors.CloudLost(said))
