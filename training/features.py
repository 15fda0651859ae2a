"""Log-mel features of many clips at once, equal to `WhisperFeatureExtractor`'s padded ones."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional
from transformers import WhisperFeatureExtractor

HOP, WINDOW, MELS, SAMPLE_RATE = 160, 400, 128, 16_000
CHUNK = 200  # mel frames that the audio tower sees at once (2 x n_window)


def extractor() -> WhisperFeatureExtractor:
    """The family's feature extractor."""
    return WhisperFeatureExtractor(feature_size=MELS, sampling_rate=SAMPLE_RATE, chunk_length=30)


def frames_of(samples: int) -> int:
    """Mel frames of a recording: those whose first sample is inside it."""
    return -(-samples // HOP)


def audio_tokens(frames: int) -> int:
    """Audio tokens of a recording: a convolution of stride 2, then pairs averaged."""
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1


class LogMel:
    """A batched log-mel front end on one device."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.filters = torch.from_numpy(extractor().mel_filters).to(device, torch.float32)
        self.window = torch.hann_window(WINDOW, device=device)

    def __call__(self, clips: list[npt.NDArray[np.int16]], frames: int) -> Tensor:
        """Features of the clips, zero beyond each one's end: float32 [clips, 128, frames]."""
        batch = np.zeros((len(clips), frames * HOP + 2 * WINDOW), np.int16)  # silence after it, as the extractor pads
        for row, clip in zip(batch, clips, strict=True):
            row[: len(clip)] = clip
        wave = torch.from_numpy(batch).to(self.device).float() / 32768
        power = torch.stft(wave, WINDOW, HOP, window=self.window, return_complex=True).abs() ** 2
        log = (self.filters.T @ power).clamp(min=1e-10).log10()
        log = torch.maximum(log, log.amax((1, 2), keepdim=True) - 8.0)
        log = ((log + 4.0) / 4.0)[:, :, :frames]
        lengths = torch.tensor([frames_of(len(clip)) for clip in clips], device=self.device)
        return log * (torch.arange(frames, device=self.device) < lengths[:, None])[:, None]


def features(clips: list[npt.NDArray[np.int16]], device: str, frames: int, batch: int = 512) -> Tensor:
    """Features of any number of clips, kept on the device: float16 [clips, 128, frames]."""
    log_mel = LogMel(device)
    out = torch.empty(len(clips), MELS, frames, dtype=torch.float16, device=device)
    for start in range(0, len(clips), batch):
        out[start : start + batch] = log_mel(clips[start : start + batch], frames).half()
    return out


def disturb(mels: Tensor, frames: Tensor, cut: int) -> tuple[Tensor, Tensor]:
    """Training only: another start and another microphone, at no cost, so that no clip is seen twice alike.

    `cut` frames are taken from the start, and each clip gets a random smooth frequency response within 4 dB.
    """
    knots = (torch.rand(len(mels), 1, 7, device=mels.device) - 0.5) * 0.2  # a tenth is 4 dB
    gains = functional.interpolate(knots, size=MELS, mode="linear", align_corners=True).transpose(1, 2)
    kept = frames - cut
    inside = torch.arange(mels.shape[2], device=mels.device) < kept[:, None]
    moved = functional.pad(mels[:, :, cut:], (0, cut)) + gains
    return moved * inside[:, None], kept


def check(clips: list[npt.NDArray[np.int16]], device: str) -> float:
    """The greatest difference from the extractor, with its padding and attention mask, over some clips."""
    frames = max(frames_of(len(clip)) for clip in clips)
    mine = LogMel(device)(clips, frames).cpu()
    worst = 0.0
    for row, clip in zip(mine, clips, strict=True):
        wave = clip.astype(np.float32) / 32768
        theirs = extractor()(wave, sampling_rate=SAMPLE_RATE, return_attention_mask=True, return_tensors="pt")
        count = int(theirs["attention_mask"].sum())
        if count != frames_of(len(clip)):
            raise ValueError(f"{len(clip)} samples: {count} frames by the extractor, {frames_of(len(clip))} here")
        worst = max(worst, float((row[:, :count] - theirs["input_features"][0, :, :count]).abs().max()))
    return worst
