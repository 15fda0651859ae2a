"""A parser of the report's page, and runs to render."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

from outrider.decoding.sequence import Source
from outrider.evals.results import Answer, EvalRun

VOID = {"meta", "link", "img", "br", "input", "hr"}


class Reader(HTMLParser):
    """What a browser would make of the page: tags, attributes, the texts of strips, and elements left open."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.strips: list[list[str]] = []
        self.text: list[str] = []
        self._in_token = False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag not in VOID:
            self.open.append(tag)
        if found.get("class") == "strip":
            self.strips.append([])
        self._in_token = tag == "span" and "data-id" in found
        if self._in_token:
            self.strips[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag
        self._in_token = False

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self._in_token:
            self.strips[-1][-1] += data


def answer(mode: str = "exact", n: int = 3, **changes: Any) -> Answer:
    sources = (Source.ACCEPTED, Source.CORRECTION, Source.BONUS, Source.EDGE, Source.SAMPLED)
    stats = {"verified": 2.0, "escalated": 2.0, "corrected": 1.0, "bonus": 1.0, "cloud_tokens": 2.0, "edge_tokens": 2.0}
    made = Answer("a1", mode, "text", tuple(range(n)), "exact", "eos", stats)
    return replace(made, **{"sources": tuple(sources[i % 5] for i in range(n)), **changes})


def run(*answers: Answer, name: str = "run", **parts: Any) -> EvalRun:
    return EvalRun(name, {"configuration": {}, "versions": {}, "hardware": {}}, answers or (answer(),), **parts)
