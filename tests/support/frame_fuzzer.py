"""Frames that no edge would send: good ones, damaged; and any values that the types allow. All from a seed."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np

from outrider.prompts.media import pack_audio, pack_features
from outrider.protocol import schema
from tests.support.fakes import HashRows, greedy_tokens
from tests.support.raw_stream import CLOSE, carrying, generating, opening, resuming, verifying

V = 32
ROWS = HashRows(3, V, memory=3)
WAVE = (np.round(np.sin(np.arange(4800) / 9.0) * 9000) / 32768).astype(np.float32)
MEDIA = ((schema.AUDIO, pack_audio(WAVE)), (schema.FEATURES, pack_features(np.ones((4, 3), "f4"))))
HEARD = (5, 1, 1, 1, 6)
INTEGERS = (0, 1, 2, 3, 5, V - 1, V, 63, 64, 65, 256, 2**31 - 1, 2**31, 2**32 - 1)
DOUBLES = (0.0, -0.0, 1.0, 0.5, -1.0, 1e-320, 1e308, math.inf, -math.inf, math.nan)
TEXTS = ("", "exact", "residual", "rank:3", "margin:0.5", "rank:" + "9" * 60, "rank:-1", "typical:nan", "词", "x" * 99)
Live = dict[bytes, list[int]]  # sessions that there are, and their tokens


def target_tokens(ids: list[int], count: int) -> list[int]:
    return greedy_tokens(ROWS, ids, count)


def frames(seed: int, stream: int, live: Live) -> list[bytes]:
    """What one stream says."""
    rng = random.Random(f"{seed}:{stream}")
    script = rng.choice((talk, talk, hear, again, again, noise))(rng, live)
    made = [frame.SerializeToString() for frame in script]
    if rng.random() < 0.3:
        made.insert(rng.randrange(len(made) + 1), anything(rng).SerializeToString())
    if rng.random() < 0.2:
        rng.shuffle(made)
    if rng.random() < 0.8:
        at = rng.randrange(len(made))
        made[at] = mutated(rng, made[at], rng.choice(made))
    return made


def talk(rng: random.Random, live: Live) -> list[schema.Request]:
    """A session as it should be."""
    ids = [rng.randrange(V) for _ in range(rng.randint(1, 30))]
    accept = rng.choice(("", "", "rank:3", "typical:0.1", "residual"))
    warm = {"temperature": 1.0} if accept == "residual" or rng.random() < 0.2 else {}
    start = opening(ids, V, accept=accept, max_new_tokens=rng.choice((1, 9, 2**32 - 1)), **warm)
    return [start, *going_on(rng, ids), CLOSE][: rng.randint(1, 9)]


def going_on(rng: random.Random, ids: list[int], round_: int = 1) -> list[schema.Request]:
    made, ids = [], list(ids)
    for n in range(round_, round_ + rng.randint(0, 5)):
        new, drafts = target_tokens(ids, rng.choice((0, 0, 2))), rng.choice((0, 1, 3))
        ids += new
        block = target_tokens(ids, drafts + 1)
        made.append(verifying(n, len(ids), block[:-1], new))
        if rng.random() < 0.1:
            made[-1].verify.q.extend(schema.Shortlist(ids=[token], logp=[0.0]) for token in block[:-1])
        ids += block
    if rng.random() < 0.2:
        made.append(generating(99, len(ids)))
    return made


def hear(rng: random.Random, live: Live) -> list[schema.Request]:
    kind, data = rng.choice(MEDIA)
    if rng.random() < 0.5:
        data = mutated(rng, data, data)
    start = opening(HEARD, V, media=data, change=lambda frame: setattr(frame, "media", kind))
    return [start, *carrying(data, 2000), *going_on(rng, list(HEARD))]


def again(rng: random.Random, live: Live) -> list[schema.Request]:
    """A session that there is, or was."""
    if not live:
        return noise(rng, live)
    id_, ids = rng.choice(list(live.items()))
    kept = ids[: rng.choice((len(ids), len(ids) - 1, rng.randint(0, len(ids))))]
    return [resuming(id_, kept), *going_on(rng, kept, rng.choice((1, 2, 50)))]


def noise(rng: random.Random, live: Live) -> list[schema.Request]:
    return [anything(rng) for _ in range(rng.randint(1, 4))]


def anything(rng: random.Random) -> schema.Request:
    """A frame of some kind with any values that its types allow."""
    request = schema.Request()
    name = rng.choice(("open", "media", "verify", "generate", "resume", "close"))
    frame = getattr(request, name)
    frame.SetInParent()
    fill(rng, frame)
    if name == "open" and rng.random() < 0.8:  # let it get past the first checks
        frame.protocol, frame.vocab_size = schema.VERSION, V
        frame.fingerprint, frame.model = b"scripted-32", b"scripted-weights"
    return request


def fill(rng: random.Random, message: Any) -> None:
    for field_ in message.DESCRIPTOR.fields:
        if rng.random() < 0.4:
            continue
        if field_.is_repeated:
            count = rng.choice((1, 2, 5, 70, 300))
            target = getattr(message, field_.name)
            if field_.message_type is not None and field_.message_type.GetOptions().map_entry:
                key, entry = (field_.message_type.fields_by_name[name] for name in ("key", "value"))
                target.update({value(rng, key): value(rng, entry) for _ in range(count)})
            elif field_.message_type is not None:
                for _ in range(min(count, 5)):
                    fill(rng, target.add())
            else:
                target.extend(value(rng, field_) for _ in range(count))
        elif field_.message_type is not None:
            fill(rng, getattr(message, field_.name))
        else:
            setattr(message, field_.name, value(rng, field_))


def value(rng: random.Random, field_: Any) -> Any:
    match field_.type:
        case field_.TYPE_DOUBLE | field_.TYPE_FLOAT:
            return rng.choice([d for d in DOUBLES if field_.type == field_.TYPE_DOUBLE or not 3e38 < abs(d) < math.inf])
        case field_.TYPE_BOOL:
            return rng.random() < 0.5
        case field_.TYPE_BYTES:
            return rng.randbytes(rng.choice((0, 8, 16, 900)))
        case field_.TYPE_STRING:
            return rng.choice(TEXTS)
        case field_.TYPE_ENUM:
            return rng.choice((0, 1, 2, 3, 4, 77))
        case field_.TYPE_UINT64:
            return rng.choice((*INTEGERS, 2**64 - 1))
        case _:
            return rng.choice(INTEGERS)


def mutated(rng: random.Random, data: bytes, other: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    match rng.randrange(7):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + other[rng.randrange(len(other) + 1) :]
        case 2:
            return data[:at] + rng.randbytes(rng.randint(1, 9)) + data[at:]
        case 3:  # the largest varint, where one may stand
            return data[:at] + b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01" + data[at + 1 :]
        case 4:
            return rng.randbytes(rng.choice((0, 1, 10, 300)))
        case 5:
            return data[:at] + data[at + rng.randint(1, 4) :]
        case _:
            out = bytearray(data)
            for _ in range(rng.choice((1, 1, 2, 8)) if out else 0):
                out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
            return bytes(out)
