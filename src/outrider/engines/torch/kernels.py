"""Triton kernels of the fused model: all but its matrix products, and for few tokens these as well.

Batches are flat: the tokens of all sequences stand one after another, [N, …]. Sizes are constexpr. Lengths and the
places of keys and values are read from device memory, so that one captured graph serves all lengths and outlives a move
of the cache. A layer's `buffers`, int64 [3], are the addresses of its keys and of its values, [KV_HEADS, capacity, DIM]
each, and their capacity. A sequence's first position in them is its base. A base < 0 marks padding.

EARLY: programmatic dependent launch. The kernel starts while the previous one still runs, and waits for its end before
it reads its output. Weights may be read earlier.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    HAS_EARLY_LAUNCH = True
except ImportError:  # before Triton 3.4
    HAS_EARLY_LAUNCH = False

SKINNY_TOKENS = 2  # tokens up to which `skinny_linear` beats a library's matrix product


def skinny_tiling(tokens: int, width: int, size: int, gated: bool) -> tuple[int, int, int, int]:
    """Return stripe, depth, warps and stages of `skinny_linear`, the fastest by benchmarks/gpu_linear.py."""
    if size <= 1024:
        wide = (4, 512, 2, 3) if gated and tokens > 1 else (2, 1024, 2, 1)
        return wide if gated or 1024 < width <= 8192 else (4 * tokens if width > 8192 else 4, 1024, 2 * tokens, 1)
    if gated:
        return (2, 2048, 4, 3) if tokens == 1 else (4, 512, 2, 3)
    if width > 8192 or (size < 8192 and width < 1024):
        return 4, 1024, 4, 3
    return (8 if width == size else 4), 512, 4, 3


def attend_tiling(rows: int, groups: int) -> tuple[int, int, int, int]:
    """Return query rows and keys per step, warps and stages of `attend`, the fastest on an H200.

    rows: query rows of a sequence and group of heads. groups: of all sequences. Few rows in many groups have a smaller
    pipeline each, so that four programs share a multiprocessor.
    """
    return (64, 64, 4, 3) if rows > 16 else (16, 64, 4, 3 if groups <= 400 else 2)


@triton.jit
def embed(
    ids, table, x, positions, bases, history, size: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
) -> None:
    """Copy a token's embedding to x [N, size], and its id to history. One token per program."""
    token, k = tl.program_id(0), tl.arange(0, BLOCK)
    identifier, base = tl.load(ids + token), tl.load(bases + token)
    row = tl.load(table + identifier.to(tl.int64) * size + k, k < size, 0.0)
    tl.store(x + token * size + k, row, k < size)
    if base >= 0:
        tl.store(history + base + tl.load(positions + token), identifier)


