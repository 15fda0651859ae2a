"""Text files read with errors that name the file, files written whole or not at all, and temporary folders."""

from __future__ import annotations

import codecs
import errno
import fcntl
import json
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from outrider.errors import DataError, OutriderError, SettingsError

PREFIX = "outrider-link-"  # of temporary folders
NO_TEMPORARY = "no temporary directory is writable (is the disk full?): free space, or set TMPDIR to a writable one"
LONGEST = 103  # bytes of a socket's path, on every system
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
YOUNG_S = 60.0  # a temporary folder or file that is younger may still be about to be locked
WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # UTF-32's little-endian mark begins with the former


# Reading ----------------------------------------------------------------------------------------------------


def decode_text(data: bytes, name: str) -> str:
    """Decode UTF-8, with or without a byte-order mark.

    Raises:
        DataError: the bytes are in another encoding. `name` is the file's.
    """
    marked = data.startswith(codecs.BOM_UTF8)
    if data.startswith(WIDE_MARKS) or (b"\0" in data[:4] and not marked):
        raise DataError(f"{name} is UTF-16 or UTF-32 text: save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        place = f"byte {error.start} ({data[error.start]:#04x})"
        raise DataError(f"{name} is not UTF-8 text: {place}; save it as UTF-8") from error


def read_text(path: str | Path) -> str:
    """Read a text file in UTF-8, with or without a byte-order mark.

    Raises:
        DataError: the file cannot be read, or is in another encoding.
    """
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError, MemoryError) as error:
        reason = (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
        raise DataError(f"{path} cannot be read: {reason}") from error
    return decode_text(data, str(path))


def check_private(path: Path, file: int, kind: str = "") -> None:
    """Refuse a file that other users of this machine can use. file: its descriptor. kind: for the message.

    Raises:
        SettingsError: with the remedy.
    """
    if os.name == "posix" and os.fstat(file).st_mode & 0o077:
        name = f"{path}, {kind}," if kind else str(path)
        raise SettingsError(f"{name} is open to other users of this machine: chmod 600 {path}")


def parse_json(text: str, name: str) -> Any:
    """Parse JSON. Invalid text of any kind raises DataError with `name`."""
    if not text.strip():
        raise DataError(f"{name} is empty")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise DataError(f"{name}: not valid JSON: nested too deeply") from error
    except ValueError as error:  # a syntax error, or a number with thousands of digits
        raise DataError(f"{name}: not valid JSON: {error}") from error


def read_json(path: str | Path) -> Any:
    """Read a JSON file; DataError names the file and the fault."""
    return parse_json(read_text(path), str(path))


# Writing ----------------------------------------------------------------------------------------------------


def write_file(path: str | Path, data: str | bytes) -> None:
    """Write a file atomically: write beside it and rename. Also after a power cut, readers find the old or the new one.

    Devices and pipes are written in place.

    Raises:
        DataError: the place cannot be used.
        OutriderError: the file system refuses, as a full one does. An older file of that name is then unchanged.
    """
    check_place(path)
    content = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
    try:
        if _is_special(path):
            Path(path).write_bytes(content)
        else:
            _replace(Path(os.path.realpath(path)), content)  # a link stays, and its target is replaced
    except OSError as error:
        raise OutriderError(f"{path} cannot be written: {error.strerror or error}") from error


def check_place(path: str | Path) -> None:
    """Raise DataError if a file cannot be written. Call it before the work whose result goes there."""
    try:
        place = Path(os.path.realpath(path))
        if _is_special(path):
            return
        is_folder, parent_is_folder = place.is_dir(), place.parent.is_dir()
        is_writable = os.access(place.parent, os.W_OK)
    except (OSError, ValueError) as error:  # a name that is too long, or one with a null byte
        raise DataError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from error
    if not str(path) or is_folder:
        raise DataError(f"{path or 'an empty name'} cannot be written: it is a directory")
    if not parent_is_folder:
        raise DataError(f"{path} cannot be written: no such directory: {place.parent}")
    if not is_writable:
        raise DataError(f"{path} cannot be written: permission denied")


def _is_special(path: str | Path) -> bool:
    """Return whether it is a device or a pipe, as /dev/stdout may be."""
    return Path(path).exists() and not Path(path).is_file() and not Path(path).is_dir()


def _replace(place: Path, content: bytes) -> None:
    for stale in place.parent.glob(f".{place.name[:200].translate(_GLOB)}.*.partial"):
        _remove_unlocked(stale)
    partial = place.with_name(f".{place.name[:200]}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # another process removes it only after this one has ended
            if place.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(place.stat().st_mode))
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            partial.replace(place)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync_folder(place.parent)


_GLOB = str.maketrans({"[": "[[]", "*": "[*]", "?": "[?]"})


def _sync_folder(folder: Path) -> None:
    """Make a rename durable."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def out_of_space(error: BaseException | None) -> str | None:
    """Return a sentence about a full disk if one caused the error, directly or as the cause of another, else None."""
    while error is not None:
        if isinstance(error, FileNotFoundError) and "No usable temporary directory" in str(error):  # tempfile's
            return NO_TEMPORARY
        if isinstance(error, OSError) and error.errno in FULL:
            return f"{error.filename or 'output'} cannot be written: {error.strerror}"
        if _IN_RUST.search(str(error)):
            return str(error).strip().splitlines()[0]
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


_IN_RUST = re.compile(rf"\(os error ({'|'.join(map(str, FULL))})\)")  # libraries in Rust raise other types


# Temporary folders ------------------------------------------------------------------------------------------


class TemporaryFolder:
    """A folder for this process's sockets. It is locked, so that the next process can remove it after a `kill -9`.

    path: its place. close() removes it and may be called again.

    Raises:
        OutriderError: no temporary directory is writable, or its path is too long for a socket.
    """

    def __init__(self) -> None:
        with _temporary():
            place = os.path.join(tempfile.gettempdir(), f"{PREFIX}{'x' * 12}", "s99")
            if len(os.fsencode(place)) > LONGEST:
                raise OutriderError(
                    f"{tempfile.gettempdir()} is too long a path for sockets: set TMPDIR to a shorter one"
                )
            for stale in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
                _remove_unlocked(stale)
            self._owner, self._lock = os.getpid(), -1
            self.path = os.path.join(tempfile.gettempdir(), f"{PREFIX}{secrets.token_hex(6)}")
            _FOLDERS.add(self)  # first: Ctrl-C may come at any moment
            os.mkdir(self.path, 0o700)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        if self not in _FOLDERS or os.getpid() != self._owner:  # a forked child leaves the folder to its parent
            return
        with suppress(OSError):  # already removed, by a cleaner of temporary files
            _remove(Path(self.path))
        if self._lock >= 0:
            os.close(self._lock)
        _FOLDERS.discard(self)


_FOLDERS: set[TemporaryFolder] = set()


def remove_temporary_folders() -> None:
    """Close this process's temporary folders, before an end that runs no exit hooks."""
    for folder in tuple(_FOLDERS):
        folder.close()


def temporary_text() -> IO[str]:
    """Return an open temporary file for text, which has no name.

    Raises:
        OutriderError: no temporary directory is writable.
    """
    with _temporary():
        return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")


@contextmanager
def _temporary() -> Iterator[None]:
    """Map the errors of a temporary file's creation: the directory may have become full since tempfile chose it."""
    try:
        yield
    except OSError as error:
        if out_of_space(error) is not None:
            raise OutriderError(NO_TEMPORARY) from error
        where = f"in {tempfile.gettempdir()} (TMPDIR names another directory)"
        raise OutriderError(f"no temporary file can be made {where}: {error.strerror or error}") from error


def _remove_unlocked(path: Path) -> None:
    """Remove a file or folder of ours that no running process holds a lock on; leave everything else."""
    try:
        found = path.lstat()
        if found.st_uid != os.getuid() or abs(time.time() - found.st_mtime) < YOUNG_S or stat.S_ISLNK(found.st_mode):
            return
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:  # unreadable, or already removed
        return
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(path)
    except OSError:  # locked: its owner is running
        return
    finally:
        os.close(opened)


def _remove(path: Path) -> None:
    """Remove a file, or a folder that holds nothing but sockets."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    for entry in path.iterdir():
        if entry.is_socket():
            entry.unlink(missing_ok=True)
    path.rmdir()
