"""Record a real run of `outrider caption` on a pseudo-terminal as an animated SVG.

    python tools/record_demo.py docs/images/demo.svg

A cloud is started in a second process, and four bundled recordings are captioned across an emulated round trip of
50 ms. The animation of the loading line is left out, and longer pauses are shortened to `LONGEST_PAUSE`.
"""

from __future__ import annotations

import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from fcntl import ioctl
from html import escape
from pathlib import Path

from rich.cells import cell_len, set_cell_size

from outrider.cli.subprocess_cloud import cloud_process

CLIPS = Path(__file__).parents[1] / "src" / "outrider" / "demo" / "clips"
RECORDINGS = ("en-1.ogg", "en-2.ogg", "en-4.ogg", "en-5.ogg")
COLUMNS, ROWS = 92, 27
CELL_WIDTH, LINE_HEIGHT, MARGIN, BAR = 8.4, 19, 14, 30  # pixels
LONGEST_PAUSE, LAST_FRAME = 0.8, 6.0  # seconds
FEWEST_MS = 40  # between frames
COLOURS = {31: "#ff7b72", 32: "#7ee787", 33: "#e3b341", 36: "#76e3ea"}
PLAIN, DIM, BACKGROUND = "#e6edf3", "#7d8590", "#0d1117"
SPINNER = re.compile("[\u2800-\u28ff]")
CONTROL = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|(\r)|(\n)")


@dataclass(frozen=True)
class Style:
    """Colour and weight of a piece of text."""

    colour: str = PLAIN
    bold: bool = False

    def changed(self, codes: str) -> Style:
        """Return the style after a sequence of SGR codes."""
        style = self
        for code in (int(part or 0) for part in codes.split(";")):
            if code == 0:
                style = Style()
            elif code == 1:
                style = Style(style.colour, bold=True)
            elif code == 2:
                style = Style(DIM, style.bold)
            elif code in COLOURS:
                style = Style(COLOURS[code], style.bold)
        return style


Line = tuple[tuple[str, Style], ...]


