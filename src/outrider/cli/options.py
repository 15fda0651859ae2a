"""The options that commands share, as frozen groups. Importing this costs no model library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter, Token

from outrider.config import OnLoop, Scope
from outrider.errors import SettingsError

if TYPE_CHECKING:
    from outrider.api import SpeculativeDecoder

MODELS = Group("Models", sort_key=1)
SPECULATION = Group("Speculation", sort_key=2)
DECODING = Group("Decoding", sort_key=3)
OUTPUT = Group("Output", sort_key=4)


def _whole(type_: Any, tokens: Sequence[Token]) -> int:
    """A whole number; left to itself the parser cuts 1.5 down to 1."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise SettingsError(f"{tokens[0].keyword or 'argument'}: {tokens[0].value!r} is not a whole number") from None


def _block_length(type_: Any, tokens: Sequence[Token]) -> int | str:
    return "auto" if tokens[0].value == "auto" else _whole(type_, tokens)


Whole = Annotated[int, Parameter(converter=_whole)]


@Parameter(name="*", group=MODELS)
@dataclass(frozen=True)
class Models:
    """Which models, where.

    Parameters
    ----------
    edge
        The drafter: a directory, hub id, .gguf file, "demo", or "none" for cloud-only.
    cloud
        The verifier: local:MODEL, or "none" for edge-only.
    dtype
        auto is float32 on a CPU and the checkpoint's own on a GPU.
    device
        A torch device such as cpu or cuda:0; auto is cuda where there is one.
    """

    edge: str = "demo"
    cloud: str = "local:demo"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"


@Parameter(name="*", group=SPECULATION)
@dataclass(frozen=True)
class Speculation:
    """How drafting and verification work together.

    Parameters
    ----------
    k
        Tokens per block, 1 to 64, or auto: for as long as the drafter is sure.
    gate
        Which blocks are verified: always, never, SIGNAL:THRESHOLD with SIGNAL entropy, margin, maxprob or logprob,
        SIGNAL.mean for the mean over the block, any-of with |. Blocks that are sure enough are skipped, which is
        lossy; with the prefix trigger: they stay provisional until a verdict and the result stays exact.
    accept
        exact, residual, rank:N, margin:D or typical:E.
    scope
        What becomes of skipped tokens that the verifier would have changed: block leaves them, repair rolls back.
    on_loop
        When the output loops: escalate the next block (the default), sample one token (the default without a
        cloud), stop, or ignore.
    """

    k: Annotated[int | Literal["auto"], Parameter(converter=_block_length)] = 5
    gate: str = "always"
    accept: str = "exact"
    scope: Scope = "block"
    on_loop: OnLoop | None = None


@Parameter(name="*", group=DECODING)
@dataclass(frozen=True)
class Decoding:
    """What to generate, whoever generates it.

    Parameters
    ----------
    max_new_tokens
        The output's length limit, in tokens.
    min_new_tokens
        No EOS and no end of sentences before this many tokens.
    temperature
        0 is greedy.
    top_k
        Draw from the k likeliest tokens; 0 is off.
    top_p
        Draw from the smallest set of tokens with this probability mass.
    min_p
        Drop tokens below this fraction of the likeliest one's probability.
    seed
        The same seed gives the same tokens.
    repetition_penalty
        Above 1 makes tokens of the prompt and the output less likely.
    no_repeat_ngram
        Never repeat an n-gram of this size; 0 is off.
    stop
        Stop after this text (may be given several times).
    sentences
        Stop after this many sentences.
    ignore_eos
        Do not stop at the end-of-sequence token.
    """

    max_new_tokens: Whole = 128
    min_new_tokens: Whole = 0
    temperature: float = 0.0
    top_k: Whole = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: Whole = 0
    repetition_penalty: float = 1.0
    no_repeat_ngram: Whole = 0
    stop: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    sentences: Annotated[int | None, Parameter(converter=_whole)] = None
    ignore_eos: Annotated[bool, Parameter(negative="")] = False

    def settings(self) -> dict[str, Any]:
        """The keyword arguments of `SpeculativeDecoder.generate`."""
        values = asdict(self)
        values["no_repeat_ngram_size"] = values.pop("no_repeat_ngram")
        return values


@Parameter(name="*", group=OUTPUT)
@dataclass(frozen=True)
class Output:
    """What is printed.

    Parameters
    ----------
    json
        One JSON object per result on stdout; logs stay on stderr.
    verbose
        Log what is loaded and resolved.
    """

    json: Annotated[bool, Parameter(negative="")] = False
    verbose: Annotated[bool, Parameter(negative="", alias="-v")] = False


def build_decoder(models: Models, speculation: Speculation) -> SpeculativeDecoder:
    """Load what the options name. Settings are checked before any model is."""
    check(models, speculation)
    from outrider.api import SpeculativeDecoder, connect
    from outrider.engines.load import load_engine, locate

    edge = None if models.edge == "none" else models.edge
    cloud = models.cloud.removeprefix("local:")
    for name in (edge, cloud):
        if name not in (None, "none"):
            locate(str(name))
    placed = {"dtype": models.dtype, "device": models.device}
    verifier = connect(models.cloud, **placed)
    draft = None if edge is None else load_engine(edge, **placed)
    return SpeculativeDecoder(draft, verifier, **asdict(speculation))


def check(models: Models, speculation: Speculation) -> None:
    """Raise SettingsError for what is wrong with the options themselves."""
    from outrider.api import check_modes
    from outrider.core.acceptance import rule
    from outrider.core.gate import gate
    from outrider.core.lookahead import lookahead

    if models.cloud != "none" and not models.cloud.removeprefix("local:").strip():
        raise SettingsError("--cloud local: needs a model after the colon")
    if models.cloud != "none" and not models.cloud.startswith("local:"):
        raise SettingsError(f"--cloud {models.cloud!r}: expected local:MODEL or none")
    present = {"has_drafter": models.edge != "none", "has_verifier": models.cloud != "none"}
    accept = rule(speculation.accept)
    check_modes(gate(speculation.gate), accept, speculation.scope, speculation.on_loop, **present)
    lookahead(speculation.k)
