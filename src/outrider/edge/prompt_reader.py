"""Encoding of a pair's prompts: with the drafter, with the target's tokenizer, or as token ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from outrider.edge.target_tokenizer import read_target_tokenizer
from outrider.edge.text_codec import TextCodec, build_codecs
from outrider.engines.base import Engine, Prompt
from outrider.engines.prompt_lookup import PromptLookup
from outrider.errors import PromptError, SettingsError
from outrider.prompts.audio import Audio
from outrider.prompts.chat import PromptLike, encode
from outrider.verifiers.base import ModelInfo, Verifier, match_vocabularies, share_vocabulary
from outrider.verifiers.local import LocalVerifier, describe

if TYPE_CHECKING:  # importing it loads transformers
    from outrider.engines.torch.model_families import AudioFeatures

IDS_ONLY = (
    "without a drafter, prompts are token ids (--prompt-ids), or texts if the cloud sends its tokenizer: give an edge "
    "model for other texts and for recordings"
)
NO_TOKENIZER = (
    "prompt lookup without a tokenizer takes token ids (--prompt-ids), or texts if the cloud sends its tokenizer: for "
    "other texts and recordings, give the target's, as --edge lookup:DIRECTORY or prompt_lookup(DIRECTORY)"
)
NO_TEXTS = (
    "{} only writes captions of recordings: caption a recording, or give text models as --edge and --cloud (token ids, "
    "as --prompt-ids, are accepted)"
)


class IdsOnly:
    """The replacement of an edge model in cloud-only decoding across a network: prompts are token ids."""

    tokenizer = None

    def __init__(self, target: ModelInfo) -> None:
        self.name, self.vocab_size, self.max_length = target.name, target.vocab_size, target.max_length
        self.captions_only = target.captions_only


class PromptReader:
    """Encodes prompts as ids of the target.

    model, lookup: the drafters. reader: the target's tokenizer, if it differs from the model's. target: returns the
    description of the connected target.

    codecs: those of drafter and target if their tokenizers differ, otherwise None. side: the reader, if it encodes
    texts.
    """

    def __init__(
        self,
        model: Engine | None,
        lookup: PromptLookup | None,
        verifier: Verifier | None,
        reader: Engine | PromptLookup | None,
        target: Callable[[], ModelInfo],
    ) -> None:
        self._model, self._lookup, self._target = model, lookup, target
        self._local = verifier.engine if isinstance(verifier, LocalVerifier) else None
        self.side = _with_tokenizer(lookup if reader is None and model is None else reader)
        self.codecs = self._find_codecs() if verifier is not None else None

    def _find_codecs(self) -> tuple[TextCodec, TextCodec] | None:
        """Return the codecs of drafter and target if their tokenizers differ. The target's then encodes the prompts."""
        model, target = self._model, self._local if self.side is None else self.side
        if model is None or target is None or not needs_translation(model, target):
            return None
        self.side = target
        return build_codecs(model, target)

    def adopt(self, target: ModelInfo) -> PromptLookup | None:
        """Fetch the tokenizer of the target's server, use it for all further prompts, and return it.

        Return None if the server sends none, if a tokenizer was given, or if drafts cannot be translated to it.

        Raises:
            CloudLost, CloudRefused: as `read_target_tokenizer`.
            VocabularyMismatch: it is not the target's.
        """
        model = self._model
        if isinstance(self.side, PromptLookup) or (model is not None and not callable(model.tokenizer)):
            return None
        reader = read_target_tokenizer(target)
        if reader is not None:
            match_vocabularies(describe(reader), target)
            self.side = reader
            self.codecs = None if model is None else build_codecs(model, reader)
        return reader

    def check_accept(self, accept: str, *, needs_q: bool) -> None:
        """Raise SettingsError if the rule `accept` would compare probabilities (needs_q) of two vocabularies."""
        if needs_q and self.codecs is not None and self._model is not None:
            raise SettingsError(
                f"accept {accept} compares probabilities of the same ids, but {self._model.name} and "
                f"{self.encoder.name} have different tokenizers: use accept exact"
            )

    @property
    def encoder(self) -> Engine | PromptLookup | IdsOnly:
        """The engine or tokenizer that encodes prompts, or a replacement that takes token ids."""
        encoder = self._model if self._model is not None and self.codecs is None else self.side
        if encoder is not None:
            return encoder
        return self._local if self._local is not None else IdsOnly(self._target())

    @property
    def audio_encoder(self) -> AudioFeatures | None:
        """The part of the encoder that prepares recordings, or None."""
        audio_encoder: AudioFeatures | None = getattr(self.encoder, "audio", None)
        return audio_encoder if self.codecs is None else None

    @property
    def audio_seconds(self) -> float:
        """The longest recording that the models accept, in seconds, or 0 if they accept none."""
        audio_encoder = self.audio_encoder
        if audio_encoder is None:
            return 0.0
        target = self._target().audio_seconds
        return min(audio_encoder.max_seconds, target) if target else float(audio_encoder.max_seconds)

    def encode(self, prompt: PromptLike) -> Prompt:
        """Return the prompt as the models read it.

        Without a tokenizer, a text is encoded with the one that the target's server sends.

        Raises:
            PromptError, AudioError: the prompt cannot be encoded.
            CloudLost, CloudRefused, VocabularyMismatch: as `adopt`.
        """
        if isinstance(self.encoder, IdsOnly) and not is_ids(prompt):
            adopted = None if isinstance(prompt, Audio) else self.adopt(self._target())
            if adopted is None:
                raise PromptError(self._ids_only)
        encoder = self.encoder
        if isinstance(prompt, Audio):
            self._check_shares_tokenizer()
        return encode(encoder, prompt)

    def check_audio_support(self) -> None:
        """Raise PromptError unless recordings can be prompts."""
        encoder = self.encoder
        if isinstance(encoder, IdsOnly):
            raise PromptError(self._ids_only)
        self._check_shares_tokenizer()
        if self.audio_encoder is None and isinstance(encoder, PromptLookup):
            raise PromptError(
                f"{encoder.name} takes no audio: recordings need the target's config.json and preprocessor_config.json "
                "in the directory of its tokenizer"
            )
        if self.audio_encoder is None:
            raise PromptError(f"{encoder.name} takes no audio: give an audio-language model as --edge, or as the draft")

    @property
    def captions_only(self) -> bool:
        """True if the checkpoint is for recordings alone (`outrider_tasks` in its config.json)."""
        return bool(getattr(self.encoder, "captions_only", False))

    def check_accepts_text(self) -> None:
        """Raise PromptError if the models only caption recordings."""
        if self.captions_only:
            raise PromptError(NO_TEXTS.format(self.encoder.name))

    def _check_shares_tokenizer(self) -> None:
        if self._model is not None and self.codecs is not None:
            raise PromptError(
                f"{self._model.name} and {self.encoder.name} have different tokenizers: recordings need "
                "two models with the same tokenizer"
            )

    @property
    def _ids_only(self) -> str:
        """The reason why prompts must be token ids."""
        return IDS_ONLY if self._lookup is None else NO_TOKENIZER


def needs_translation(model: Engine | PromptLookup, target: Engine | PromptLookup) -> bool:
    """Return whether the tokenizers differ, and drafts can be translated through their text.

    If one side cannot encode texts, the handshake refuses different vocabularies.
    """
    if not (callable(model.tokenizer) and callable(target.tokenizer)):
        return False
    return not share_vocabulary(describe(model), describe(target))


def is_ids(prompt: PromptLike) -> bool:
    """Return whether a prompt is a list of token ids."""
    return isinstance(prompt, (list, tuple)) and not any(isinstance(part, dict) for part in prompt)


def _with_tokenizer(reader: Engine | PromptLookup | None) -> Engine | PromptLookup | None:
    """Return the reader, or None for a prompt lookup that encodes no texts."""
    return None if isinstance(reader, PromptLookup) and reader.tokenizer is None else reader
