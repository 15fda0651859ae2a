"""The options that commands share, as frozen groups. Importing this loads no model library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, cast, get_args

from cyclopts import Group, Parameter, Token

from outrider.config import DEFAULT_K, DriverName, Grammar, GrammarKind, OnCloudLoss, OnLoop, Privacy, Scope
from outrider.decoding.loop_detection import DEFAULT_LOOP_RULE
from outrider.errors import SettingsError, quote
from outrider.files import read_text

MODELS = Group("Models", sort_key=1)
SPECULATION = Group("Speculation", sort_key=2)
NETWORK = Group("Network", sort_key=3)
TO_CLOUD = Parameter(group=Group("Connection to the cloud", sort_key=7))
DECODING = Group("Decoding", sort_key=4)
OUTPUT = Group("Output", sort_key=8)


def _whole(type_: Any, tokens: Sequence[Token]) -> int:
    """Convert to a whole number. The parser's own converter would truncate 1.5 to 1."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise SettingsError(
            f"{tokens[0].keyword or 'argument'}: {quote(tokens[0].value)} is not a whole number"
        ) from None


def _block_length(type_: Any, tokens: Sequence[Token]) -> int | str:
    """Convert to a whole number or "auto". The decoding options check the range."""
    return parse_block_length(tokens[0].value)


def parse_block_length(text: str) -> int | str:
    """Return a whole number, or "auto". Raise SettingsError for another text."""
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise SettingsError(f"k {quote(text)}: expected 1 to 64, or auto") from None


def check_limit(limit: int | None) -> None:
    """Raise SettingsError unless --limit, a number of items, is 1 or more, or not given."""
    if limit is not None and limit < 1:
        raise SettingsError(f"--limit is 1 or more, not {quote(limit)}")


def _parse_grammar(spec: str) -> Grammar:
    """Return the grammar of an option's value.

    Raises:
        SettingsError: the kind is unknown, or its text is missing.
        DataError: the file cannot be read.
    """
    kind, _, text = spec.partition(":")
    if kind not in get_args(GrammarKind):
        raise SettingsError(
            f"grammar {quote(spec)}: expected json_object, json_schema:FILE, regex:EXPRESSION or lark:FILE"
        )
    if kind in ("json_schema", "lark") and text:
        text = read_text(text)
    return Grammar(cast(GrammarKind, kind), text)


Whole = Annotated[int, Parameter(converter=_whole)]
MaybeWhole = Annotated[int | None, Parameter(converter=_whole)]


@Parameter(name="*", group=MODELS)
@dataclass(frozen=True)
class Models:
    """The models and their device.

    Parameters
    ----------
    edge
        The drafter: a directory, hub id, .gguf file, "demo", or "none" for cloud-only. "lookup" drafts without a model
        (prompt lookup, n-gram), and lookup:TOKENIZER gives the cloud's tokenizer, a directory or hub id. It is required
        for texts with vllm:// and sglang://, and for recordings with every cloud across a network. MODEL+lookup drafts
        with the source that is accepted more often. Write ./lookup for a directory of the name lookup.
    cloud
        The verifier: grpc://HOST:PORT (a running outrider cloud), vllm://HOST:PORT[,HOST:PORT...] (one vLLM server, or
        replicas), sglang://HOST:PORT, local:MODEL, or "none" for edge-only.
    dtype
        auto is float32 on a CPU and the checkpoint's own type on a GPU. With auto, a .gguf file stays quantised, in
        llama.cpp on the CPU.
    device
        A torch device such as cpu or cuda:0; auto is cuda if it is available.
    quantization
        Quantise the weights of the linear layers to int8 or int4 when a model is loaded: the edge's and that of
        local:MODEL. Outputs are then those of the quantised target.
    kv_cache_dtype
        fp8 stores keys and values as float8 (e4m3), the edge's and those of local:MODEL. Outputs are then those of the
        target with this KV cache, up to near ties. auto is the model's own type.
    """

    edge: str = "demo"
    cloud: str = "local:demo"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    quantization: Literal["int8", "int4"] | None = None
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"

    @property
    def edge_model(self) -> str | None:
        """The draft model, or None without one."""
        is_lookup = self.edge == "lookup" or self.edge.startswith("lookup:")
        return None if self.edge == "none" or is_lookup else self.edge.removesuffix("+lookup")

    @property
    def uses_lookup(self) -> bool:
        """True if the edge drafts by prompt lookup, alone or together with a model."""
        return self.edge not in ("none", self.edge_model)

    @property
    def load_options(self) -> dict[str, Any]:
        """The keyword arguments of `load_engine`."""
        from outrider.engines.load_options import load_keywords

        return load_keywords(self)

    @property
    def lookup_tokenizer(self) -> str | None:
        """The tokenizer of lookup:TOKENIZER, or None."""
        return self.edge.removeprefix("lookup:") if self.edge.startswith("lookup:") else None

    def require_edge_model(self, purpose: str) -> None:
        """Raise SettingsError for an edge with prompt lookup. purpose: what needs a model, for the message."""
        if self.uses_lookup:
            raise SettingsError(
                f"--edge {self.edge}: {purpose} needs a draft model, not prompt lookup: give --edge MODEL"
            )