@dataclass
class Screen:
    """The part of a terminal that outrider uses: text, colours, cursor up, erase line."""

    lines: list[Line] = field(default_factory=lambda: [()])
    row: int = 0
    style: Style = Style()
    carriage_returned: bool = False

    def feed(self, text: str) -> None:
        """Apply output."""
        end = 0
        for found in CONTROL.finditer(text):
            self._write(text[end : found.start()])
            self._control(*found.groups())
            end = found.end()
        self._write(text[end:])

    def _write(self, text: str) -> None:
        if not text:
            return
        before = () if self.carriage_returned else self.lines[self.row]
        self.carriage_returned = False
        room = COLUMNS - sum(cell_len(piece) for piece, _ in before)
        while cell_len(text) > room:  # the terminal wraps long lines
            head = set_cell_size(text, room).rstrip()
            self.lines[self.row] = (*before, (head, self.style))
            self._next_row()
            before, text, room = (), text[len(head) :].lstrip(), COLUMNS
        self.lines[self.row] = (*before, (text, self.style))

    def _next_row(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append(())

    def _control(self, codes: str, command: str, carriage_return: str, newline: str) -> None:
        if newline:
            self._next_row()
            self.carriage_returned = False
        elif carriage_return:
            self.carriage_returned = True
        elif command == "m":
            self.style = self.style.changed(codes)
        elif command == "K":
            self.lines[self.row] = ()
        elif command == "A":
            self.row = max(0, self.row - int(codes or 1))

    def view(self) -> tuple[Line, ...]:
        """Return the last rows, without trailing empty ones."""
        lines = list(self.lines)
        while lines and not lines[-1]:
            lines.pop()
        return tuple(_merged(line) for line in lines[-ROWS:])


def _merged(line: Line) -> Line:
    """Join neighbours of one style."""
    out: list[tuple[str, Style]] = []
    for text, style in line:
        if out and out[-1][1] == style:
            out[-1] = (out[-1][0] + text, style)
        else:
            out.append((text, style))
    return tuple(out)


def output(command: list[str], folder: Path) -> Iterator[tuple[float, str]]:
    """Run a command on a pseudo-terminal and yield its output with the seconds since its start.

    Raises:
        RuntimeError: the command failed.
    """
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS + 16, COLUMNS, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    environment |= {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
    started, pending = time.monotonic(), b""
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment) as child:
        os.close(theirs)
        while data := _read(ours):
            pending += data
            text = pending.decode("utf-8", "ignore")  # a character may be split over two reads
            pending = pending[len(text.encode()) :]
            yield time.monotonic() - started, text
    os.close(ours)
    if child.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with exit code {child.returncode}")


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # Linux reports the end of a pseudo-terminal so
        return b""


def frames(pieces: Iterator[tuple[float, str]], prompt: str) -> list[tuple[float, tuple[Line, ...]]]:
    """Return the distinct views with the seconds at which they appear, long pauses shortened."""
    screen = Screen()
    screen.feed(f"\x1b[36m$\x1b[0m {prompt}\n")
    found = [(0.0, screen.view())]
    shown, last = 0.0, None
    for seconds, text in pieces:
        screen.feed(text)
        view = screen.view()
        if view == found[-1][1]:
            continue
        if SPINNER.search("".join(piece for line in view for piece, _ in line)):
            if last is None:
                shown, last = shown + LONGEST_PAUSE, seconds
                found.append((shown, view))
            last = seconds
            continue
        pause = 0.0 if last is None else min(seconds - last, LONGEST_PAUSE)
        if found[1:] and pause * 1000 < FEWEST_MS:
            found[-1] = (found[-1][0], view)
            continue
        shown, last = shown + pause, seconds
        found.append((shown, view))
    return found


def _line(line: Line) -> str:
    """Return a line's text elements, each as wide as its cells."""
    out, column = [], 0
    for text, style in line:
        cells = cell_len(text)
        weight = ' font-weight="bold"' if style.bold else ""
        if inner := text.strip():
            start = column + cell_len(text) - cell_len(text.lstrip())
            shown = escape(inner, quote=False).replace(" ", "\u00a0")
            out.append(
                f'<text x="{start * CELL_WIDTH:.1f}" textLength="{cell_len(inner) * CELL_WIDTH:.1f}" '
                f'fill="{style.colour}"{weight}>{shown}</text>'
            )
        column += cells
    return "".join(out)


def svg(found: list[tuple[float, tuple[Line, ...]]], title: str) -> str:
    """Return an SVG that shows one view after another and repeats; without animation, the last one."""
    width = round(COLUMNS * CELL_WIDTH + 2 * MARGIN)
    rows = max(len(view) for _, view in found)
    height = BAR + rows * LINE_HEIGHT + MARGIN
    names: dict[Line, str] = {}
    for _, view in found:
        for line in view:
            if line:
                names.setdefault(line, f"l{len(names)}")
    total = found[-1][0] + LAST_FRAME
    steps = "".join(
        f"{100 * seconds / total:.2f}%{{transform:translateX(-{n * width}px)}}" for n, (seconds, _) in enumerate(found)
    )
    end = f"translateX(-{(len(found) - 1) * width}px)"
    definitions = "".join(f'<g id="{name}">{_line(line)}</g>' for line, name in names.items())
    strip = "".join(
        f'<use href="#{names[line]}" x="{n * width}" y="{(row + 1) * LINE_HEIGHT}"/>'
        for n, (_, view) in enumerate(found)
        for row, line in enumerate(view)
        if line
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title)}"><title>{escape(title)}</title><style>'
        "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}"
        f"#strip{{transform:{end};animation:play {total:.2f}s steps(1,end) infinite}}"
        f"@keyframes play{{{steps}100%{{transform:{end}}}}}"
        f"@media (prefers-reduced-motion){{#strip{{animation:none}}}}</style>"
        f'<rect width="{width}" height="{height}" rx="8" fill="{BACKGROUND}"/>'
        + "".join(f'<circle cx="{18 + 18 * n}" cy="16" r="5" fill="#30363d"/>' for n in range(3))
        + f"<defs>{definitions}</defs>"
        f'<svg x="{MARGIN}" y="{BAR - 8}" width="{width - MARGIN}" height="{height - BAR + 8}">'
        f'<g id="strip">{strip}</g></svg></svg>\n'
    )


def main(out: Path) -> None:
    """Record the run and write the picture."""
    with cloud_process("demo") as address:
        options = ["--cloud", f"grpc://{address}", "--net", "rtt=50ms", "--driver", "pipelined"]
        command = [sys.executable, "-m", "outrider", "caption", *RECORDINGS, *options]
        prompt = f"outrider caption {' '.join(RECORDINGS)} \\\n    {' '.join(options)}"
        found = frames(output(command, CLIPS), prompt)
    out.write_text(svg(found, f"A terminal that runs {prompt}"), encoding="utf-8")
    print(f"{out}: {len(found)} frames, {found[-1][0]:.1f} s, {out.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
