"""The verifier, the drafter and the decoder of the options, checked. Importing this loads no model library."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from outrider.cli.options import Connection, Models, Network, Pair, Speculation
from outrider.errors import PromptError, SettingsError

if TYPE_CHECKING:
    from outrider.api import SpeculativeDecoder
    from outrider.decoding.options import DecodingOptions, ResolvedOptions
    from outrider.engines.base import Engine
    from outrider.engines.prompt_lookup import PromptLookup
    from outrider.verifiers.base import Verifier
    from outrider.verifiers.connect import CloudAddress


def build_decoder(
    pair: Pair, *, watch: bool = False, for_text: bool = False, target_tokenizer: str | None = None
) -> SpeculativeDecoder:
    """Check the settings, connect to the cloud, load the models and return the decoder, in this order.

    for_text: the prompt is a text. Captions-only models refuse it before a model is loaded or a cloud is contacted.
    target_tokenizer: the name of the cloud's tokenizer, if it differs from the edge model's.
    """
    loss = check(pair).on_cloud_loss
    from outrider.api import SpeculativeDecoder
    from outrider.verifiers.base import Connectable
    from outrider.verifiers.connect import parse_cloud_address

    models = pair.models
    check_edge(models)
    if target_tokenizer is not None:
        check_target_tokenizer(models, target_tokenizer)
    remote = parse_cloud_address(models.cloud).is_remote
    if for_text and not remote:
        check_accepts_text(models)
    with closed_on_failure(connect_verifier(models, pair.network)) as verifier:
        if for_text and remote:  # behind the checks of the connection's options
            check_accepts_text(models)
        if isinstance(verifier, Connectable) and loss == "fail":
            verifier.probe()  # detect an unreachable cloud before a model is loaded
        options = build_options(pair.speculation, pair.network)
        model, lookup = load_drafter(models), load_lookup(models)
        if model is None:
            return SpeculativeDecoder(lookup, verifier, **options.keywords(), watch=watch)
        reader = load_target_tokenizer(target_tokenizer)
        keywords = {**options.keywords(), "watch": watch, "reader": reader}
        return SpeculativeDecoder(model, verifier, lookup=lookup, **keywords)


@contextmanager
def closed_on_failure(verifier: Verifier | None) -> Iterator[Verifier | None]:
    """Yield the verifier, and close its connection if the block raises."""
    from outrider.verifiers.base import disconnect

    try:
        yield verifier
    except BaseException:
        disconnect(verifier)
        raise


@contextmanager
def connected(models: Models, network: Connection) -> Iterator[Verifier | None]:
    """Yield the verifier, and disconnect from it afterwards. An unreachable cloud raises before a model is loaded."""
    from outrider.verifiers.base import Connectable, disconnect

    verifier = connect_verifier(models, network)
    try:
        if isinstance(verifier, Connectable):
            verifier.probe()
        yield verifier
    finally:
        disconnect(verifier)


def connect_verifier(models: Models, network: Connection = Connection()) -> Verifier | None:
    """Return the verifier of --cloud, or None. Load a local one, but send no request to another one yet."""
    from outrider.verifiers.connect import connect, parse_cloud_address

    local = parse_cloud_address(models.cloud).kind == "local"
    return connect(models.cloud, **(models.load_options if local else network.connection()))


def load_drafter(models: Models) -> Engine | None:
    """Load and return the edge's engine, or None without a draft model."""
    from outrider.engines.load import load_engine

    name = models.edge_model
    return None if name is None else load_engine(name, **models.load_options)


def load_lookup(models: Models) -> PromptLookup | None:
    """Return the prompt lookup of the edge, with its tokenizer if one is named, or None."""
    from outrider.engines.prompt_lookup import prompt_lookup

    return prompt_lookup(models.lookup_tokenizer) if models.uses_lookup else None


def load_target_tokenizer(name: str | None) -> PromptLookup | None:
    """Return the tokenizer of the cloud's model, as the reader of a decoder, or None if none is named."""
    from outrider.engines.prompt_lookup import prompt_lookup

    return None if name is None else prompt_lookup(name)


def find_target_tokenizer(name: str | None, model: Engine | None, verifier: Verifier | None) -> PromptLookup | None:
    """Return the tokenizer of this name, or the one that a cloud with another vocabulary sends, or None."""
    from outrider.edge.target_tokenizer import read_target_tokenizer
    from outrider.verifiers.base import Connectable, share_vocabulary
    from outrider.verifiers.local import describe

    if name is not None or model is None or not isinstance(verifier, Connectable):
        return load_target_tokenizer(name)
    edge = describe(model)
    target = verifier.describe(edge)
    return None if share_vocabulary(edge, target) else read_target_tokenizer(target)


