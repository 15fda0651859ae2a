"""The twelve bundled clips: held-out sentences, varied attributes, six Chinese and six English.

python -m training.clips --out src/outrider/demo/clips
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import soundfile

from training.augment import recording
from training.grammar import Attributes, caption, emotion
from training.speech import SAMPLE_RATE

SEED = 800_000_000
PER_LANGUAGE = 6
WORDINGS = 3  # of a reference caption; the first one is what the cloud model was trained to write


def choose(lang: str, seed: int) -> list[tuple[int, Attributes, str]]:
    """Seeds of clips of one language, each of another mood and another sentence."""
    picked: list[tuple[int, Attributes, str]] = []
    moods: set[str] = set()
    texts: set[str] = set()
    while len(picked) < PER_LANGUAGE:
        spec, _ = recording(seed, held_out=True, lang=lang, plain=True)
        attributes = dict(spec.attributes)
        if emotion(attributes) not in moods and spec.text not in texts:
            picked.append((seed, attributes, spec.text))
            moods.add(emotion(attributes))
            texts.add(spec.text)
        seed += 1
    return picked


def write(directory: Path, seed: int) -> list[dict[str, Any]]:
    """Write the clips as 16 kHz mono Ogg Vorbis and `clips.json`; returns what the latter holds."""
    directory.mkdir(parents=True, exist_ok=True)
    listed: list[dict[str, Any]] = []
    for lang in ("zh", "en"):
        for number, (clip_seed, attributes, text) in enumerate(choose(lang, seed), 1):
            _, wave = recording(clip_seed, held_out=True, lang=lang, plain=True)
            name = f"{lang}-{number}.ogg"
            soundfile.write(directory / name, wave, SAMPLE_RATE, format="OGG", subtype="VORBIS")
            facts = {**attributes, "emotion": emotion(attributes)}
            references = [caption(facts, "default", lang, shift) for shift in range(WORDINGS)]
            shown = {"file": name, "lang": lang, "text": text, "attributes": facts, "references": references}
            listed.append(shown)
    (directory / "clips.json").write_text(json.dumps(listed, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    return listed


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args()
    print(json.dumps({"clips": len(write(args.out, args.seed)), "directory": str(args.out)}))


if __name__ == "__main__":
    main()
