"""Files as libsndfile reads them, forwards only and through callbacks that never raise."""

from __future__ import annotations

import os
from typing import Any, BinaryIO, Final

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
    """libsndfile cannot open the file."""


class Source:
    """A file object for libsndfile. No method raises, as an exception in a callback is only printed.

    size: the file's end for libsndfile. patches: bytes that replace those of the file, by offset.
    """

    def __init__(self, file: BinaryIO, real: int, size: int | None = None) -> None:
        self._file, self._real, self._at = file, real, 0
        self.size = real if size is None else size
        self.patches: dict[int, bytes] = {}
        self.is_exhausted = False  # libsndfile asked for more than there is

    def reopen(self, patches: dict[int, bytes]) -> Source:
        """Return the same file from its beginning, with other patches."""
        source = Source(self._file, self._real, self.size)
        source.patches = patches
        return source

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        self._at = min(max(0, start + offset), MAX_OFFSET)
        return self._at

    def tell(self) -> int:
        return self._at

    @property
    def unread(self) -> int:
        """The number of unread bytes."""
        return self._real - self._at

    def readinto(self, buffer: Any) -> int:
        if self._at >= self._real and self._at >= self.size - 128:  # the place of a tag at the very end: none there
            found = bytes(min(len(buffer), max(0, self.size - self._at)))
        else:
            found = self._patched(self._read(len(buffer)))
            self.is_exhausted |= len(found) < len(buffer)
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)

    def read(self, count: int) -> bytes:
        buffer = bytearray(count)
        return bytes(buffer[: self.readinto(buffer)])

    def _read(self, count: int) -> bytes:
        try:
            self._file.seek(self._at)
            return self._file.read(count)
        except OSError:  # behave as at the end of the file
            return b""

    def _patched(self, found: bytes) -> bytes:
        for at, new in self.patches.items():
            here = at - self._at
            if -len(new) < here < len(found):
                first, last = max(here, 0), min(here + len(new), len(found))
                found = found[:first] + new[first - here : last - here] + found[last:]
        return found


def open_sound(source: Source) -> Any:
    """Open a SoundFile that is only read forwards, so that its length is never used.

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
