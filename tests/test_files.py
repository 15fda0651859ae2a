"""Files are read in UTF-8 with or without a byte-order mark, and written whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider import files
from outrider.decoding.gate_file import read_gate_file
from outrider.engines.load import map_load_errors
from outrider.errors import DataError, InputError, OutriderError, SettingsError
from outrider.evals.convert import _table
from outrider.evals.manifest import load_set
from outrider.evals.store import Store, _lock
from outrider.planning.json_validation import read_object, rows
from outrider.planning.traces import read_traces

BOM = b"\xef\xbb\xbf"
READERS = [read_gate_file, read_traces, load_set, read_object, lambda path: rows(path, dict), _table]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_byte_order_mark_changes_nothing(text: str) -> None:
    assert files.decode_text(BOM + text.encode(), "a") == text


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("read", READERS)
def test_another_encoding_is_named(read: object, encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes('{"a": 1}'.encode(encoding))
    with pytest.raises(DataError, match=r"a\.json.*UTF-16.*UTF-8"):
        read(path)  # type: ignore[operator]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("content", [b"\xff\xff\xff\xff", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000, b"{", b""])
def test_hostile_json_is_a_data_error(read: object, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.json"):
        read(path)  # type: ignore[operator]


def test_a_mark_before_traces_and_manifests_is_read_over(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(BOM + b'{"a": 1}\n')
    assert rows(tmp_path / "a.jsonl", dict) == ({"a": 1},)
    assert files.read_json(tmp_path / "a.jsonl") == {"a": 1}


# Writing ----------------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gate.json"
    files.write_file(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutriderError, match=r"gate\.json cannot be written: No space left on device"):
        files.write_file(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_device_and_a_link_stay_what_they_are(tmp_path: Path) -> None:
    files.write_file("/dev/null", "text")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    files.write_file(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640


def test_a_pipe_by_its_name_is_written_to() -> None:
    code = "from outrider.files import write_file; write_file('/dev/stdout', 'text')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "text"


def test_dev_full_is_a_typed_error() -> None:
    with pytest.raises(OutriderError, match="/dev/full cannot be written: No space"):
        files.write_file("/dev/full", "text")


def test_a_partial_file_of_a_killed_process_is_removed_and_one_being_written_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MIN_AGE_S", 0.0)
    stale, held = tmp_path / ".a[1].json.1.partial", tmp_path / ".a[1].json.2.partial"
    for path in (stale, held):
        path.write_text("half")
    with held.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        files.write_file(tmp_path / "a[1].json", "{}")
    assert not stale.exists()
    assert held.exists()


def test_a_disk_that_is_full_at_the_lock_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OutriderError, match="lock cannot be written: No space left"):
        _lock(tmp_path)


def test_a_deeply_nested_run_json_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"run\.json"):
        Store(tmp_path, {})


def test_a_run_that_differs_is_still_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(BOM + json.dumps({"a": 1}).encode())
    with pytest.raises(SettingsError, match="another run"):
        Store(tmp_path, {"a": 2})


@pytest.mark.parametrize("name", ["", "nowhere/a", "file/a", "folder", "x" * 300, "a\0b"])
def test_a_place_that_cannot_be_written_is_bad_input(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError if len(name) < 300 else OutriderError, match="cannot be written"):
        files.write_file(name, "")


def test_files_are_written_here_alone() -> None:
    source = Path(files.__file__).parent
    writing = re.compile(r"\.write_text\(|\.write_bytes\(|open\([^)]*[\"'][wx]b?\+?[\"']")
    found = {path.name for path in source.rglob("*.py") if writing.search(path.read_text(encoding="utf-8"))}
    assert found == {"files.py"}


def test_what_prints_goes_through_the_escaping_writer() -> None:
    source = Path(files.__file__).parent
    bare = re.compile(r"(?<!\w)Console\(|RichHandler")
    found = {path.name for path in source.rglob("*.py") if bare.search(path.read_text(encoding="utf-8"))}
    assert not found  # terminal.py derives from Console


# A full disk --------------------------------------------------------------------------------------------------


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No directory for temporary files, as on a full disk."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/no/such/directory"])


@pytest.mark.usefixtures("nowhere")
def test_no_temporary_directory_is_named_with_the_remedy() -> None:
    with pytest.raises(OutriderError, match=r"no temporary directory is writable.*disk full.*TMPDIR"):
        files.temporary_text()


@pytest.mark.parametrize(("number", "text"), [(errno.ENOSPC, "disk full.*TMPDIR"), (errno.EROFS, "TMPDIR.*Read-only")])
def test_a_disk_that_became_full_is_named(number: int, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(OutriderError, match=text):
        files.temporary_text()


FULL = OSError(errno.ENOSPC, "No space left on device", "/cache/a")


def caused(outer: Exception, inner: Exception) -> Exception:
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FULL, "/cache/a cannot be written: No space left on device"),
        (caused(DataError("a"), FULL), "/cache/a cannot be written"),
        (caused(DataError("a"), caused(RuntimeError("b"), FULL)), "/cache/a cannot be written"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "No space left on device"),
        (FileNotFoundError(2, "No usable temporary directory found in ['/tmp']"), "TMPDIR"),
        (FileNotFoundError(2, "No such file or directory", "a"), None),
        (caused(DataError("a"), ValueError("b")), None),
    ],
)
def test_a_full_disk_is_found_behind_other_errors(error: Exception, said: str | None) -> None:
    found = files.out_of_space(error)
    assert found is None if said is None else said in str(found)


def test_a_full_disk_is_no_fault_of_a_model() -> None:
    with (
        pytest.raises(OutriderError, match="cannot load m: /cache/a cannot be written") as caught,
        map_load_errors("m"),
    ):
        raise FULL
    assert not isinstance(caught.value, InputError)
