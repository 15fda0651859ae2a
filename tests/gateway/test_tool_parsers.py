"""Outputs of models with tool calls: found however they are cut, and text where they are malformed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.gateway.tool_parsers import HERMES, LLAMA, MISTRAL, CallStart, Part, Text, ToolParser, ToolSyntax

NAMES = {"f", "g"}
Found = list[tuple[str, str] | str]  # texts, and calls with their arguments


def parse(syntax: ToolSyntax, pieces: Sequence[str], *, whole: bool = False) -> tuple[Found, ToolParser]:
    parser = ToolParser(syntax, NAMES, whole=whole)
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.end()
    return join(parts), parser


def join(parts: list[Part]) -> Found:
    found: Found = []
    for part in parts:
        if isinstance(part, Text):
            before = found.pop() if found and isinstance(found[-1], str) else ""
            found.append(f"{before}{part.text}")
        elif isinstance(part, CallStart):
            assert part.index == sum(isinstance(each, tuple) for each in found)
            found.append((part.name, ""))
        else:
            last = found.pop()
            assert isinstance(last, tuple), "arguments follow their call"
            found.append((last[0], last[1] + part.text))
    return found


ARGUMENTS = '{"city": "K\\u00f6ln }] \\"<", "n": [1, {"a": null}]}'
CODE = '```json\n{"names": [1]}\n``` and `f`:\n```python\nf()\n```\n'
OUTPUTS: dict[str, tuple[ToolSyntax, str, Found]] = {
    "plain text": (HERMES, " Hello <tool_c all> \n", [" Hello <tool_c all> \n"]),
    "one call": (HERMES, f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>', [("f", ARGUMENTS)]),
    "text and calls": (
        HERMES,
        'I look.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>{"name": "g", "arguments": {}}'
        "</tool_call>\nDone",
        ["I look.", ("f", "{}"), ("g", "{}"), "\nDone"],
    ),
    "arguments first": (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [("f", '{"a": 1}')]),
    "no arguments": (HERMES, '<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
    "quoted arguments": (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', [("f", '{"a": 1}')]),
    "a missing bracket": (
        HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}\n</tool_call>', [("f", '{"a": 1}')]
    ),
    "a block of code": (
        HERMES, 'So:\n```json\n{\n  "name": "f",\n  "arguments": {}\n}\n```\nDone', ["So:", ("f", "{}"), "\nDone"]
    ),
    "two blocks": (
        HERMES, '```\n{"name": "f"}\n```\n```json\n{"name": "g"}\n```', [("f", "{}"), ("g", "{}")]
    ),
    "code that is no call": (HERMES, CODE, [CODE]),
    "alone": (HERMES, '{"name": "f", "arguments": {}}', [("f", "{}")]),
    "a bare call": (LLAMA, f'{{"name": "f", "parameters": {ARGUMENTS}}}', [("f", ARGUMENTS)]),
    "two bare calls": (
        LLAMA,
        '\n{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
        [("f", "{}"), ("g", "{}")],
    ),
    "a tagged call": (LLAMA, 'Well.<|python_tag|>{"name": "f", "parameters": {}}', ["Well.", ("f", "{}")]),
    "JSON that is no call": (LLAMA, ' {"answer": 42} ok', [' {"answer": 42} ok']),
    "JSON after a text": (LLAMA, 'So {"name": "f", "parameters": {}}', ['So {"name": "f", "parameters": {}}']),
    "Python": (LLAMA, '<|python_tag|>f.call(a="b")', ['<|python_tag|>f.call(a="b")']),
    "a list": (
        MISTRAL,
        f'[TOOL_CALLS] [{{"name": "f", "arguments": {ARGUMENTS}}}, {{"name": "g", "arguments": {{}}, "id": "a"}}]',
        [("f", ARGUMENTS), ("g", "{}")],
    ),
    "a list without a call": (MISTRAL, "x [TOOL_CALLS] [1]", ["x [TOOL_CALLS] [1]"]),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTPUTS)
@given(cuts=st.lists(st.integers(0, 200)))
def test_however_an_output_is_cut_its_text_and_calls_are_the_same(name: str, cuts: list[int]) -> None:
    syntax, output, expected = OUTPUTS[name]
    at = sorted({0, len(output), *(cut % (len(output) + 1) for cut in cuts)})
    pieces = [output[a:b] for a, b in pairwise(at)]
    assert parse(syntax, pieces)[0] == expected
    assert parse(syntax, pieces, whole=True)[0] == expected


MALFORMED = (
    '<tool_call>\n{"name": "unknown", "arguments": {"a": 1}}\n</tool_call>',
    '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>',
    '<tool_call>\n{"name": "f", "arguments": "1"}\n</tool_call>',
    '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "f", "name": "g", "arguments": {}}\n</tool_call>',
    "<tool_call>\n{name: f}\n</tool_call>",
    "<tool_call>\nf()\n</tool_call>",
    "<tool_call>\n{]</tool_call>",
)


@pytest.mark.parametrize("output", MALFORMED)
@pytest.mark.parametrize("whole", [True, False])
def test_a_malformed_call_is_text_in_full(output: str, whole: bool) -> None:
    for pieces in ([output], list(output)):
        found, parser = parse(HERMES, ["Well. ", *pieces], whole=whole)
        assert found == ["Well. " + output]
        assert (parser.malformed, parser.cut_off) == (1, 0)


CUT_OFF = (
    (HERMES, "<tool_call>"),
    (HERMES, "<tool_call>\n"),
    (HERMES, "<tool_call>\n{"),
    (HERMES, '<tool_call>\n{"na'),
    (HERMES, '<tool_call>\n{"name": "f"'),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": '),
    (MISTRAL, "[TOOL_CALLS] ["),
    (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arg'),
    (LLAMA, '<|python_tag|>{"name": "f", "param'),
)


@pytest.mark.parametrize(("syntax", "output"), CUT_OFF)
@pytest.mark.parametrize("whole", [True, False])
def test_a_call_that_the_end_cuts_off_is_text_in_full(syntax: ToolSyntax, output: str, whole: bool) -> None:
    for pieces in ([output], list(output)):
        found, parser = parse(syntax, ["Well. ", *pieces], whole=whole)
        assert found == ["Well. " + output]
        assert (parser.malformed, parser.cut_off) == (0, 1)


@pytest.mark.parametrize(
    ("output", "syntax", "rest"),
    [
        ('<tool_call>{"name": "f"}</tool_call>\n<tool_call>\n{"na', HERMES, '\n<tool_call>\n{"na'),
        ('<tool_call>{"name": "f"}</tool_call>\n<tool_call>', HERMES, "\n<tool_call>"),
        ('[TOOL_CALLS] [{"name": "f"}, {"na', MISTRAL, ', {"na'),
        ('[TOOL_CALLS] [{"name": "f"}, ', MISTRAL, ", "),
        ('{"name": "f"}; {"name": "g"', LLAMA, '; {"name": "g"'),
    ],
)
def test_a_second_call_that_the_end_cuts_off_is_text(output: str, syntax: ToolSyntax, rest: str) -> None:
    for whole in (True, False):
        found, parser = parse(syntax, list(output), whole=whole)
        assert found == [("f", "{}"), rest]
        assert (parser.malformed, parser.broken, parser.cut_off) == (0, 0, 1)


@pytest.mark.parametrize("closer", ["\n</tool_c", "<", "\n"])
def test_a_closer_that_the_end_cuts_off_is_no_text(closer: str) -> None:
    found, parser = parse(HERMES, list('<tool_call>{"name": "f"}' + closer))
    assert found == [("f", "{}")]
    assert (parser.malformed, parser.cut_off) == (0, 0)


@pytest.mark.parametrize("text", ["Well.", '{"answer": 4', "```json\n", '```json\n{"answer": 4', "<tool_c", " "])
def test_an_unfinished_text_is_no_call(text: str) -> None:
    found, parser = parse(HERMES, list(text))
    assert found == [text]
    assert (parser.malformed, parser.cut_off) == (0, 0)


@pytest.mark.parametrize("rest", [', "b": nope}}\n</tool_call>', ", ]}", ', "b": "', "}, 7: 7}"])
def test_a_call_that_breaks_off_after_its_beginning_loses_nothing(rest: str) -> None:
    output = '<tool_call>{"name": "f", "arguments": {"a": 1' + rest
    assert parse(HERMES, list(output), whole=True)[0] == [output]
    (call, *texts), parser = parse(HERMES, list(output))
    assert isinstance(call, tuple)
    assert (call[0], parser.broken) == ("f", 1)
    assert output.endswith("".join(map(str, texts)))
    assert call[1].startswith('{"a": 1')


@given(st.text(alphabet='{}[]":,\\ \nfge1<>/_tolca', max_size=60), st.sampled_from([HERMES, LLAMA, MISTRAL]))
def test_any_output_is_parsed_without_an_error_and_kept(noise: str, syntax: ToolSyntax) -> None:
    output = syntax.opener + noise
    found, parser = parse(syntax, list(output), whole=True)
    assert parse(syntax, [output], whole=True)[0] == found
    assert parser.calls == sum(isinstance(each, tuple) for each in found)
    if not parser.calls:
        assert "".join(map(str, found)) == output
    for each in found:
        assert isinstance(each, str) or isinstance(json.loads(each[1]), dict)


def test_ids_are_unique_and_of_the_template_s_form() -> None:
    assert re.fullmatch("[a-zA-Z0-9]{9}", MISTRAL.new_id())
    assert re.fullmatch("call_[0-9a-f]{24}", HERMES.new_id())
    assert len({HERMES.new_id() for _ in range(100)}) == 100


def test_arguments_are_reported_as_they_arrive() -> None:
    parser = ToolParser(HERMES, NAMES)
    assert parser.feed('<tool_call>\n{"name": "f", "arguments": ') == []
    (start, *rest) = parser.feed('{"a": ')
    assert isinstance(start, CallStart)
    assert start.name == "f"
    assert [part.text for part in rest if not isinstance(part, CallStart)] == ['{"a": ']
    assert [part.text for part in parser.feed('"long') if not isinstance(part, CallStart)] == ['"long']