TargetTokenizer = Annotated[
    str | None,
    Parameter(
        group=MODELS,
        help="For an edge model with another tokenizer than a vllm:// or sglang:// cloud: a directory or hub id with "
        "the cloud's tokenizer. A grpc:// cloud sends its own.",
    ),
]


@Parameter(name="*", group=MODELS)
@dataclass(frozen=True)
class MeasuredModels(Models):
    """The models that a command measures, and their device.

    Parameters
    ----------
    edge
        The drafter: a directory, hub id, .gguf file, or "demo".
    """


@Parameter(name="*", group=SPECULATION)
@dataclass(frozen=True)
class Speculation:
    """The draft length, the gate and the acceptance rule.

    Parameters
    ----------
    k
        The draft length in tokens, 1 to 64, or auto: adaptive, from measured times and acceptances, and 0 while the
        target alone is faster.
    gate
        The blocks to verify: always, never, SIGNAL:THRESHOLD with SIGNAL entropy, margin, maxprob or logprob,
        SIGNAL.mean for the mean over the block, any-of with |, or calibrated:FILE (outrider calibrate). Blocks with
        enough confidence are skipped, which is lossy. With trigger: before the gate, they stay provisional until a
        verdict, and the result stays exact.
    accept
        The acceptance rule: exact, residual (rejection sampling), rank:N, margin:D or typical:E.
    scope
        The treatment of skipped tokens that the verifier would have changed: block leaves them, repair rolls back.
    on_loop
        The reaction to a loop: escalate the next block (the default), sample one token (the default without a cloud),
        stop, or ignore.
    loop_rule
        The definition of a loop: the longest period, the shortest tail, and tokens beyond two periods.
    """

    k: Annotated[int | Literal["auto"], Parameter(converter=_block_length)] = DEFAULT_K
    gate: str = "always"
    accept: str = "exact"
    scope: Scope = "block"
    on_loop: OnLoop | None = None
    loop_rule: str = DEFAULT_LOOP_RULE


@Parameter(name="*", group=NETWORK)
@dataclass(frozen=True)
class Connection:
    """The connection to a cloud across a network.

    Parameters
    ----------
    token_file
        A file with the bearer token for the cloud.
    tls
        Encrypt, and check the cloud's certificate against the system's authorities.
    ca
        Encrypt, and check against the authorities in this PEM file.
    cert
        This edge's own certificate (PEM), for mutual TLS.
    key
        The key of that certificate (PEM).
    deadline
        Seconds until an unanswered request is retried.
    patience
        Seconds of retries before the cloud counts as lost.
    """

    token_file: Annotated[str | None, TO_CLOUD] = None
    tls: Annotated[bool, TO_CLOUD, Parameter(negative="")] = False
    ca: Annotated[str | None, TO_CLOUD] = None
    cert: Annotated[str | None, TO_CLOUD] = None
    key: Annotated[str | None, TO_CLOUD] = None
    deadline: Annotated[float, TO_CLOUD] = 30.0
    patience: Annotated[float, TO_CLOUD] = 10.0

    def connection(self) -> dict[str, Any]:
        """Return the keyword arguments of `connect` for a cloud across a network, without defaults."""
        names = ("net", "token_file", "tls", "ca", "cert", "key", "deadline", "patience")
        given = {name: getattr(self, name) for name in names if hasattr(self, name)}
        return {name: value for name, value in given.items() if value != getattr(type(self), name)}