def check_target_tokenizer(models: Models, name: str) -> None:
    """Raise InputError if there is no such tokenizer, or --target-tokenizer has no use for these models."""
    from outrider.engines.load import resolve_tokenizer_path
    from outrider.verifiers.connect import parse_cloud_address

    if models.edge_model is None or not parse_cloud_address(models.cloud).is_remote:
        raise SettingsError(
            "--target-tokenizer is for an edge model and a cloud across a network: prompt lookup takes a tokenizer as "
            "--edge lookup:TOKENIZER, and local:MODEL has its own"
        )
    resolve_tokenizer_path(name)


def check_edge(models: Models) -> None:
    """Raise InputError if there is no such edge model or tokenizer, or if lookup needs a tokenizer for this cloud."""
    from outrider.engines.load import resolve_path, resolve_tokenizer_path
    from outrider.verifiers.connect import parse_cloud_address

    if models.edge_model is not None:
        resolve_path(models.edge_model)
    elif models.lookup_tokenizer is not None:
        resolve_tokenizer_path(models.lookup_tokenizer)
    elif models.uses_lookup and (kind := parse_cloud_address(models.cloud).kind) in ("vllm", "sglang"):
        raise SettingsError(
            f"--edge lookup: {kind} does not list its tokens: give its tokenizer, a directory or hub id, as in --edge "
            "lookup:TOKENIZER"
        )


def build_options(speculation: Speculation, network: Network) -> DecodingOptions:
    """Return the decoding options of both groups together."""
    from outrider.decoding.options import DecodingOptions

    network_options = {name: getattr(network, name) for name in ("driver", "on_cloud_loss", "privacy")}
    return DecodingOptions(**asdict(speculation), **network_options)


def enable_gc() -> None:
    """Enable garbage collection, which `main` disabled, for objects created from now on.

    Most of the present ones (modules and models) stay until the end.
    """
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # some libraries warn about objects that are never collected


def check_connection(models: Models, network: Connection) -> CloudAddress:
    """Raise SettingsError for options of a network or of loading that the models have no use for."""
    from outrider.verifiers.connect import parse_cloud_address

    target = parse_cloud_address(models.cloud)
    check_loading(models, target)
    if not target.is_remote and network.connection():
        used = ", ".join(f"--{name.replace('_', '-')}" for name in network.connection())
        raise SettingsError(f"{used}: only for a cloud across a network (grpc, vllm, sglang), not {models.cloud}")
    return target


def check_loading(models: Models, target: CloudAddress) -> None:
    """Raise SettingsError if this command loads no model to quantise, or one that cannot be quantised."""
    from outrider.engines.load_options import LoadOptions

    options = LoadOptions(**models.load_options)
    names = [name for name in (models.edge_model, target.model if target.kind == "local" else None) if name]
    given = {"quantization": models.quantization, "kv-cache-dtype": "fp8" if options.fp8_cache else None}
    for option, value in given.items():
        if value is not None and not names:
            raise SettingsError(f"--{option} {value}: no model is loaded here{_own_option(option, target)}")
    for name in names:
        options.check_file(name)


def _own_option(option: str, target: CloudAddress) -> str:
    """Return where the option of loading of a cloud across a network is given, for a message."""
    if target.kind == "grpc":
        return f". A cloud across a network has its own option (outrider cloud --{option})"
    return ". A vLLM or SGLang server has an option of its own" if target.is_remote else ""


def check(pair: Pair) -> ResolvedOptions:
    """Validate the options and resolve their defaults. Raise InputError where they contradict each other."""
    from outrider.engines.load import resolve_path

    target = check_connection(pair.models, pair.network)
    if target.kind == "local":
        resolve_path(target.model)
    return build_options(pair.speculation, pair.network).resolve(
        has_drafter=pair.models.edge_model is not None,
        has_verifier=target.kind != "none",
        remote=target.is_remote,
        uses_lookup=pair.models.uses_lookup,
    )


def check_accepts_text(models: Models) -> None:
    """Raise PromptError if the configuration of the prompts' model shows that it takes recordings only."""
    from outrider.edge.prompt_reader import NO_TEXTS
    from outrider.engines.load import captions_only, full_name
    from outrider.verifiers.connect import parse_cloud_address

    target = parse_cloud_address(models.cloud)
    reader = models.edge_model or models.lookup_tokenizer or (target.model if target.kind == "local" else None)
    if reader is not None and captions_only(reader):
        raise PromptError(NO_TEXTS.format(full_name(reader)))
