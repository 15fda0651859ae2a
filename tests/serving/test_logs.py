"""The log: its two forms, and that nothing a user said gets into it."""

from __future__ import annotations

import ast
import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path

import pytest

from outrider.errors import SettingsError
from outrider.serving import logs
from outrider.serving.logs import NUMERIC_FIELDS, TEXT_FIELDS, configure

SECRET = "我的病历: seven stitches"
child = logging.getLogger("outrider.cloud.part")


@pytest.fixture(params=["json", "plain"])
def stream(request: pytest.FixtureRequest) -> StringIO:
    stream = StringIO()
    configure("info", json=request.param == "json", stream=stream)
    return stream


def as_json(level: str = "info") -> StringIO:
    stream = StringIO()
    configure(level, json=True, stream=stream)
    return stream


def test_json_has_time_level_event_and_fields() -> None:
    stream = as_json()
    child.warning("session opened", extra={"session": "a1", "tokens": 7, "seconds": 0.5})
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    when = datetime.fromisoformat(entry.pop("timestamp"))
    assert when.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - when) < timedelta(minutes=1)
    assert entry == {"level": "WARNING", "event": "session opened", "session": "a1", "tokens": 7, "seconds": 0.5}


def test_plain_text_has_the_same() -> None:
    stream = StringIO()
    configure("INFO", json=False, stream=stream)
    child.info("session opened", extra={"session": "a1", "tokens": 7, "reason": "", "peer": "ipv4:1.2.3.4:5"})
    when, rest = stream.getvalue().split(" ", 1)
    assert datetime.fromisoformat(when).utcoffset() == timedelta(0)
    assert rest == 'INFO session opened session=a1 tokens=7 reason="" peer=ipv4:1.2.3.4:5\n'


@pytest.mark.parametrize("name", ["a b", "x\nINFO forged", "a=b", 'say"hi', "back\\slash", "\u2028", "\x1b[31m"])
def test_a_peers_name_cannot_forge_a_line_or_a_field(name: str, stream: StringIO) -> None:
    child.info("session opened", extra={"identity": name, "tokens": 7})
    (line,) = stream.getvalue().splitlines()
    if line.startswith("{"):
        assert json.loads(line)["identity"] == name
    else:
        assert line.endswith(f"INFO session opened identity={json.dumps(name)} tokens=7")


@pytest.mark.parametrize("extra", [{"prompt": SECRET}, {"ids": SECRET}, {"text": SECRET}, {"token": SECRET}])
def test_an_unknown_field_is_withheld_and_named(extra: dict[str, str], stream: StringIO) -> None:
    child.info("session opened", extra={**extra, "tokens": 7})
    assert_withheld(stream, *extra)
    assert "tokens" in stream.getvalue()


@pytest.mark.parametrize("value", [SECRET, [104432, 26381], (104432,), {"a": 104432}, None])
@pytest.mark.parametrize("name", sorted(NUMERIC_FIELDS))
def test_a_count_is_a_number(name: str, value: object, stream: StringIO) -> None:
    child.info("session opened", extra={name: value})
    assert_withheld(stream, name)


@pytest.mark.parametrize("value", [[104432, 26381], {"a": SECRET}, SECRET.encode()])
@pytest.mark.parametrize("name", sorted(TEXT_FIELDS - {"withheld"}))
def test_a_word_is_a_single_one(name: str, value: object, stream: StringIO) -> None:
    child.info("session opened", extra={name: value})
    assert_withheld(stream, name)


def test_arguments_are_never_formatted_into_the_event(stream: StringIO) -> None:
    child.info("session opened with %s", SECRET)
    assert_withheld(stream, "args")


def test_an_event_is_a_text(stream: StringIO) -> None:
    child.info({"prompt": SECRET})
    assert_withheld(stream, "event")


def test_a_traceback_keeps_its_place_but_not_its_message(stream: StringIO) -> None:
    text = SECRET
    try:
        try:
            {}[text]
        except KeyError as error:
            raise ValueError(text) from error
    except ValueError:
        child.exception("the engine failed")
    written = stream.getvalue()
    assert "KeyError" in written
    assert "ValueError" in written
    assert "test_logs.py" in written
    assert_clean(written)


def test_nothing_is_withheld_where_nothing_was_wrong(stream: StringIO) -> None:
    child.info("listening", extra={"address": "[::1]:7070", "slots": 8})
    assert "withheld" not in stream.getvalue()


def test_levels_below_are_left_out() -> None:
    stream = as_json("Warning")
    child.info("session opened")
    child.warning("slot evicted")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["slot evicted"]


@pytest.mark.parametrize("level", ["loud", "", "10"])
def test_an_unknown_level_is_refused(level: str) -> None:
    with pytest.raises(SettingsError, match="expected one of debug, info"):
        configure(level, json=True, stream=StringIO())


def test_configuring_again_replaces_and_does_not_double() -> None:
    first, second = as_json(), as_json()
    child.info("session opened")
    assert first.getvalue() == ""
    assert len(second.getvalue().splitlines()) == 1


def test_the_root_loggers_handlers_see_nothing() -> None:
    elsewhere = StringIO()
    handler = logging.StreamHandler(elsewhere)
    logging.getLogger().addHandler(handler)
    try:
        as_json()
        child.warning("session opened with %s", SECRET)
    finally:
        logging.getLogger().removeHandler(handler)
    assert elsewhere.getvalue() == ""


def test_importing_configures_nothing() -> None:
    source = ast.parse(Path(logs.__file__).read_text(encoding="utf-8"))
    calls = [node.value for node in source.body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    assert not calls


@pytest.mark.parametrize("path", sorted(Path(logs.__file__).parent.glob("*.py")), ids=lambda path: path.stem)
def test_the_services_own_calls_keep_the_rule(path: Path) -> None:
    """An f-string cannot be told from a constant once it is formatted: it is looked for in the source."""
    for call in log_calls(ast.parse(path.read_text(encoding="utf-8"))):
        where = f"{path.name}:{call.lineno}"
        assert len(call.args) == 1, f"{where}: the event, and nothing formatted into it"
        assert isinstance(call.args[0], ast.Constant), f"{where}: an event is a constant text"
        for keyword in call.keywords:
            assert literal_keys(keyword.value) <= NUMERIC_FIELDS | TEXT_FIELDS, (
                f"{where}: a field that would be withheld"
            )


def test_the_rule_finds_what_breaks_it() -> None:
    calls = list(log_calls(ast.parse('log.info(f"{x}")\nself.log.error("a", b)\nlog.info("a", extra={"prompt": 1})')))
    assert not isinstance(calls[0].args[0], ast.Constant)
    assert len(calls[1].args) == 2
    assert literal_keys(calls[2].keywords[0].value) == {"prompt"}


def log_calls(tree: ast.AST) -> Iterator[ast.Call]:
    levels = {"debug", "info", "warning", "error", "critical", "exception"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in levels:
            owner = node.func.value
            if (owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")) in {"log", "logger"}:
                yield node


def literal_keys(node: ast.expr) -> set[object]:
    if not isinstance(node, ast.Dict):
        return set()
    return {key.value for key in node.keys if isinstance(key, ast.Constant)}


def assert_withheld(stream: StringIO, *names: str) -> None:
    (line,) = stream.getvalue().splitlines()
    if line.startswith("{"):
        assert json.loads(line)["withheld"] == " ".join(names)
    else:
        assert line.endswith(f"withheld={' '.join(names)}")
    assert_clean(line)


def assert_clean(written: str) -> None:
    for part in ("病历", json.dumps("病历")[1:-1], "stitches", "104432", "26381"):
        assert part not in written
