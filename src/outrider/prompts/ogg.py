"""Pages of an Ogg file: page numbers and positions reveal audio that the decoder drops silently."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

HEADER: Final = 27  # bytes before the table of segments
SEARCH: Final = 2**16
MAX_BROKEN: Final = 1000  # pages with a wrong checksum, before the survey ends
LIVE_SECONDS: Final = 60  # a first page at a later position belongs to a stream that was joined late
SLACK_SECONDS: Final = 0.01  # a decoder's first or last block may fall short
NEXT_SECONDS: Final = 0.1  # beyond the first stream's end: FFmpeg reads the next one, too
REVERSED: Final = bytes(int(f"{n:08b}"[::-1], 2) for n in range(256))
BEGINS, ENDS = 2, 4  # flags of a page


@dataclass(frozen=True)
class Survey:
    """The audio stream of an Ogg file.

    seconds: from the last page's position, 0 if unknown. is_ended: its last page is there. is_chained: another stream
    follows. gaps: the seconds up to each place where pages are missing, as pages count them.
    """

    seconds: float = 0.0
    is_ended: bool = False
    is_chained: bool = False
    gaps: tuple[float, ...] = ()

    def holes(self, decoded: float) -> dict[str, tuple[float, ...]]:
        """Return the warning about gaps with their places in the decoded audio. Each gap counts as equally long."""
        lost, text = max(0.0, self.seconds - decoded), self._gapped(decoded)
        places = tuple(max(0.0, at - lost * n / len(self.gaps)) for n, at in enumerate(self.gaps))
        return {text: places} if text else {}

    def warnings(self, decoded: float) -> Iterator[str]:
        """Yield warnings about missing audio, after `decoded` seconds were decoded."""
        lost = self.seconds - decoded
        if text := self._gapped(decoded):
            yield text
        if not self.is_ended:
            yield f"the recording is damaged or breaks off after {decoded:.2f} s: the rest is missing"
        if self.is_chained and lost > -NEXT_SECONDS:
            yield f"the file holds another recording behind the first {decoded:.2f} s: it was not read"

    def _gapped(self, decoded: float) -> str | None:
        lost = self.seconds - decoded
        if self.gaps and lost > SLACK_SECONDS:
            return f"the recording is damaged: {lost:.2f} s of its {self.seconds:.2f} s are missing"
        return None


@dataclass(frozen=True)
class _Page:
    flags: int
    position: int
    serial: int
    number: int
    body: bytes


def is_flac(head: bytes) -> bool:
    """Return whether a file begins as FLAC in Ogg, which libsndfile does not read."""
    return head.startswith(b"OggS") and head[28:33] == b"\x7fFLAC"


def survey(file: BinaryIO, size: int) -> Survey:
    """Read all pages with a correct checksum, up to the beginning of a second stream."""
    first: _Page | None = None
    gaps: list[int] = []
    is_chained = has_data = False
    number, flags, start, last = 0, 0, 0, 0
    for page in _pages(file, size):
        if page.flags & BEGINS and has_data:
            is_chained = True
            break
        has_data |= not page.flags & BEGINS
        if first is None and _timing(page.body) is not None:
            first = page
        elif first is not None and page.serial == first.serial:
            if page.number != number + 1:
                gaps.append(last)
            if page.position > 0:
                start, last = (start if last or gaps else page.position), page.position
        else:
            continue
        number, flags = page.number, page.flags
    rate, skip = (first and _timing(first.body)) or (0, 0)
    if not rate:
        return Survey(is_chained=is_chained)
    joined = start if start > LIVE_SECONDS * rate else skip
    seconds, *gap_seconds = (max(0, at - joined) / rate for at in (last, *gaps))
    return Survey(seconds, bool(flags & ENDS), is_chained, tuple(gap_seconds))


def _timing(body: bytes) -> tuple[int, int] | None:
    """Return the rate of the positions and the samples to skip, from a stream's first page."""
    if body.startswith(b"OpusHead"):
        return 48_000, int.from_bytes(body[10:12], "little")
    if body.startswith(b"\x01vorbis"):
        return int.from_bytes(body[12:16], "little"), 0
    if body.startswith(b"\x7fFLAC"):
        return int.from_bytes(body[27:30], "big") >> 4, 0
    return None


def _pages(file: BinaryIO, size: int) -> Iterator[_Page]:
    at, broken = 0, 0
    while at + HEADER <= size and broken < MAX_BROKEN:
        file.seek(at)
        head = file.read(HEADER)
        if head[:4] != b"OggS":
            file.seek(at)
            found = file.read(SEARCH).find(b"OggS")
            at += found if found >= 0 else SEARCH - 3
            continue
        table = file.read(head[26])
        body = file.read(sum(table))
        # Ogg's CRC-32 is zlib's with each byte's and the result's bits reversed, and nothing inverted.
        page = (head[:22] + bytes(4) + head[26:] + table + body).translate(REVERSED)
        checksum = int(f"{zlib.crc32(page, 0xFFFFFFFF) ^ 0xFFFFFFFF:032b}"[::-1], 2)
        if checksum != int.from_bytes(head[22:26], "little"):
            at, broken = at + 4, broken + 1
            continue
        at += HEADER + len(table) + len(body)
        position, serial, number = struct.unpack_from("<qII", head, 6)
        yield _Page(head[5], position, serial, number, body)