@triton.jit
def skinny_linear(
    x, weight, bias, norm, out, size: tl.constexpr, width: tl.constexpr, eps, HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Compute out[TOKENS, width] (+)= f(rms_norm(x)[TOKENS, size] @ weight[width, size]ᵀ + bias), a stripe per program.

    HAS_NORM: normalise x, with the scale applied last. GATED: weight is [2 width, size], f = silu(first) × second.
    ADD: add to `out`, the residual stream. TOKENS: a power of two. The order of summation does not depend on it.
    """
    rows = tl.arange(0, TOKENS)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < width
    first = tl.zeros([TOKENS, BLOCK_N, BLOCK_K], tl.float32)
    second = tl.zeros([TOKENS, BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([TOKENS, BLOCK_K], tl.float32)
    if EARLY:
        gdc_launch_dependents()
        if STAGES > 1:  # pipelining moves loads ahead, and none may precede the wait
            gdc_wait()
    for start in tl.range(0, size, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        mask = k < size
        at = weight + columns[:, None] * size + k[None, :]
        part = tl.load(at, inside[:, None] & mask[None, :], 0.0)
        if GATED:
            other = tl.load(at + width * size, inside[:, None] & mask[None, :], 0.0)
        if EARLY and STAGES == 1:
            gdc_wait()
        a = tl.load(x + rows[:, None] * size + k[None, :], mask[None, :], 0.0).to(tl.float32)
        if HAS_NORM:
            squares += a * a
            a *= tl.load(norm + k, mask, 0.0).to(tl.float32)[None, :]
        first += part.to(tl.float32)[None, :, :] * a[:, None, :]
        if GATED:
            second += other.to(tl.float32)[None, :, :] * a[:, None, :]
    total = tl.sum(first, 2)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares, 1) / size + eps)[:, None]
        total *= scale
    if HAS_BIAS:
        total += tl.load(bias + columns, inside, 0.0).to(tl.float32)[None, :]
    if GATED:
        total = total * tl.sigmoid(total) * tl.sum(second, 2) * scale
    target = out + rows[:, None] * width + columns[None, :]
    if ADD:
        total += tl.load(target, inside[None, :], 0.0).to(tl.float32)
    tl.store(target, total.to(out.dtype.element_ty), inside[None, :])


@triton.jit
def rms_norm(x, weight, out, eps, size: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr) -> None:
    """Compute out = x ÷ √(mean x² + eps) × weight. One token per program."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    k = tl.arange(0, BLOCK)
    mask = k < size
    row = tl.load(x + tl.program_id(0) * size + k, mask, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row) / size + eps)
    scaled = row * scale * tl.load(weight + k, mask, 0.0).to(tl.float32)
    tl.store(out + tl.program_id(0) * size + k, scaled.to(out.dtype.element_ty), mask)


@triton.jit
def silu_and_mul(gate_up, out, width: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr) -> None:
    """Compute out [N, width] = silu(first half) × second half of gate_up [N, 2 width]."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token, k = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = k < width
    first = tl.load(gate_up + token * 2 * width + k, mask, 0.0).to(tl.float32)
    second = tl.load(gate_up + token * 2 * width + width + k, mask, 0.0).to(tl.float32)
    tl.store(out + token * width + k, (first * tl.sigmoid(first) * second).to(out.dtype.element_ty), mask)


@triton.jit
def _locate(buffers, like):
    """Return pointers to a layer's keys and values, of the type of `like`, and their positions per head."""
    keys = tl.load(buffers).to(tl.pointer_type(like.dtype.element_ty))
    values = tl.load(buffers + 1).to(tl.pointer_type(like.dtype.element_ty))
    return tl.multiple_of(keys, 16), tl.multiple_of(values, 16), tl.load(buffers + 2).to(tl.int32)


