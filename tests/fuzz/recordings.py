"""Fuzz the reader of recordings: `python -m tests.fuzz.recordings --seconds 600` (make fuzz SECONDS=600).

Recordings of every format that libsndfile and PyAV write are truncated, flipped, spliced, given lying headers. Each is
read twice, with fresh memory and the decoders' buffers filled with another byte each time: outputs that differ hold
samples that were never written. Only AudioError and RequestError may be raised, and memory is limited. A read that
takes longer than any bounded one is a failure, as is an exception in a callback of a decoder. What fails is kept in the
folder of --keep.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import ctypes
import hashlib
import io
import random
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from outrider.errors import AudioError
from outrider.gateway.errors import RequestError
from outrider.gateway.recordings import CONTAINERS, decode_recording
from outrider.prompts.media import pack_audio, unpack_audio
from outrider.prompts.recordings import Limits, decode_bytes

M_PERTURB = -6
MEMORY = 3 << 30  # bytes of address space beyond what is in use at the start
LONGEST = 60.0  # seconds of processor time; a bounded read takes one
SECONDS = 0.4
HOSTILE = [0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 655350, 1 << 20, 1 << 28]
HOSTILE += [1 << 62, (1 << 63) - 25, (1 << 63) - 1, 1 << 63, (1 << 64) - 25, (1 << 64) - 1]
MEDIA = [("m4a", "mp4", "aac"), ("mp4", "mp4", "alac"), ("webm", "webm", "libopus"), ("aac", "adts", "aac")]
MEDIA += [("wma", "asf", "wmav2"), ("mka", "matroska", "flac"), ("3gp", "3gp", "aac")]


def tone(rate: int, seconds: float = SECONDS) -> np.ndarray:
    """A tone with some noise: float32 [samples]."""
    t = np.arange(int(rate * seconds)) / rate
    noise = np.random.default_rng(0).standard_normal(len(t))
    return (0.4 * np.sin(2 * np.pi * 220 * t) + 0.02 * noise).astype(np.float32)


def sound_files() -> Iterator[tuple[str, bytes]]:
    """A recording of every format and subtype that libsndfile writes."""
    for kind in sorted(set(soundfile.available_formats()) - {"RAW", "SD2"}):
        for subtype in sorted(soundfile.available_subtypes(kind)):
            rate = 48_000 if subtype == "OPUS" else 8_000 if kind == "WVE" else 16_000
            file = io.BytesIO()
            with contextlib.suppress(soundfile.LibsndfileError):
                soundfile.write(file, tone(rate), rate, format=kind, subtype=subtype)
                yield f"{kind}-{subtype}", file.getvalue()


def media_file(
    container: str,
    codec: str,
    seconds: float = SECONDS,
    options: dict[str, str] | None = None,
    path: Path | None = None,
) -> bytes:
    """A recording that PyAV writes, by way of a file where the container needs one."""
    import av

    file, rate = io.BytesIO(), 48_000
    with av.open(file if path is None else str(path), "w", format=container, options=options or {}) as out:
        stream: Any = out.add_stream(codec, rate=rate, layout="mono")
        stream.bit_rate = 64_000
        wave = (tone(rate, seconds) * 32767).astype(np.int16)
        for start in range(0, len(wave), 960):
            frame = av.AudioFrame.from_ndarray(wave[None, start : start + 960], format="s16", layout="mono")
            frame.sample_rate, frame.pts = rate, start
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return file.getvalue() if path is None else path.read_bytes()


def seeds() -> dict[str, bytes]:
    """All recordings that mutations start from."""
    found = dict(sound_files())
    with contextlib.suppress(ImportError):
        import av

        for name, container, codec in MEDIA:
            with contextlib.suppress(av.FFmpegError, ValueError):
                found[f"{name}-{codec}"] = media_file(container, codec)
    return found


def mutated(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """A damaged or lying variant of `data`."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at = rng.randrange(max(1, min(len(out), rng.choice([64, 512, 1 << 20]))))
        match rng.randrange(7):
            case 0:
                del out[at:]
            case 1:
                out[at : at + 1] = bytes([rng.randrange(256)])
            case 2:
                order, width = rng.choice([("little", 4), ("big", 4), ("little", 8), ("big", 8), ("little", 2)])
                out[at : at + width] = (rng.choice(HOSTILE) & ((1 << 8 * width) - 1)).to_bytes(width, order)  # type: ignore[arg-type]
            case 3:
                out[at : at + rng.randrange(2000)] = b""
            case 4:
                out[at:] = other[rng.randrange(max(1, len(other))) :]
            case 5:
                out[at : at + rng.randrange(500)] = rng.choice([b"\0", b"\xff"]) * rng.randrange(500)
            case 6:
                out += other
    return bytes(out)


