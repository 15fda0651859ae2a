"""Bytes on the socket per generated token, everything included, against what each result's own ledger says.

A link between edge and cloud counts what crosses; connecting and describing, which happen once per connection, are
counted apart. Prints one line per output and ends with one JSON line.

    python benchmarks/wire.py [--edge demo:edge] [--cloud demo:cloud] [--prompts FILE --count 8] [--k 5] [--tokens 128]
"""

from __future__ import annotations

import argparse
import json
import statistics

from benchmarks.remote import captions, linked_cloud, texts
from outrider import SpeculativeDecoder, connect, load_engine
from outrider.engines.prefix_cache import unique_salt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edge", default="demo:edge")
    parser.add_argument("--cloud", default="demo:cloud")
    parser.add_argument("--prompts", help="a Spec-Bench file; the bundled clips otherwise")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--driver", default="sequential", choices=["sequential", "pipelined"])
    args = parser.parse_args()
    prompts = texts(args.prompts, args.count) if args.prompts else captions()
    with linked_cloud(args.cloud) as link:
        verifier = connect(f"grpc://127.0.0.1:{link.port}", deadline=300.0)
        decoder = SpeculativeDecoder(load_engine(args.edge), verifier, k=args.k, driver=args.driver)
        connecting = (link.up, link.down)
        rows: list[dict[str, float]] = []
        print(f"{'tokens':>6} {'accepted':>8} {'up/token':>9} {'down/token':>10} {'media':>7}   of which transport")
        for prompt in prompts:
            stats = (result := decoder.generate(prompt, cache_salt=unique_salt(), max_new_tokens=args.tokens)).stats
            tokens = len(result.token_ids)
            up, down = (stats.bytes_up - stats.media_bytes_up) / tokens, stats.bytes_down / tokens
            accepted = stats.acceptance_rate or 0.0
            rows.append({"tokens": tokens, "acceptance": accepted, "up": up, "down": down})
            rows[-1]["media"] = stats.media_bytes_up
            own = [result.ledger[way].get("transport", 0) / tokens for way in ("up", "down")]
            shown = f"{tokens:>6} {accepted:>8.2f} {up:>9.2f} {down:>10.2f} {stats.media_bytes_up:>7}"
            print(f"{shown}   {own[0]:.2f} up, {own[1]:.2f} down")
        verifier.disconnect()  # type: ignore[union-attr]
        counted = {"up": link.up, "down": link.down, "connecting_up": connecting[0], "connecting_down": connecting[1]}
    outputs = sum(row["tokens"] for row in rows)
    media = sum(row["media"] for row in rows)
    total = {
        "up_per_token": (counted["up"] - media) / outputs,
        "down_per_token": counted["down"] / outputs,
        "acceptance": statistics.fmean(row["acceptance"] for row in rows),
    }
    print(f"socket, everything but media: {total['up_per_token']:.2f} up, {total['down_per_token']:.2f} down per token")
    print(json.dumps({"benchmark": "wire", **vars(args), **counted, **total, "outputs": rows}))


if __name__ == "__main__":
    main()
