"""A result as HTML for a notebook: what was gained, the tokens in the colours of their sources, and the figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from html import escape
from itertools import groupby

from outrider.decoding.sequence import Source
from outrider.errors import escape_controls

_COLORS = {  # the hues of the terminal, translucent for light and dark pages
    Source.EDGE: "rgba(210,153,34,.25)",
    Source.SAMPLED: "rgba(210,153,34,.5)",
    Source.ACCEPTED: "rgba(46,160,67,.25)",
    Source.CORRECTION: "rgba(248,81,73,.35)",
    Source.BONUS: "rgba(56,139,253,.3)",
}


def render_html(
    sentence: str, pieces: Seq[str], sources: Seq[Source], rows: Mapping[str, str], warnings: Iterable[str]
) -> str:
    """Return the HTML. All texts are escaped, and the model's text cannot reorder what surrounds it.

    pieces: the text of each token. sources: their sources. rows: the names and values of the table.
    """
    runs = groupby(zip(sources, pieces, strict=True), key=lambda pair: pair[0])
    body = "".join(_span(source, "".join(piece for _, piece in run)) for source, run in runs)
    legend = " ".join(
        _span(source, f"{sources.count(source):,} {source.value}") for source in Source if source in sources
    )
    notes = "".join(f"<p>warning: {escape(escape_controls(warning))}</p>" for warning in warnings)
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows.items())
    text = f'<pre style="white-space:pre-wrap;unicode-bidi:isolate">{body}</pre>'
    return f"<div><p>{escape(sentence)}</p>{text}<p>{legend}</p>{notes}<table>{cells}</table></div>"


def _span(source: Source, text: str) -> str:
    return f'<span style="background:{_COLORS[source]}" title="{escape(source.value)}">{escape(text)}</span>'
