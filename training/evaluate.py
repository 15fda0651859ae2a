"""What the pair can do: attribute accuracy, acceptance rate of the edge's drafts, float32 against bfloat16.

    python -m training.evaluate --edge DIR --cloud DIR --clips 500 --device cpu

Prints one JSON line. The clips are synthesised here, from seeds and sentences that training never uses.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from outrider.prompts.captions import TASKS
from training.data import EVALUATION_SEED, Clips, synthesise
from training.features import CHUNK, audio_tokens, features, frames_of
from training.grammar import NAMES, parse, stated
from training.model import load, logits
from training.tokenizer import Prompts

MAX_NEW_TOKENS = 128


@dataclass
class Heard:
    """Clips with their features on a device. mels: float16 [N, 128, T]; frames: int64 [N]; counts: its list."""

    clips: Clips
    mels: Tensor
    frames: Tensor
    counts: list[int]


Job = tuple[int, str, str]  # clip, task, language of the caption


def hear_all(clips: Clips, device: str) -> Heard:
    """Compute the features of all clips once."""
    frames = torch.tensor([frames_of(len(samples)) for samples in clips.samples])
    total = -(-int(frames.max()) // CHUNK) * CHUNK
    return Heard(clips, features(clips.samples, device, total), frames.to(device), frames.tolist())


@torch.inference_mode()
def captions(model: Any, prompts: Prompts, heard: Heard, jobs: list[Job], batch: int = 256) -> list[list[int]]:
    """Greedy captions by plain `generate`, in left-padded batches; each ends with its end token."""
    order = sorted(range(len(jobs)), key=lambda j: (jobs[j][1], heard.counts[jobs[j][0]]))
    written: list[list[int]] = [[] for _ in jobs]
    for start in range(0, len(order), batch):
        picked = order[start : start + batch]
        for j, ids in zip(picked, _generate(model, prompts, heard, [jobs[j] for j in picked]), strict=True):
            written[j] = ids
    return written


def _generate(model: Any, prompts: Prompts, heard: Heard, jobs: list[Job]) -> list[list[int]]:
    rows = torch.tensor([clip for clip, _, _ in jobs], device=heard.frames.device)
    frames = heard.frames[rows]
    longest = int(frames.max())
    asked = [prompts.prompt(t, g, audio_tokens(n)) for (_, t, g), n in zip(jobs, frames.tolist(), strict=True)]
    width = max(map(len, asked))
    ids = torch.tensor([[prompts.pad] * (width - len(p)) + p for p in asked], device=rows.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in asked], device=rows.device)
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        input_features=heard.mels[rows, :, :longest].to(model.dtype),
        feature_attention_mask=(torch.arange(longest, device=rows.device) < frames[:, None]).long(),
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
    )[:, width:]
    return [row[: row.index(prompts.end) + 1] if prompts.end in row else row for row in out.tolist()]


@torch.inference_mode()
def agreement(edge: Any, prompts: Prompts, heard: Heard, job: Job, target: list[int]) -> list[bool]:
    """For each token of the cloud's caption: would the edge, given the caption so far, have drafted it?"""
    clip, task, lang = job
    frames = heard.frames[clip : clip + 1]
    total = -(-int(frames) // CHUNK) * CHUNK
    prompt = prompts.prompt(task, lang, audio_tokens(int(frames)))
    ids = torch.tensor([prompt + target], device=frames.device)
    rows = logits(edge, prompts.audio, ids, heard.mels[clip : clip + 1, :, :total].to(edge.dtype), frames)
    drafted = rows[0, len(prompt) - 1 : -1].argmax(-1).tolist()
    return [a == b for a, b in zip(drafted, target, strict=True)]


def walk(agrees: list[bool], k: int) -> tuple[int, int, int]:
    """Greedy exact verification in blocks of k: accepted drafts, verified drafts, rounds.

    A block is accepted up to the first disagreement; the cloud then adds one token (correction or bonus). A block
    ends early at an agreed end of caption; after a disagreement it is counted whole.
    """
    at = accepted = verified = rounds = 0
    while at < len(agrees):
        block = agrees[at : at + k]
        good = block.index(False) if False in block else len(block)
        accepted += good
        verified += len(block) if good == len(block) else k
        rounds += 1
        at += good + 1
    return accepted, verified, rounds


def accuracy(prompts: Prompts, heard: Heard, jobs: list[Job], written: list[list[int]]) -> dict[str, dict[str, float]]:
    """Per spoken language and attribute, the share of captions that state it and state it right."""
    right: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for (clip, task, lang), ids in zip(jobs, written, strict=True):
        truth = stated(heard.clips.attributes[clip], task)
        said = parse(prompts.decode(ids), lang)
        for name in truth:
            right[heard.clips.langs[clip]][name].append(said.get(name) == truth[name])
        right[heard.clips.langs[clip]]["all"].append(said == truth)
    return {g: {n: _mean(table[n]) for n in (*NAMES, "all")} for g, table in sorted(right.items())}


def _mean(values: list[bool]) -> float:
    return round(sum(values) / max(1, len(values)), 4)


def acceptance(
    edge: Any, prompts: Prompts, heard: Heard, jobs: list[Job], target: list[list[int]], k: int
) -> dict[str, float]:
    """Accepted over verified draft tokens at block length k, overall, per task and per language."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    rounds = tokens = 0
    for job, ids in zip(jobs, target, strict=True):
        accepted, verified, blocks = walk(agreement(edge, prompts, heard, job, ids), k)
        rounds, tokens = rounds + blocks, tokens + len(ids)
        for key in ("overall", job[1], job[2]):
            sums[key][0] += accepted
            sums[key][1] += verified
    rates = {key: round(a / max(1, v), 4) for key, (a, v) in sums.items()}
    return {**rates, "tokens_per_round": round(tokens / max(1, rounds), 3)}


def evaluate(edge: Any, cloud: Any, prompts: Prompts, heard: Heard, k: int, batch: int) -> dict[str, Any]:
    """Every figure of the model card, for two loaded models."""
    jobs = [(clip, task, heard.clips.langs[clip]) for task in TASKS for clip in range(len(heard.clips))]
    cloud_says = captions(cloud, prompts, heard, jobs, batch)
    edge_says = captions(edge, prompts, heard, jobs, batch)
    full = [j for j, job in enumerate(jobs) if job[1] != "concise"]
    brief = [j for j, job in enumerate(jobs) if job[1] == "concise"]

    def scores(says: list[list[int]], picked: list[int]) -> dict[str, dict[str, float]]:
        return accuracy(prompts, heard, [jobs[j] for j in picked], [says[j] for j in picked])

    return {
        "clips": len(heard.clips),
        "cloud": scores(cloud_says, full),
        "edge": scores(edge_says, full),
        "cloud_concise": scores(cloud_says, brief),
        "edge_concise": scores(edge_says, brief),
        "same_caption": _mean([a == b for a, b in zip(cloud_says, edge_says, strict=True)]),
        f"acceptance_k{k}": acceptance(edge, prompts, heard, jobs, cloud_says, k),
    }


def same_in_bfloat16(directory: Path, prompts: Prompts, heard: Heard, device: str, batch: int) -> float:
    """The share of default captions that float32 and bfloat16 arithmetic write alike."""
    jobs = [(clip, "default", heard.clips.langs[clip]) for clip in range(len(heard.clips))]
    says = [captions(load(directory, t, device), prompts, heard, jobs, batch) for t in (torch.float32, torch.bfloat16)]
    return _mean([a == b for a, b in zip(*says, strict=True)])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edge", type=Path, required=True)
    parser.add_argument("--cloud", type=Path, required=True)
    parser.add_argument("--clips", type=int, default=500)
    parser.add_argument("--seed", type=int, default=EVALUATION_SEED)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("-k", type=int, default=5)
    args = parser.parse_args()
    began = time.monotonic()
    prompts = Prompts(Tokenizer.from_file(str(args.cloud / "tokenizer.json")))
    heard = hear_all(synthesise(args.clips, args.seed, held_out=True), args.device)
    dtype = getattr(torch, args.dtype)
    edge, cloud = (load(directory, dtype, args.device) for directory in (args.edge, args.cloud))
    result = evaluate(edge, cloud, prompts, heard, args.k, args.batch)
    result["float32_equals_bfloat16"] = {
        name: same_in_bfloat16(directory, prompts, heard, args.device, args.batch)
        for name, directory in (("edge", args.edge), ("cloud", args.cloud))
    }
    result["seconds"] = round(time.monotonic() - began, 1)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