def outcome(read: Callable[[], np.ndarray]) -> str:
    """What became of a read: its samples' hash, or the kind of the refusal."""
    try:
        wave = read()
    except (AudioError, RequestError) as error:
        return type(error).__name__
    if len(wave) > 16_000 * 31:
        return "longer than the limit"
    return hashlib.sha256(wave.tobytes()).hexdigest()


def readers(data: bytes) -> dict[str, Callable[[], np.ndarray]]:
    """Each surface that reads recordings."""
    text = base64.b64encode(data).decode()
    found: dict[str, Callable[[], np.ndarray]] = {
        "command line": lambda: decode_bytes(data, "the file", Limits(30.0, 2**25)).waveform,
        "gateway": lambda: decode_recording(text, random.Random(len(data)).choice(list(CONTAINERS)), 30.0).waveform,
    }
    if b"fLaC" in data[:8]:
        found["cloud"] = lambda: unpack_audio(data if data[:1] == b"\0" else b"\0" + data, 30.0)
    return found


@contextlib.contextmanager
def poisoned(byte: int) -> Iterator[None]:
    """Fill with a byte: memory from malloc, and the buffers that libsndfile is given."""
    whole = soundfile.SoundFile.read

    def read(self: Any, *args: Any, out: Any = None, **more: Any) -> Any:
        assert out is not None, "a buffer that nobody filled"
        out.view(np.uint8)[...] = byte
        return whole(self, *args, out=out, **more)

    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    mallopt(M_PERTURB, byte)
    soundfile.SoundFile.read = read  # type: ignore[method-assign]
    try:
        yield
    finally:
        soundfile.SoundFile.read = whole  # type: ignore[method-assign]
        mallopt(M_PERTURB, 0)


@contextlib.contextmanager
def caught(found: list[str], surface: str) -> Iterator[None]:
    """Add exceptions that cannot be raised, such as those in a callback of libsndfile, to what is wrong."""
    before = sys.unraisablehook
    sys.unraisablehook = lambda args: found.append(f"{surface}: not raised: {args.exc_value!r}: {args.err_msg}")
    try:
        yield
    finally:
        sys.unraisablehook = before


def faults(data: bytes) -> list[str]:
    """What is wrong with how a file is read."""
    found: list[str] = []
    for surface, read in readers(data).items():
        started = time.process_time()
        try:
            outcomes = []
            for byte in (0x21, 0x3C):
                with poisoned(byte), caught(found, surface):
                    outcomes.append(outcome(read))
        except Exception as error:  # noqa: BLE001  every other kind is the finding
            found.append(f"{surface}: {type(error).__name__}: {error}")
            continue
        if outcomes[0] != outcomes[1]:
            found.append(f"{surface}: samples that were never written")
        if outcomes[0] == "longer than the limit":
            found.append(f"{surface}: longer than the limit")
        if time.process_time() - started > LONGEST:
            found.append(f"{surface}: {time.process_time() - started:.0f} s")
    return found


def run(seed: int, seconds: float, cases: int, keep: Path | None) -> int:
    """Fuzz for so many seconds or cases; returns how many files were read wrongly."""
    limit_memory()
    corpus = seeds()
    corpus["packed"] = pack_audio((np.rint(tone(16_000) * 32768) / 32768).astype(np.float32))
    names, rng = sorted(corpus), random.Random(seed)
    end, done, failed = time.monotonic() + seconds, 0, 0
    current = None if keep is None else keep / f"running-{seed}.bin"  # left behind by a crash
    while done < cases and time.monotonic() < end:
        name = names[done % len(names)]
        data = mutated(rng, corpus[name], corpus[rng.choice(names)])
        if current is not None:
            current.write_bytes(data)
        wrong = faults(data)
        done, failed = done + 1, failed + bool(wrong)
        for what in wrong:
            print(f"{name}: {what}", flush=True)  # noqa: T201
        if wrong and keep is not None:
            (keep / f"{name}-{seed}-{done}.bin").write_bytes(data)
    if current is not None:
        current.unlink(missing_ok=True)
    print(f"{done} recordings, {failed} read wrongly")  # noqa: T201
    return failed


def limit_memory() -> None:
    """Make an allocation that no recording needs fail."""
    used = next((int(line.split()[1]) << 10 for line in _status() if line.startswith("VmSize")), 0)
    if used:
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


def _status() -> list[str]:
    path = Path("/proc/self/status")
    return path.read_text().splitlines() if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--cases", type=int, default=1 << 60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("error")
    if given.keep is not None:
        given.keep.mkdir(parents=True, exist_ok=True)
    sys.exit(run(given.seed, given.seconds, given.cases, given.keep) > 0)


if __name__ == "__main__":
    main()