@triton.jit
def rotate_and_store(
    qkv, cosines, sines, query_norm, key_norm, buffers, positions, bases, eps, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, HEAD_NORM: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Rotate the queries of a few heads of one token in place, and write its rotated keys and its values to the cache.

    qkv: [N, HEADS + 2 KV_HEADS, DIM]. cosines, sines: float32 [positions, DIM / 2].
    HEAD_NORM: RMS-normalise queries and keys first (Qwen3).
    """
    keys, values, capacity = _locate(buffers, qkv)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    half = tl.arange(0, DIM // 2)[None, :]
    base, position = tl.load(bases + token), tl.load(positions + token)
    is_query, is_key, is_value = head < HEADS, (head >= HEADS) & (head < HEADS + KV_HEADS), head >= HEADS + KV_HEADS
    is_valid = head < tl.where(base >= 0, HEADS + 2 * KV_HEADS, 0)
    at = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * DIM + half
    a, b = tl.load(at, is_valid, 0.0).to(tl.float32), tl.load(at + DIM // 2, is_valid, 0.0).to(tl.float32)
    cosine, sine = tl.load(cosines + position * (DIM // 2) + half), tl.load(sines + position * (DIM // 2) + half)
    x, y = a, b
    if HEAD_NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps)[:, None]
        x *= scale * tl.where(is_query, tl.load(query_norm + half), tl.load(key_norm + half)).to(tl.float32)
        y *= scale * tl.where(is_query, tl.load(query_norm + DIM // 2 + half), tl.load(key_norm + DIM // 2 + half)).to(
            tl.float32
        )
    a = tl.where(is_value, a, x * cosine - y * sine).to(qkv.dtype.element_ty)
    b = tl.where(is_value, b, y * cosine + x * sine).to(qkv.dtype.element_ty)
    tl.store(at, a, is_valid & is_query)
    tl.store(at + DIM // 2, b, is_valid & is_query)
    kv_head = tl.where(is_key, head - HEADS, head - HEADS - KV_HEADS)
    entry = (kv_head * capacity + base + position).to(tl.int64) * DIM + half
    key = keys + entry
    tl.store(key, a, is_valid & is_key)
    tl.store(key + DIM // 2, b, is_valid & is_key)
    value = values + entry
    tl.store(value, a, is_valid & is_value)
    tl.store(value + DIM // 2, b, is_valid & is_value)


@triton.jit
def attend(
    qkv, buffers, result, partial, maxima, sums, firsts, counts, starts, bases, chunk, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Compute attention of a sequence's new tokens to one chunk of its keys, for one group of query heads.

    This is flash decoding. The query heads that share a key head are further query rows. Sequence b has counts[b] new
    tokens in the batch, from index firsts[b], at positions from starts[b]. With one chunk, writes result
    [N, HEADS, DIM]. Otherwise writes, per token and head, the unnormalised output (partial float32
    [N, HEADS, SPLITS, DIM]), the largest score, and the sum of exponentials (base 2).
    """
    keys, values, capacity = _locate(buffers, qkv)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    group: tl.constexpr = HEADS // KV_HEADS
    row, kv_head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    split = tl.program_id(1)
    count, start = tl.load(counts + row), tl.load(starts + row)
    query = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    step, head = query // group, kv_head * group + query % group
    is_valid = step < count
    token = tl.load(firsts + row) + step
    d = tl.arange(0, DIM)
    if tl.program_id(2) * BLOCK_M < count * group:
        q = tl.load(
            qkv + (token[:, None] * (HEADS + 2 * KV_HEADS) + head[:, None]) * DIM + d[None, :], is_valid[:, None], 0.0
        )
        base = (kv_head * capacity + tl.load(bases + row)).to(tl.int64) * DIM
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        out = tl.zeros([BLOCK_M, DIM], tl.float32)
        first = tl.program_id(2) * BLOCK_M // group  # of the tile's tokens
        last = tl.minimum(count - 1, (tl.program_id(2) * BLOCK_M + BLOCK_M - 1) // group)
        begin, end = split * chunk, tl.minimum((split + 1) * chunk, start + last + 1)
        visible_to_all = begin + tl.maximum(0, tl.minimum(end, start + first + 1) - begin) // BLOCK_N * BLOCK_N
        for masked in tl.static_range(2):  # whole steps of keys that all query rows see, then the rest
            low, high = (visible_to_all, end) if masked else (begin, visible_to_all)
            for n in range(low, high, BLOCK_N):
                at = n + tl.arange(0, BLOCK_N)
                offsets = base + at[:, None] * DIM + d[None, :]
                if masked:
                    k = tl.load(keys + offsets, at[:, None] < end, 0.0)
                    scores = tl.dot(q, tl.trans(k)) * scale
                    visible = (at[None, :] < end) & (at[None, :] <= start + step[:, None])
                    scores = tl.where(visible, scores, float("-inf"))
                else:
                    scores = tl.dot(q, tl.trans(tl.load(keys + offsets))) * scale
                new = tl.maximum(row_max, tl.max(scores, 1))
                finite = tl.where(new == float("-inf"), 0.0, new)
                weights = tl.exp2(scores - finite[:, None])
                rescale = tl.exp2(row_max - finite)
                v = tl.load(values + offsets, at[:, None] < end, 0.0) if masked else tl.load(values + offsets)
                out = tl.dot(weights.to(v.dtype), v, out * rescale[:, None])
                total = total * rescale + tl.sum(weights, 1)
                row_max = new
        if SPLITS == 1:
            whole = (out / total[:, None]).to(qkv.dtype.element_ty)
            tl.store(result + (token[:, None] * HEADS + head[:, None]) * DIM + d[None, :], whole, is_valid[:, None])
            return
        at_split = (token * HEADS + head) * SPLITS + split
        tl.store(maxima + at_split, row_max, is_valid)
        tl.store(sums + at_split, total, is_valid)
        tl.store(partial + at_split[:, None] * DIM + d[None, :], out, is_valid[:, None])


@triton.jit
def combine(
    partial, maxima, sums, bases, out, HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr
) -> None:
    """Combine the chunks (a power of two) of one token and head: out [N, HEADS, DIM]."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0) // HEADS
    d = tl.arange(0, DIM)
    if tl.load(bases + token) >= 0:
        s = tl.arange(0, SPLITS)
        row_max = tl.load(maxima + tl.program_id(0) * SPLITS + s)
        weights = tl.exp2(row_max - tl.max(row_max))
        total = tl.sum(weights * tl.load(sums + tl.program_id(0) * SPLITS + s))
        held = partial + (tl.program_id(0) * SPLITS + s[:, None]) * DIM + d[None, :]
        chunks = tl.load(held, (row_max > float("-inf"))[:, None], 0.0)
        whole = tl.sum(chunks * weights[:, None], 0) / total
        tl.store(out + tl.program_id(0) * DIM + d, whole.to(out.dtype.element_ty))
    else:
        tl.store(out + tl.program_id(0) * DIM + d, tl.zeros([DIM], out.dtype.element_ty))


@triton.jit
def partial_top2(rows, parts, width, stride, piece, PARTS: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Find the two largest entries of one piece of one row, and the index of the larger (the first of equals).

    rows: any float, [R, ≥ width]. parts: float32 [R, 3, PARTS], with the index as int32 bits. NaN counts as +inf.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    row_max = tl.full([BLOCK], float("-inf"), tl.float32)
    next_most = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.full([BLOCK], 2147483647, tl.int32)
    end = tl.minimum((part + 1) * piece, width)
    for start in range(part * piece, end, BLOCK):
        at = start + lane
        x = tl.load(rows + row.to(tl.int64) * stride + at, at < end, float("-inf")).to(tl.float32)
        x = tl.where(x == x, x, float("inf"))
        more = (x > row_max) | ((x == row_max) & (at < where) & (at < end))
        next_most = tl.where(more, row_max, tl.maximum(next_most, x))
        where = tl.where(more, at, where)
        row_max = tl.where(more, x, row_max)
    best = tl.max(row_max)
    first = tl.min(tl.where(row_max == best, where, 2147483647))
    second = tl.max(tl.where(where == first, next_most, row_max))
    base = parts + row * 3 * PARTS + part
    tl.store(base, best)
    tl.store(base + PARTS, first.to(tl.float32, bitcast=True))
    tl.store(base + 2 * PARTS, second)


@triton.jit
def merge_top2(parts, out, PARTS: tl.constexpr) -> None:
    """Merge the pieces of one row into out, float64 [R, 3]: index of the largest entry, the entry, its top-2 margin."""
    row, p = tl.program_id(0), tl.arange(0, PARTS)
    row_max = tl.load(parts + row * 3 * PARTS + p)
    where = tl.load(parts + row * 3 * PARTS + PARTS + p).to(tl.int32, bitcast=True)
    second = tl.load(parts + row * 3 * PARTS + 2 * PARTS + p)
    best = tl.max(row_max)
    first = tl.min(tl.where(row_max == best, where, 2147483647))
    runner_up = tl.max(tl.where(where == first, second, row_max))
    tl.store(out + row * 3, first.to(tl.float64))
    tl.store(out + row * 3 + 1, best.to(tl.float64))
    tl.store(out + row * 3 + 2, (best - runner_up).to(tl.float64))
