"""Make the bundled pair: speech, tokenizer, the cloud model, then the edge model from the cloud's own captions.

    python -m training.train --out DIR [--clips N --steps-cloud N --steps-edge N --device cpu|cuda --seed S]

Progress goes to stderr; stdout ends with one JSON line (the evaluation of the saved pair).
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from outrider.prompts.captions import LANGUAGES
from training import tokenizer as tokens
from training.data import EVALUATION_SEED, synthesise
from training.evaluate import Heard, Job, captions, evaluate, hear_all
from training.features import CHUNK, audio_tokens, check, disturb
from training.grammar import caption, combinations
from training.model import SIZES, create, load, logits, parameters, save
from training.tokenizer import Prompts

logger = logging.getLogger("training")

TASK_WEIGHTS = {"default": 5, "detailed": 3, "concise": 2}
OTHER_LANGUAGE = 0.2  # how often a clip is captioned in the language that is not spoken
MAX_CUT = 25  # up to this many frames less one are cut from the start of a batch
Answer = Callable[[Job], list[int]]


@dataclass(frozen=True)
class Plan:
    """How long to train and at what peak rate; `seconds` (0: no limit) shortens the schedule on a slow machine."""

    steps: int
    rate: float
    seconds: float = 0.0


def draw_job(clip: int, heard: Heard, rng: random.Random) -> Job:
    """A task and a language for a clip."""
    task = rng.choices(list(TASK_WEIGHTS), list(TASK_WEIGHTS.values()))[0]
    spoken = heard.clips.langs[clip]
    other = next(lang for lang in LANGUAGES if lang != spoken)
    return clip, task, other if rng.random() < OTHER_LANGUAGE else spoken


def buckets(heard: Heard, chosen: list[int]) -> list[list[int]]:
    """Clips grouped by how many chunks of the audio tower they fill, so that a batch pads little."""
    groups: dict[int, list[int]] = {}
    for clip in chosen:
        groups.setdefault(-(-heard.counts[clip] // CHUNK), []).append(clip)
    return list(groups.values())


def batches(
    heard: Heard, draw: Callable[[list[int]], list[Job]], pool: list[int], rng: random.Random
) -> Iterator[list[Job]]:
    """Endless batches of jobs, each of clips of one length group."""
    groups = buckets(heard, pool)
    weights = [len(group) for group in groups]
    while True:
        yield draw(rng.choices(groups, weights)[0])


def collate(heard: Heard, prompts: Prompts, jobs: list[Job], answer: Answer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ids [B, S], labels [B, L] of the last L positions (-100 but on the answer), mels [B, 128, T], frames [B]."""
    device, cut = heard.mels.device, random.randrange(MAX_CUT)
    counts = [heard.counts[clip] - cut for clip, _, _ in jobs]
    asked = [prompts.prompt(task, lang, audio_tokens(n)) for (_, task, lang), n in zip(jobs, counts, strict=True)]
    said = [answer(job) for job in jobs]
    width = max(len(a) + len(s) for a, s in zip(asked, said, strict=True))
    tail = width - min(map(len, asked)) + 1
    ids = np.full((len(jobs), width), prompts.pad)
    labels = np.full((len(jobs), width + 1), -100)
    for i, (a, s) in enumerate(zip(asked, said, strict=True)):
        ids[i, : len(a) + len(s)] = a + s
        labels[i, len(a) : len(a) + len(s)] = s
    rows = _to(np.array([clip for clip, _, _ in jobs]), device)
    total = -(-(max(counts) + cut) // CHUNK) * CHUNK
    mels, frames = disturb(heard.mels[:, :, :total][rows].float(), heard.frames[rows], cut)
    return _to(ids, device), _to(labels[:, -tail:], device), mels, frames


def _to(array: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    """Onto the device without waiting for it."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def fit(model: Any, prompts: Prompts, heard: Heard, source: Iterator[list[Job]], answer: Answer, plan: Plan) -> None:
    """Train with AdamW, warm-up and cosine decay."""
    device = heard.mels.device.type
    model.train()
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=plan.rate, betas=(0.9, 0.98), weight_decay=0.05, fused=device == "cuda"
    )
    began, losses, step, progress = time.monotonic(), [], 0, 0.0 if plan.steps else 1.0
    while progress < 1:
        for group in optimiser.param_groups:
            group["lr"] = plan.rate * min(1.0, (step + 1) / 300) * (0.02 + 0.49 * (1 + math.cos(math.pi * progress)))
        ids, labels, mels, frames = collate(heard, prompts, next(source), answer)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            rows = logits(model, prompts.audio, ids, mels, frames, labels.shape[1])
        loss = functional.cross_entropy(rows.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.detach())
        step += 1
        spent = time.monotonic() - began
        progress = max(step / plan.steps, spent / plan.seconds if plan.seconds else 0.0)
        if step % 500 == 0 or progress >= 1:
            logger.info("step %d loss %.4f %.1f s", step, float(torch.stack(losses[-100:]).mean()), spent)
    model.eval()


def train_cloud(prompts: Prompts, heard: Heard, args: argparse.Namespace) -> Any:
    """The cloud model, on the grammar's captions of the true attributes."""
    rng = random.Random(args.seed)
    table = {
        (tuple(a.values()), task, lang): prompts.answer(caption(a, task, lang))
        for a in combinations()
        for task in TASK_WEIGHTS
        for lang in LANGUAGES
    }
    keys = [tuple(a.values()) for a in heard.clips.attributes]

    def draw(group: list[int]) -> list[Job]:
        return [draw_job(clip, heard, rng) for clip in rng.choices(group, k=args.batch_cloud)]

    if args.init is None:
        model = create(SIZES["cloud"], prompts.tokenizer, args.seed).to(heard.mels.device)
    else:
        model = load(args.init, torch.float32, str(heard.mels.device))
    source = batches(heard, draw, list(range(len(heard.clips))), rng)
    plan = Plan(args.steps_cloud, args.rate_cloud, args.seconds_cloud)
    fit(model, prompts, heard, source, lambda job: table[keys[job[0]], job[1], job[2]], plan)
    return model


def cloud_captions(cloud: Any, prompts: Prompts, heard: Heard, args: argparse.Namespace) -> dict[Job, list[int]]:
    """What the cloud model says of training clips: what the edge model learns from (sequence-level distillation)."""
    rng = random.Random(args.seed + 1)
    pool = range(min(len(heard.clips), args.distil_clips))
    jobs = sorted({draw_job(clip, heard, rng) for clip in pool for _ in range(2)})
    began = time.monotonic()
    said = dict(zip(jobs, captions(cloud, prompts, heard, jobs, 2048), strict=True))
    logger.info("%d captions by the cloud model in %.1f s", len(said), time.monotonic() - began)
    return said


def train_edge(said: dict[Job, list[int]], prompts: Prompts, heard: Heard, steps: int, args: argparse.Namespace) -> Any:
    """The edge model, on the cloud model's captions."""
    rng = random.Random(args.seed + 2)
    asked: dict[int, list[Job]] = {}
    for job in said:
        asked.setdefault(job[0], []).append(job)

    def draw(group: list[int]) -> list[Job]:
        return [rng.choice(asked[clip]) for clip in rng.choices(group, k=args.batch)]

    model = create(SIZES["edge"], prompts.tokenizer, args.seed).to(heard.mels.device)
    source = batches(heard, draw, list(asked), rng)
    fit(model, prompts, heard, source, said.__getitem__, Plan(steps, args.rate_edge))
    return model


def settings() -> argparse.Namespace:
    """The command line; the defaults are those of the bundled pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init", type=Path, help="a cloud checkpoint to go on from; --steps-cloud 0 keeps it")
    parser.add_argument("--clips", type=int, default=48_000)
    parser.add_argument("--distil-clips", type=int, default=16_000)
    parser.add_argument("--steps-cloud", type=int, default=8_000)
    parser.add_argument("--seconds-cloud", type=float, default=0.0, help="shorten the cloud's schedule to this long")
    parser.add_argument(
        "--steps-edge", type=int, nargs="+", default=[1_500], help="several: edge, edge-2… to choose from"
    )
    parser.add_argument("--rate-cloud", type=float, default=1e-3)
    parser.add_argument("--rate-edge", type=float, default=2e-3)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--batch-cloud", type=int, default=256)
    parser.add_argument("--evaluation-clips", type=int, default=500)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Command line."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    args = settings()
    random.seed(args.seed)
    began = time.monotonic()
    clips = synthesise(args.clips, args.seed * 1_000_000 + 1, held_out=False)
    logger.info(
        "%d clips in %.1f s; features differ by %.1g",
        len(clips),
        time.monotonic() - began,
        check(clips.samples[:16], args.device),
    )
    heard = hear_all(clips, args.device)
    prompts = Prompts(tokens.build())
    cloud = train_cloud(prompts, heard, args)
    save(cloud, prompts.tokenizer, args.out / "cloud")
    said = cloud_captions(cloud, prompts, heard, args)
    names = ["edge", *(f"edge-{n}" for n in range(2, len(args.steps_edge) + 1))]
    for name, steps in zip(names, args.steps_edge, strict=True):
        edge = train_edge(said, prompts, heard, steps, args)
        save(edge, prompts.tokenizer, args.out / name)
        logger.info(
            "%s: %d weights, cloud: %d; %.1f s", name, parameters(edge), parameters(cloud), time.monotonic() - began
        )
    del heard
    test = hear_all(synthesise(args.evaluation_clips, EVALUATION_SEED, held_out=True), args.device)
    cloud = load(args.out / "cloud", torch.float32, args.device)
    for name in reversed(names):
        edge = load(args.out / name, torch.float32, args.device)
        print(json.dumps({"name": name, **evaluate(edge, cloud, prompts, test, k=5, batch=512)}), flush=True)


if __name__ == "__main__":
    main()
