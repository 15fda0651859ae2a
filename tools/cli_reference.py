"""Write the reference of the command line, docs/cli.md, from the help texts of all commands.

    python tools/cli_reference.py > docs/cli.md

`tests/test_front_door.py` compares the file with the output.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console

from outrider.cli.app import app

WIDTH = 20_000  # columns, so that no text is wrapped
EPILOGUE = "Results go to stdout"
TOP = "Commands"
HEAD = """# Command line

This page is generated from the help texts by `make cli-reference`. `outrider COMMAND --help` prints the same.

Results go to stdout, everything else to stderr. Exit codes: 0 success; 1 failure (a lost cloud, or one unusable
recording among several); 2 wrong usage or input; 130 Ctrl-C (0 for a server that already listens).
"""


def help_text(*command: str) -> str:
    """Return the help text of a command, without line wrapping, colours or the epilogue."""
    out = io.StringIO()
    app.help_print([*command], console=Console(file=out, width=WIDTH, color_system=None, force_terminal=False))
    return out.getvalue().split(f"\n{EPILOGUE}")[0]


def panels(text: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield the title of each panel with its entries, (name, description)."""
    for title, body in re.findall(r"^╭─ (.+?) ─*╮\n(.*?)^╰", text, re.M | re.S):
        lines = [line.strip("│").strip() for line in body.splitlines()]
        entries = [re.split(r"\s{2,}", line.removeprefix("*").strip(), maxsplit=1) for line in lines if line]
        yield title, [(entry[0], entry[1] if len(entry) > 1 else "") for entry in entries]


def introduction(text: str) -> tuple[str, list[str], list[str]]:
    """Return the usage line, the paragraphs and the example commands of a help text."""
    before = text.split("╭─")[0].splitlines()
    usage = before[0].removeprefix("Usage: ").strip()
    lines = [line.rstrip() for line in before[1:]]
    examples = [line.strip() for line in lines if line.startswith(" ") and line.strip()]
    paragraphs = [line for line in lines if line and not line.startswith(" ")]
    return usage, paragraphs, examples


def escaped(text: str) -> str:
    """Escape the characters that Markdown would interpret."""
    return re.sub(r"([\\`*_<>|\[\]])", r"\\\1", text)


def table(title: str, entries: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield the lines of a table with one row per option."""
    yield from (f"| {title} | |", "|---|---|")
    for name, description in entries:
        shown = name.replace("|", "\\|")
        yield f"| `{shown}` | {escaped(description)} |"
    yield ""


def section(command: str) -> Iterator[str]:
    """Yield the lines that describe one command."""
    text = help_text(command)
    usage, paragraphs, examples = introduction(text)
    yield from (f"## outrider {command}", "", f"`{usage}`", "")
    for paragraph in paragraphs:
        yield from (escaped(paragraph), "")
    if examples:
        yield from ("```sh", *examples, "```", "")
    for title, entries in panels(text):
        yield from table(title, entries)


def reference() -> str:
    """Return the whole page."""
    commands = [name for name, _ in dict(panels(help_text()))[TOP] if not name.startswith("-")]
    lines = [HEAD, *(line for command in commands for line in section(command))]
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    sys.stdout.write(reference())
