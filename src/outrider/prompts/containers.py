"""Container headers of recordings: the format, and the claimed length.

A header's length is never trusted. It is only compared with the decoded length, for a warning about missing audio.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

from outrider.prompts import ogg

MEDIA: Final = {  # formats that PyAV decodes: common names by FFmpeg's name of the demuxer
    "mov": ("m4a", "mp4", "3gp"),
    "matroska": ("webm", "mka", "mkv"),
    "aac": ("aac",),
    "amr": ("amr",),
    "asf": ("wma",),
    "ogg": ("oga",),  # FLAC in Ogg
}
IMPLAUSIBLE: Final = 1000  # times the decoded length: a header that claims more is wrong, and no audio is missing
STREAMED: Final = 0x7FFF0000  # sizes from here on stand for an unknown length
TRAILING: Final = 2**13  # bytes after the end of the audio that may be tags
CHUNKS: Final = 10_000
SPHERE: Final = (b"sample_count", b"channel_count", b"sample_n_bytes")
BOXES: Final = (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"moof", b"traf")  # that hold tables of samples
LENGTH_MASK: Final = 0x7F7F7F7F


@dataclass(frozen=True)
class Data:
    """The audio data of a container.

    claimed: its bytes by the header, None if unknown. present: its bytes in the file. at, true_size: the offset of the
    size field, and its correct value.
    """

    claimed: int | None
    present: int
    at: int = 0
    true_size: bytes = b""


def media_format(head: bytes) -> str | None:
    """Return FFmpeg's name for a format that libsndfile does not read, from the first bytes of a file."""
    if head[4:8] == b"ftyp":
        return "mov"
    if head.startswith(b"\x1aE\xdf\xa3"):
        return "matroska"
    if head.startswith(b"#!AMR"):
        return "amr"
    if head.startswith(b"0&\xb2u\x8ef\xcf\x11"):
        return "asf"
    if ogg.is_flac(head):
        return "ogg"
    return "aac" if is_adts(head) else None


def is_sample_dump(head: bytes) -> bool:
    """Return whether this is a sampler's dump (SDS), for which libsndfile prints to standard output."""
    return head[:2] == b"\xf0\x7e" and head[3:4] == b"\x01"


def is_adts(head: bytes) -> bool:
    """Return whether these bytes begin a frame of AAC: the sync word, and layer 0, which MPEG audio does not use."""
    return len(head) > 1 and head[0] == 0xFF and head[1] & 0xF6 == 0xF0


def find_mpeg_start(head: bytes) -> int | None:
    """Return where MPEG audio begins, after an ID3v2 tag if there is one, or None for other data."""
    if head.startswith(b"ID3") and len(head) >= 10:
        size = int.from_bytes(head[6:10], "big") & LENGTH_MASK
        size = size & 0x7F | (size >> 1) & 0x3F80 | (size >> 2) & 0x1FC000 | (size >> 3) & 0xFE00000
        return 10 + size + (10 if head[5] & 0x10 else 0)
    is_mpeg = len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0 and not is_adts(head)
    return 0 if is_mpeg else None


def find_mpeg_end(file: BinaryIO, size: int) -> int:
    """Return where MPEG audio ends, before ID3v1 and APEv2 tags."""
    end = size - 128 if _read(file, max(0, size - 128), 3) == b"TAG" else size
    footer = _read(file, max(0, end - 32), 32)
    if not footer.startswith(b"APETAGEX"):
        return end
    length, flags = struct.unpack_from("<I4xI", footer, 12)
    return max(0, end - length - (32 if flags & 0x80000000 else 0))


def find_vbr_tag(frame: bytes) -> int | None:
    """Return where the Xing or Info tag stands in the first frame of MPEG audio, which counts the frames."""
    found = re.search(rb"Xing|Info", frame[:64])
    return None if found is None else found.start()


def find_audio_data(file: BinaryIO, size: int) -> Data | None:
    """Find the audio data of a WAV, AIFF, CAF, W64, AU or NIST SPHERE file. Return None for other formats."""
    head = _read(file, 0, 40)
    magic, kind = head[:4], head[8:12]
    if magic in (b"RIFF", b"RF64", b"RIFX") and kind == b"WAVE":
        order = ">I" if magic == b"RIFX" else "<I"
        return _find_chunk(file, size, 12, order, b"data", pad=2, has_wide_size=magic == b"RF64")
    if magic == b"FORM" and kind in (b"AIFF", b"AIFC"):
        return _find_chunk(file, size, 12, ">I", b"SSND", pad=2)
    if magic == b"caff":
        return _find_chunk(file, size, 8, ">q", b"data", pad=1)
    if magic == b"riff" and head[24:28] == b"wave":
        return _find_chunk(file, size, 40, "<q", b"data", pad=8, name=16, counts_header=True)
    if magic in (b".snd", b"dns."):
        order = ">" if magic == b".snd" else "<"
        start, claimed = struct.unpack_from(order + "II", head.ljust(12, b"\0"), 4)
        return _data(claimed, max(0, size - start), 8, order + "I")
    if head.startswith(b"NIST_1A"):
        return _sphere(_read(file, 0, 1024), size)
    return None


