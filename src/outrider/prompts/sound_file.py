"""Decoding with libsndfile, forwards only and through callbacks that never raise."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Final

import numpy as np

BLOCK: Final = 2**14  # frames
STEP: Final = 2**9  # frames per call if an error discards all frames of the call
UNKNOWN: Final = 2**40  # frames from here on stand for an unknown length
SUPPORTED: Final = ("WAV", "WAVEX", "RF64", "W64", "AIFF", "AU", "CAF", "NIST", "FLAC", "OGG", "MP3", "MPEG")
READ_AHEAD: Final = ("FLAC", "OGG", "MP3", "MPEG")  # formats with decoders that read ahead
LIBRARY_ERRORS: Final = (
    RuntimeError,
    TypeError,
    ValueError,
    OverflowError,
    AssertionError,
    KeyError,
    OSError,
    MemoryError,
)
MAX_OFFSET: Final = 2**63 - 1  # that a callback can return to libsndfile


class Unreadable(Exception):
    """The error for a file that libsndfile cannot decode."""


class Source:
    """A file object for libsndfile. No method raises, as an exception in a callback is only printed.

    size: the file's end for libsndfile. patches: bytes that replace those of the file, by offset.
    """

    def __init__(self, file: BinaryIO, real: int, size: int | None = None) -> None:
        self._file, self._real, self._at = file, real, 0
        self.size = real if size is None else size
        self.patches: dict[int, bytes] = {}
        self.is_exhausted = False  # libsndfile requested bytes beyond the end

    def reopen(self, patches: dict[int, bytes]) -> Source:
        """Return the same file from its beginning, with other patches."""
        source = Source(self._file, self._real, self.size)
        source.patches = patches
        return source

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to an offset from the beginning, the position or the end, and return the position."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        self._at = min(max(0, start + offset), MAX_OFFSET)
        return self._at

    def tell(self) -> int:
        """Return the position."""
        return self._at

    @property
    def unread(self) -> int:
        """The number of unread bytes."""
        return self._real - self._at

    def readinto(self, buffer: bytearray | memoryview) -> int:
        """Read up to the length of `buffer` into it, and return the number of bytes."""
        if self._at >= self._real and self._at >= self.size - 128:  # libsndfile looks for a tag at the very end
            found = bytes(min(len(buffer), max(0, self.size - self._at)))
        else:
            found = self._patched(self._read(len(buffer)))
            self.is_exhausted |= len(found) < len(buffer)
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)

    def read(self, count: int) -> bytes:
        """Return up to `count` bytes."""
        buffer = bytearray(count)
        return bytes(buffer[: self.readinto(buffer)])

    def _read(self, count: int) -> bytes:
        try:
            self._file.seek(self._at)
            return self._file.read(count)
        except OSError:  # as at the end of the file
            return b""

    def _patched(self, found: bytes) -> bytes:
        for at, new in self.patches.items():
            here = at - self._at
            if -len(new) < here < len(found):
                first, last = max(here, 0), min(here + len(new), len(found))
                found = found[:first] + new[first - here : last - here] + found[last:]
        return found


def open_sound(source: Source) -> Any:
    """Open a SoundFile that is read forwards only, so that libsndfile does not use its length.

    Raises:
        Unreadable: libsndfile cannot open it.
    """
    import soundfile

    class Forwards(soundfile.SoundFile):
        def seekable(self) -> bool:
            return False

    try:
        return Forwards(source)
    except (soundfile.SoundFileError, *LIBRARY_ERRORS) as error:
        raise Unreadable(getattr(error, "error_string", str(error))) from error


class SoundDecoder:
    """One pass of libsndfile over a file.

    kind, rate, claimed: the format, the sampling rate and the header's number of frames, once the file is open.
    frames: the number of decoded frames. is_broken: decoding ended at an error.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.kind, self.rate, self.claimed, self.frames = "", 0, 0, 0
        self.is_broken = False

    @property
    def seconds(self) -> float:
        """The decoded seconds."""
        return self.frames / self.rate if self.rate else 0.0

    def blocks(self, check: Callable[[int, int], None]) -> Iterator[np.ndarray]:
        """Decode to the end: float32 [frames, channels], block by block. A block is valid until the next one.

        check: refuses a rate or a number of channels.

        Raises:
            Unreadable: libsndfile cannot open the file, or the format is one whose truncation cannot be detected.
        """
        with open_sound(self.source) as sound:
            self.kind, self.rate, self.claimed = sound.format, sound.samplerate, sound.frames
            if self.kind not in SUPPORTED:
                raise Unreadable(f"{self.kind} files are not supported: their truncation cannot be detected")
            check(sound.samplerate, sound.channels)
            is_plain = sound.subtype.startswith(("PCM", "FLOAT", "DOUBLE")) and sound.format not in READ_AHEAD
            step, buffer = BLOCK if is_plain else STEP, np.zeros((BLOCK, sound.channels), np.float32)
            self.source.is_exhausted, filled, read = False, 0, -1
            while read:
                read = self._read(sound, buffer[filled : filled + step])
                self.frames += read
                filled += read
                if filled and (not read or filled + step > BLOCK):
                    yield buffer[:filled]
                    filled = 0

    def _read(self, sound: Any, target: np.ndarray) -> int:
        """Decode into `target` and return the number of frames, 0 at the end."""
        import soundfile

        if self.kind == "FLAC" and self.claimed < UNKNOWN:  # data after the last frame would be an error as well
            target = target[: max(0, self.claimed - self.frames)]
        if not len(target):
            return 0
        try:
            read = len(sound.read(len(target), dtype="float32", always_2d=True, out=target))
        except (soundfile.SoundFileError, *LIBRARY_ERRORS):
            self.is_broken = True
            return 0
        reads_ahead = sound.format in READ_AHEAD or sound.subtype.startswith("DWVW")
        if self.source.is_exhausted and read == len(target) and not reads_ahead:
            self.is_broken = True  # the decoder fills missing input from an earlier block
            return 0
        return read
