"""Decoding of the formats of phones and browsers with FFmpeg through PyAV, an optional package."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final

import numpy as np

from outrider.errors import AudioError
from outrider.prompts.containers import IMPLAUSIBLE, MEDIA

MAX_ERRORS: Final = 1000  # packets that cannot be decoded, before decoding ends
MAX_PLANES: Final = 7  # PyAV reads past the eighth plane of a frame, beyond its memory
SLACK_SECONDS: Final = 0.25  # tolerance for encoders' delay and padding, which some containers do not count
GAP_SECONDS: Final = 0.05
SIZED: Final = ("mov", "matroska", "asf")  # containers that store their length (for others FFmpeg estimates it)
FULL_SCALE: Final = {"u8": 2.0**7, "s16": 2.0**15, "s32": 2.0**31, "s64": 2.0**63, "flt": 1.0, "dbl": 1.0}


@dataclass
class State:
    """The state of a decoding.

    claimed: the container's length in seconds, if it has one. holes: the decoded seconds up to each gap.
    """

    claimed: float | None = None
    is_broken: bool = False
    seconds: float = 0.0
    lag: float | None = None  # of the decoded seconds behind the frames' times
    holes: list[float] = field(default_factory=list)

    def count(self, frame: Any) -> None:
        """Add a frame to the decoded seconds. A frame that is later than expected follows a gap."""
        if frame.time is not None:
            lag = frame.time - self.seconds
            if self.lag is not None and lag > self.lag + GAP_SECONDS:
                self.holes.append(self.seconds)
            self.lag = lag
        self.seconds += frame.samples / frame.sample_rate

    def warnings(self, seconds: float) -> Iterator[str]:
        """Yield warnings about missing audio, after `seconds` were decoded."""
        if self.claimed is not None and seconds < self.claimed - SLACK_SECONDS:
            lost = self.claimed - seconds
            if self.claimed > IMPLAUSIBLE * seconds:
                yield f"the header claims {self.claimed:.2f} s; {seconds:.2f} s were found"
                return
            yield f"the recording is damaged or breaks off: {lost:.2f} s of its {self.claimed:.2f} s are missing"
        elif self.is_broken:
            yield f"the recording is damaged or breaks off: {seconds:.2f} s of it could be decoded"


def is_installed() -> bool:
    """Return whether PyAV is installed."""
    return importlib.util.find_spec("av") is not None


def blocks(
    file: BinaryIO, kind: str, name: str, state: State, check: Callable[[int, int], None]
) -> Iterator[tuple[np.ndarray, int]]:
    """Decode the first audio stream: float32 [frames, channels] and the rate, block by block.

    kind: FFmpeg's name of the only demuxer to try, so that no playlist can name other files. check: refuses a rate or a
    number of channels.

    Raises:
        AudioError: it cannot be opened, or holds no audio.
    """
    import av

    try:
        container = av.open(file, format=kind, options={"protocol_whitelist": "none"}, metadata_errors="replace")
    except (av.FFmpegError, *LIBRARY_ERRORS) as error:
        names = ", ".join(MEDIA[kind])
        raise AudioError(
            f"{name}: no recording ({names}) that can be read ({getattr(error, 'strerror', None) or error})"
        ) from error
    with container:
        if not container.streams.audio:
            raise AudioError(f"{name}: holds no audio stream")
        stream = container.streams.audio[0]
        if stream.codec_context is None:
            raise AudioError(f"{name}: its audio codec is not supported: convert it (ffmpeg -i IN out.wav)")
        state.claimed = _claimed(container, stream, kind)
        stream.codec_context.thread_count = 1
        for frame in _frames(container, stream, state):
            check(frame.sample_rate, frame.layout.nb_channels)
            if frame.format.is_planar and frame.layout.nb_channels > MAX_PLANES:
                raise AudioError(
                    f"{name}: {frame.layout.nb_channels} channels; 1 to {MAX_PLANES} are supported in such files: "
                    f"convert it (ffmpeg -i IN -ac 1 out.wav)"
                )
            state.count(frame)
            yield _samples(frame), frame.sample_rate


LIBRARY_ERRORS: Final = (
    OSError,
    ValueError,
    TypeError,
    RuntimeError,
    OverflowError,
    MemoryError,
    LookupError,
    EOFError,
)


def _frames(container: Any, stream: Any, state: State) -> Iterator[Any]:
    import av

    errors = 0
    packets = container.demux(stream)
    while errors < MAX_ERRORS:
        try:
            packet = next(packets, None)
        except (av.FFmpegError, *LIBRARY_ERRORS):
            state.is_broken = True
            return
        if packet is None:
            return
        try:
            decoded = packet.decode()
        except (av.FFmpegError, *LIBRARY_ERRORS):
            state.is_broken, errors = True, errors + 1
            state.holes.append(state.seconds)
            continue
        yield from decoded


def _samples(frame: Any) -> np.ndarray:
    """Return the frame as float32 [frames, channels]."""
    values = frame.to_ndarray()
    channels, sample = frame.layout.nb_channels, frame.format.name.removesuffix("p")
    values = values.T if frame.format.is_planar else values.reshape(-1, channels)
    values = values.astype(np.float64 if sample in ("s32", "s64", "dbl") else np.float32)
    if sample == "u8":
        values -= FULL_SCALE["u8"]
    return np.ascontiguousarray(values / FULL_SCALE[sample], dtype=np.float32)


def _claimed(container: Any, stream: Any, kind: str) -> float | None:
    if kind in SIZED and stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base)
    if kind in SIZED and container.duration and len(container.streams) == 1:
        return float(container.duration) / 1e6
    return None