def _sphere(header: bytes, size: int) -> Data | None:
    """Return the data of a NIST SPHERE file. Its header is text."""
    found = [re.search(rb"%s -(?:i|s\d) (\d{1,12})\b" % field, header) for field in SPHERE]
    start = re.match(rb"NIST_1A\s+(\d{1,9})\s", header)
    if start is None or not all(found):
        return None
    claimed = math.prod(int(each[1]) for each in found if each is not None)
    return Data(claimed, min(claimed, max(0, size - int(start[1]))))


def flac_length(head: bytes) -> int:
    """Return the number of samples in a FLAC file's header, 0 if it is unknown or for another format."""
    return int.from_bytes(head[21:26], "big") & (2**36 - 1) if head.startswith(b"fLaC") else 0


def has_index(file: BinaryIO, size: int) -> bool:
    """Return whether an MP4 file has its whole index (the moov box), without which decoding is impossible."""
    at = 0
    for _ in range(CHUNKS):
        head = _read(file, at, 16) if at < size else b""
        if len(head) < 8:
            return False
        length = int.from_bytes(head[:4], "big")
        at += max(8, int.from_bytes(head[8:], "big") if length == 1 else length or size - at)
        if head[4:8] == b"moov":
            return at <= size
    return False


def has_inflated_sample_count(file: BinaryIO, start: int, end: int, size: int, depth: int = 0) -> bool:
    """Return whether a table of an MP4 file claims more samples than the file has bytes.

    FFmpeg would allocate an index of all of them. start, end: of the boxes to check. depth: their nesting.
    """
    for _ in range(CHUNKS):
        head = _read(file, start, 28) if start < end else b""
        if len(head) < 8:
            return False
        length, kind = int.from_bytes(head[:4], "big"), head[4:8]
        skip = 16 if length == 1 else 8
        length = int.from_bytes(head[8:16], "big") if length == 1 else length or end - start
        count = {b"stsz": head[16:20], b"trun": head[12:16]}.get(kind, b"")
        if int.from_bytes(count, "big") > size:
            return True
        is_nested = kind in BOXES and depth < len(BOXES)
        if is_nested and has_inflated_sample_count(file, start + skip, min(end, start + length), size, depth + 1):
            return True
        start += max(skip, length)
    return True


def _find_chunk(
    file: BinaryIO,
    size: int,
    at: int,
    length: str,
    wanted: bytes,
    *,
    pad: int,
    name: int = 4,
    counts_header: bool = False,
    has_wide_size: bool = False,
) -> Data | None:
    """Find the chunk `wanted`. has_wide_size: RF64, where a chunk `ds64` holds the size that libsndfile uses."""
    wide: int | None = None
    for start, body, tag, claimed in _chunks(file, size, at, length, pad, name, counts_header):
        if tag == b"ds64" and has_wide_size:
            wide = body + 8
        if tag == wanted:
            field = start + name
            if wide is not None:
                field, length, claimed = wide, "<q", int.from_bytes(_read(file, wide, 8), "little")
            end = body + claimed + -claimed % pad
            # No chunk follows: the data continues beyond the length in the header.
            goes_on = claimed > 0 and size - end > TRAILING and re.match(rb"[ -~]{4}", _read(file, end, 4)) is None
            extra = body - start if counts_header else 0
            return _data(0 if goes_on else claimed, max(0, size - body), field, length, extra)
    return None


def _chunks(
    file: BinaryIO, size: int, at: int, length: str, pad: int, name: int, counts_header: bool
) -> Iterator[tuple[int, int, bytes, int]]:
    """Yield the offsets of each chunk and of its body, its name and its size."""
    head = name + struct.calcsize(length)
    for _ in range(CHUNKS):
        found = _read(file, at, head) if at < size else b""
        if len(found) < head:
            return
        (claimed,) = struct.unpack_from(length, found, name)
        claimed -= head if counts_header else 0
        yield at, at + head, found[:4], claimed
        if claimed < 0:
            return
        at += head + claimed + -claimed % pad


def _data(claimed: int, rest: int, at: int, length: str, extra: int = 0) -> Data:
    """Return the audio data, with the correct value of its size field.

    rest: bytes from the beginning of the data to the end of the file. extra: of the header, if the size includes it.
    """
    is_wide = length[1] == "q"
    is_known = 0 < claimed < STREAMED or 2**32 < claimed < 2**48 or (is_wide and 0 < claimed <= rest)
    present = min(rest, claimed) if is_known else rest
    true_size = struct.pack(length, present + extra) if present + extra < 2**32 or is_wide else b""
    return Data(claimed if is_known else None, present, at, true_size)


def _read(file: BinaryIO, at: int, count: int) -> bytes:
    """Read `count` bytes. at: near the file's end at most, as a file cannot be sought to every 64-bit offset."""
    file.seek(at)
    return file.read(count)
