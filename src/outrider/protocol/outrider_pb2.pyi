from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MediaKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NONE: _ClassVar[MediaKind]
    AUDIO: _ClassVar[MediaKind]
    FEATURES: _ClassVar[MediaKind]
    WITHHELD: _ClassVar[MediaKind]
    KEPT: _ClassVar[MediaKind]

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BONUS: _ClassVar[Reason]
    CORRECTION: _ClassVar[Reason]
NONE: MediaKind
AUDIO: MediaKind
FEATURES: MediaKind
WITHHELD: MediaKind
KEPT: MediaKind
BONUS: Reason
CORRECTION: Reason

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeAnswer(_message.Message):
    __slots__ = ("protocol", "name", "vocab_size", "row_count", "eos_ids", "fingerprint", "model", "max_length", "audio_seconds", "max_drafts", "tokenizer", "captions_only", "quantization")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    EOS_IDS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    AUDIO_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    CAPTIONS_ONLY_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    name: str
    vocab_size: int
    row_count: int
    eos_ids: _containers.RepeatedScalarFieldContainer[int]
    fingerprint: bytes
    model: bytes
    max_length: int
    audio_seconds: float
    max_drafts: int
    tokenizer: bytes
    captions_only: bool
    quantization: str
    def __init__(self, protocol: _Optional[int] = ..., name: _Optional[str] = ..., vocab_size: _Optional[int] = ..., row_count: _Optional[int] = ..., eos_ids: _Optional[_Iterable[int]] = ..., fingerprint: _Optional[bytes] = ..., model: _Optional[bytes] = ..., max_length: _Optional[int] = ..., audio_seconds: _Optional[float] = ..., max_drafts: _Optional[int] = ..., tokenizer: _Optional[bytes] = ..., captions_only: _Optional[bool] = ..., quantization: _Optional[str] = ...) -> None: ...

class VocabularyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VocabularyPart(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tokens: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TokenizerPart(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("open", "media", "verify", "generate", "resume", "close")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    open: Open
    media: Media
    verify: Verify
    generate: Generate
    resume: Resume
    close: Close
    def __init__(self, open: _Optional[_Union[Open, _Mapping[str, object]]] = ..., media: _Optional[_Union[Media, _Mapping[str, object]]] = ..., verify: _Optional[_Union[Verify, _Mapping[str, object]]] = ..., generate: _Optional[_Union[Generate, _Mapping[str, object]]] = ..., resume: _Optional[_Union[Resume, _Mapping[str, object]]] = ..., close: _Optional[_Union[Close, _Mapping[str, object]]] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("opened", "verdict", "error")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    opened: Opened
    verdict: Verdict
    error: Error
    def __init__(self, opened: _Optional[_Union[Opened, _Mapping[str, object]]] = ..., verdict: _Optional[_Union[Verdict, _Mapping[str, object]]] = ..., error: _Optional[_Union[Error, _Mapping[str, object]]] = ...) -> None: ...

class Ids(_message.Message):
    __slots__ = ("token", "count")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    token: _containers.RepeatedScalarFieldContainer[int]
    count: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token: _Optional[_Iterable[int]] = ..., count: _Optional[_Iterable[int]] = ...) -> None: ...

class Settings(_message.Message):
    __slots__ = ("max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "no_repeat_ngram_size", "ignore_eos", "suppress_tokens", "repetition_window", "frequency_penalty", "presence_penalty", "logit_bias", "logprobs", "grammar")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    NO_REPEAT_NGRAM_SIZE_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    SUPPRESS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_WINDOW_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    no_repeat_ngram_size: int
    ignore_eos: bool
    suppress_tokens: _containers.RepeatedScalarFieldContainer[int]
    repetition_window: int
    frequency_penalty: float
    presence_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    logprobs: int
    grammar: Grammar
    def __init__(self, max_new_tokens: _Optional[int] = ..., min_new_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., no_repeat_ngram_size: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., suppress_tokens: _Optional[_Iterable[int]] = ..., repetition_window: _Optional[int] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., logprobs: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping[str, object]]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("protocol", "fingerprint", "model", "settings", "accept", "vocab_size", "prompt", "committed", "media", "conditioning", "base")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    CONDITIONING_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    fingerprint: bytes
    model: bytes
    settings: Settings
    accept: str
    vocab_size: int
    prompt: Ids
    committed: Ids
    media: MediaKind
    conditioning: bytes
    base: Base
    def __init__(self, protocol: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., model: _Optional[bytes] = ..., settings: _Optional[_Union[Settings, _Mapping[str, object]]] = ..., accept: _Optional[str] = ..., vocab_size: _Optional[int] = ..., prompt: _Optional[_Union[Ids, _Mapping[str, object]]] = ..., committed: _Optional[_Union[Ids, _Mapping[str, object]]] = ..., media: _Optional[_Union[MediaKind, str]] = ..., conditioning: _Optional[bytes] = ..., base: _Optional[_Union[Base, _Mapping[str, object]]] = ...) -> None: ...

class Base(_message.Message):
    __slots__ = ("session", "length", "digest")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    length: int
    digest: bytes
    def __init__(self, session: _Optional[bytes] = ..., length: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Media(_message.Message):
    __slots__ = ("data", "more")
    DATA_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    more: bool
    def __init__(self, data: _Optional[bytes] = ..., more: _Optional[bool] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    def __init__(self, session: _Optional[bytes] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("session", "length", "digest")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    length: int
    digest: bytes
    def __init__(self, session: _Optional[bytes] = ..., length: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Verify(_message.Message):
    __slots__ = ("round", "base_length", "new_ids", "draft_ids", "q")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NEW_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_IDS_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    round: int
    base_length: int
    new_ids: _containers.RepeatedScalarFieldContainer[int]
    draft_ids: _containers.RepeatedScalarFieldContainer[int]
    q: _containers.RepeatedCompositeFieldContainer[Shortlist]
    def __init__(self, round: _Optional[int] = ..., base_length: _Optional[int] = ..., new_ids: _Optional[_Iterable[int]] = ..., draft_ids: _Optional[_Iterable[int]] = ..., q: _Optional[_Iterable[_Union[Shortlist, _Mapping[str, object]]]] = ...) -> None: ...

class Shortlist(_message.Message):
    __slots__ = ("ids", "logp")
    IDS_FIELD_NUMBER: _ClassVar[int]
    LOGP_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    logp: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., logp: _Optional[_Iterable[float]] = ...) -> None: ...

class Generate(_message.Message):
    __slots__ = ("round", "base_length", "new_ids")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NEW_IDS_FIELD_NUMBER: _ClassVar[int]
    round: int
    base_length: int
    new_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, round: _Optional[int] = ..., base_length: _Optional[int] = ..., new_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("round", "accepted", "next_token", "reason", "near_ties", "audited", "disagreed", "queue_tenths", "compute_tenths", "cached", "logprobs")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    NEXT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NEAR_TIES_FIELD_NUMBER: _ClassVar[int]
    AUDITED_FIELD_NUMBER: _ClassVar[int]
    DISAGREED_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TENTHS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_TENTHS_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    round: int
    accepted: int
    next_token: int
    reason: Reason
    near_ties: _containers.RepeatedScalarFieldContainer[int]
    audited: int
    disagreed: int
    queue_tenths: int
    compute_tenths: int
    cached: int
    logprobs: _containers.RepeatedCompositeFieldContainer[Shortlist]
    def __init__(self, round: _Optional[int] = ..., accepted: _Optional[int] = ..., next_token: _Optional[int] = ..., reason: _Optional[_Union[Reason, str]] = ..., near_ties: _Optional[_Iterable[int]] = ..., audited: _Optional[int] = ..., disagreed: _Optional[int] = ..., queue_tenths: _Optional[int] = ..., compute_tenths: _Optional[int] = ..., cached: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[Shortlist, _Mapping[str, object]]]] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "retry_after_ms")
    class Code(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNSPECIFIED: _ClassVar[Error.Code]
        INVALID: _ClassVar[Error.Code]
        PROTOCOL: _ClassVar[Error.Code]
        VOCABULARY: _ClassVar[Error.Code]
        MODEL: _ClassVar[Error.Code]
        SETTINGS: _ClassVar[Error.Code]
        PROMPT: _ClassVar[Error.Code]
        CONDITIONING: _ClassVar[Error.Code]
        UNKNOWN_SESSION: _ClassVar[Error.Code]
        BASE_LENGTH: _ClassVar[Error.Code]
        LIMIT: _ClassVar[Error.Code]
        TOO_LARGE: _ClassVar[Error.Code]
        DRAINING: _ClassVar[Error.Code]
        DECODING: _ClassVar[Error.Code]
        INTERNAL: _ClassVar[Error.Code]
    UNSPECIFIED: Error.Code
    INVALID: Error.Code
    PROTOCOL: Error.Code
    VOCABULARY: Error.Code
    MODEL: Error.Code
    SETTINGS: Error.Code
    PROMPT: Error.Code
    CONDITIONING: Error.Code
    UNKNOWN_SESSION: Error.Code
    BASE_LENGTH: Error.Code
    LIMIT: Error.Code
    TOO_LARGE: Error.Code
    DRAINING: Error.Code
    DECODING: Error.Code
    INTERNAL: Error.Code
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    code: Error.Code
    message: str
    retry_after_ms: int
    def __init__(self, code: _Optional[_Union[Error.Code, str]] = ..., message: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ("keep",)
    KEEP_FIELD_NUMBER: _ClassVar[int]
    keep: bool
    def __init__(self, keep: _Optional[bool] = ...) -> None: ...
