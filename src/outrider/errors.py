"""Everything outrider raises on purpose.

OutriderError
├── InputError            what the user gave cannot be used; nothing was computed (exit code 2)
│   ├── SettingsError     a setting is out of range, unknown, or contradicts another
│   ├── PromptError       a prompt that is empty, too long, or of a kind the model does not take
│   │   └── ContextError  the prompt, or prompt and output together, are longer than a model holds
│   ├── AudioError        a recording that is unreadable, empty, too short, too long, or not finite
│   ├── DataError         a manifest, trace, gate or result file that is not what it must be; file and item are named
│   └── ModelError        a checkpoint that is missing, unreadable or unsuitable, named
│       └── VocabularyMismatch   the pair does not share a vocabulary
├── DecodingError         the model leaves nothing to choose from: NaN logits, or every token banned
├── CloudError            the cloud service and we could not work together
│   ├── CloudLost         it cannot be reached, or did not answer in time: trying again may help
│   └── CloudRefused      it answered, and said no: identity, a limit, another model; trying again does not help
└── StateError            tokens and cache disagree, or the two sides of a session: a bug or a bad peer
    └── OutOfSync         a request does not fit what the verifier knows of the sequence; both lengths are named
"""

from __future__ import annotations

import re

# C0 except newline and tab, DEL, C1, line separators, and what reorders or hides text.
_BIDI = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
CONTROLS = f"\x7f-\x9f\u2028\u2029\ufeff{_BIDI}\U000e0000-\U000e007f"
_UNSAFE = re.compile(f"[\x00-\x08\x0b-\x1f{CONTROLS}\ud800-\udfff]")


def escape_controls(text: str) -> str:
    """Escape control characters as Python does (`\\x1b`); newlines, tabs and all scripts stay."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


class OutriderError(Exception):
    """Base of every error that outrider raises on purpose.

    As text, control characters are escaped: a message may quote a chat template, a checkpoint or a cloud.
    """

    def __str__(self) -> str:
        return escape_controls(super().__str__())


class InputError(OutriderError):
    """What was given cannot be used. Raised before any model work."""


class SettingsError(InputError):
    """A setting is out of range, unknown, or contradicts another one."""


class PromptError(InputError):
    """A prompt that is empty, too long, or of a kind the model does not take."""


class ContextError(PromptError):
    """The prompt, or prompt and output together, are longer than a model holds."""


class AudioError(InputError):
    """A recording that is unreadable, empty, too short, too long, or holds non-finite samples."""


class DataError(InputError):
    """A manifest, trace, gate or result file that is not what it must be; the message names file and item."""


class ModelError(InputError):
    """A checkpoint that is missing, unreadable or unsuitable; the message names it."""


class VocabularyMismatch(ModelError):
    """Drafter and target do not share a vocabulary; the message names the first differing token."""


class DecodingError(OutriderError):
    """No token can be chosen: the model's logits are not numbers, or the constraints ban every token."""


class CloudError(OutriderError):
    """The cloud service and we could not work together."""


class CloudLost(CloudError):
    """The cloud cannot be reached, or did not answer in time, through all retries; trying again may help."""


class CloudRefused(CloudError):
    """The cloud answered and said no: who we are, a limit, another model. Trying again does not help."""


class StateError(OutriderError):
    """Tokens and KV cache, or edge and verifier, disagree about a sequence."""


class OutOfSync(StateError):
    """A request does not fit what the verifier knows of the sequence."""
