"""Text files read with errors that name the file, and files written whole or not at all."""

from __future__ import annotations

import codecs
import errno
import fcntl
import json
import os
import re
import stat
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from outrider.errors import DataError, OutriderError, SettingsError

NO_TEMPORARY = "no temporary directory is writable (is the disk full?): free space, or set TMPDIR to a writable one"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MIN_AGE_S = 60.0  # a temporary file that is younger may still be about to be locked
WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # UTF-32's little-endian mark begins with the former


# Reading ----------------------------------------------------------------------------------------------------


def decode_text(data: bytes, name: str) -> str:
    """Decode UTF-8, with or without a byte-order mark.

    Raises:
        DataError: the bytes are in another encoding. The message has the file's `name`.
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
        SettingsError: they can. The message has the remedy.
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
    """Read a JSON file. DataError names the file and the fault."""
    return parse_json(read_text(path), str(path))


# Writing ----------------------------------------------------------------------------------------------------


def write_file(path: str | Path, data: str | bytes) -> None:
    """Write a file atomically: write beside it and rename. Readers find the old or the new one, also after a power cut.

    Devices and pipes are written in place.

    Raises:
        DataError: the path cannot be written.
        OutriderError: writing fails, for example on a full disk. An older file of that name is then unchanged.
    """
    check_writable(path)
    content = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
    try:
        if _is_special(path):
            Path(path).write_bytes(content)
        else:
            _replace(Path(os.path.realpath(path)), content)  # a link stays, and its target is replaced
    except OSError as error:
        raise OutriderError(f"{path} cannot be written: {error.strerror or error}") from error


def check_writable(path: str | Path) -> None:
    """Raise DataError if a file cannot be written. Call it before computing its contents."""
    try:
        target = Path(os.path.realpath(path))
        if _is_special(path):
            return
        is_directory, parent_is_directory = target.is_dir(), target.parent.is_dir()
        is_writable = os.access(target.parent, os.W_OK)
    except (OSError, ValueError) as error:  # a name that is too long, or one with a null byte
        raise DataError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from error
    if not str(path) or is_directory:
        raise DataError(f"{path or 'an empty name'} cannot be written: it is a directory")
    if not parent_is_directory:
        raise DataError(f"{path} cannot be written: no such directory: {target.parent}")
    if not is_writable:
        raise DataError(f"{path} cannot be written: permission denied")


def _is_special(path: str | Path) -> bool:
    """Return whether it is a device or a pipe, as /dev/stdout may be."""
    return Path(path).exists() and not Path(path).is_file() and not Path(path).is_dir()


def _replace(target: Path, content: bytes) -> None:
    for stale in target.parent.glob(f".{target.name[:200].translate(_GLOB_ESCAPES)}.*.partial"):
        _remove_unlocked(stale)
    partial = target.with_name(f".{target.name[:200]}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # another process removes it only after this one has ended
            if target.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync_directory(target.parent)


_GLOB_ESCAPES = str.maketrans({"[": "[[]", "*": "[*]", "?": "[?]"})


def _sync_directory(folder: Path) -> None:
    """Make a rename durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


# Temporary files --------------------------------------------------------------------------------------------


def temporary_text() -> IO[str]:
    """Return an open temporary file for text, which has no name.

    Raises:
        OutriderError: no temporary directory is writable.
    """
    try:
        return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
    except OSError as error:  # the directory may have become full since tempfile chose it
        if out_of_space(error) is not None:
            raise OutriderError(NO_TEMPORARY) from error
        where = f"in {tempfile.gettempdir()} (TMPDIR names another directory)"
        raise OutriderError(f"no temporary file can be made {where}: {error.strerror or error}") from error


def _remove_unlocked(path: Path) -> None:
    """Remove a file of ours that no running process holds a lock on. Leave everything else."""
    try:
        status = path.lstat()
        if (
            status.st_uid != os.getuid()
            or abs(time.time() - status.st_mtime) < MIN_AGE_S
            or stat.S_ISLNK(status.st_mode)
        ):
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:  # unreadable, or already removed
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except OSError:  # locked: its owner is running
        return
    finally:
        os.close(descriptor)