@Parameter(name="*", group=NETWORK)
@dataclass(frozen=True)
class Network(Connection):
    """The interaction of edge and cloud.

    Parameters
    ----------
    driver
        sequential waits for each verdict. pipelined drafts during that time, with the same output.
    on_cloud_loss
        The policy for an unreachable cloud: fail (the default for exact gates), edge-only (the default for gates that
        skip), or wait.
    privacy
        The data that may be sent: tokens (ids only), features (the model's features of a recording), or audio.
    net
        Emulate a network between edge and cloud, as in rtt=50ms,jitter=5ms,bw=2Mbit.
    """

    driver: DriverName = "sequential"
    on_cloud_loss: OnCloudLoss | None = None
    privacy: Privacy = "audio"
    net: str | None = None

    def check_own_cloud(self, owner: str) -> None:
        """Raise SettingsError for options that a cloud process of this command's own does not have."""
        given = [name for name in ("token_file", "tls", "ca", "cert", "key") if getattr(self, name)]
        if given:
            raise SettingsError(f"--{given[0].replace('_', '-')}: {owner} own cloud has no TLS and no tokens")


@Parameter(name="*", group=NETWORK)
@dataclass(frozen=True)
class DemoNetwork(Network):
    """The interaction of edge and cloud in the demo, with a cloud process on this machine.

    Parameters
    ----------
    driver
        pipelined drafts during a verdict's round trip. sequential waits for each verdict, with the same output.
    """

    driver: DriverName = "pipelined"


@Parameter(name="*", group=DECODING)
@dataclass(frozen=True)
class Decoding:
    """The decoding settings of both edge and cloud.

    Parameters
    ----------
    max_new_tokens
        The output's length limit, in tokens.
    min_new_tokens
        The output does not end before this many tokens, by EOS or by --sentences.
    temperature
        The sampling temperature; 0 is greedy.
    top_k
        Sample from the k likeliest tokens; 0 is off.
    top_p
        Sample from the smallest set of tokens with this probability mass.
    min_p
        Drop tokens below this fraction of the likeliest one's probability.
    seed
        The seed of sampling. The same seed gives the same tokens.
    repetition_penalty
        Values above 1 make tokens of the prompt and the output less likely.
    repetition_window
        The number of last tokens that the penalty covers; 0 is all.
    frequency_penalty
        Make a token less likely each time that the output contains it: -2 to 2; 0 is off.
    presence_penalty
        Make tokens of the output less likely: -2 to 2; 0 is off.
    no_repeat_ngram
        Never repeat an n-gram of this size; 0 is off.
    stop
        Stop after this text (may be given several times).
    sentences
        Stop after this many sentences.
    ignore_eos
        Do not stop at the end-of-sequence token.
    grammar
        The language of the output: json_object, json_schema:FILE, regex:EXPRESSION, or lark:FILE (llguidance's variant
        of Lark).
    """

    max_new_tokens: Whole = 128
    min_new_tokens: Whole = 0
    temperature: float = 0.0
    top_k: Whole = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: Whole = 0
    repetition_penalty: float = 1.0
    repetition_window: Whole = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    no_repeat_ngram: Whole = 0
    stop: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    sentences: MaybeWhole = None
    ignore_eos: Annotated[bool, Parameter(negative="")] = False
    grammar: str | None = None

    def settings(self) -> dict[str, Any]:
        """Return the keyword arguments of `SpeculativeDecoder.generate`."""
        values = asdict(self)
        values["no_repeat_ngram_size"] = values.pop("no_repeat_ngram")
        values["grammar"] = None if self.grammar is None else _parse_grammar(self.grammar)
        return values


@Parameter(name="*", group=OUTPUT)
@dataclass(frozen=True)
class Output:
    """The format and detail of the output.

    Parameters
    ----------
    json
        Print one JSON object per result on stdout. Logs stay on stderr.
    verbose
        Log models and resolved settings.
    """

    json: Annotated[bool, Parameter(negative="")] = False
    verbose: Annotated[bool, Parameter(negative="", alias="-v")] = False


@Parameter(name="*")
@dataclass(frozen=True)
class Pair:
    """The options of edge and cloud, which the commands that decode share."""

    models: Models = Models()
    speculation: Speculation = Speculation()
    network: Network = Network()
    decoding: Decoding = Decoding()


@Parameter(name="*")
@dataclass(frozen=True)
class Run(Pair):
    """The options of a command that decodes and prints its results."""

    output: Output = Output()


@Parameter(name="*")
@dataclass(frozen=True)
class Measurement:
    """The options of a command that measures a pair, and prints figures."""

    models: MeasuredModels = MeasuredModels()
    connection: Connection = Connection()
    decoding: Decoding = Decoding()
    output: Output = Output()
