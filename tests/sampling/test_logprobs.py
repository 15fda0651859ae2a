"""Log-probabilities for reports: those of the raw row, from whole rows and from their largest entries."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import StateError
from outrider.sampling.logprobs import compute_logprobs
from outrider.sampling.sampler import SampledToken
from outrider.sampling.top_logprobs import NeedMoreLogprobs, TopLogprobs

SIZE, VOCAB = 23, 20  # three rows of padding
rows = st.lists(st.floats(-30, 30, width=32), min_size=SIZE, max_size=SIZE).map(torch.tensor)


def by_numpy(row: torch.Tensor, token: int, count: int) -> tuple[list[float], list[int]]:
    """The token's log-probability and the best ones', and the tokens that may be the best."""
    logits = row.double().numpy()
    logp = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    order = sorted(range(VOCAB), key=lambda n: -logp[n])[:count]
    return [logp[token], *logp[order]], order


@given(rows, st.integers(0, VOCAB - 1), st.integers(0, VOCAB + 5))
def test_whole_rows(row: torch.Tensor, token: int, count: int) -> None:
    (found,) = compute_logprobs(row[None], [token], count, VOCAB, 0)
    values, order = by_numpy(row, token, count)
    assert found.ids[0] == token
    assert found.values == pytest.approx(values, abs=1e-5)
    assert len(set(found.ids[1:])) == min(count, VOCAB)
    assert [float(row[n]) for n in found.ids[1:]] == pytest.approx([float(row[n]) for n in order], abs=1e-5)


@settings(max_examples=300)
@given(rows, st.integers(0, VOCAB - 1), st.integers(0, 8), st.integers(1, SIZE), st.booleans())
def test_a_part_of_a_row_gives_the_same_or_needs_more(
    row: torch.Tensor, token: int, count: int, known: int, normalised: bool
) -> None:
    sent = torch.log_softmax(row, -1) if normalised else row
    best = torch.topk(sent, known)
    ids = best.indices.tolist()
    ids += [] if token in ids else [token]
    floor = float(best.values[-1]) if known < SIZE else -math.inf
    part = TopLogprobs(np.array(ids), sent[ids].numpy(), floor, normalised)
    is_enough = known == SIZE or (normalised and known >= count + SIZE - VOCAB)
    try:
        (found,) = compute_logprobs([part], [token], count, VOCAB, 7)
    except NeedMoreLogprobs:
        assert not is_enough
        return
    assert is_enough or normalised
    (whole,) = compute_logprobs(row[None], [token], count, VOCAB, 7)
    assert found.ids[0] == token
    assert found.values == pytest.approx(whole.values, abs=1e-5)
    assert len(set(found.ids[1:])) == count


def test_a_token_that_is_missing_needs_more() -> None:
    part = TopLogprobs(np.array([1, 2]), np.array([-0.5, -1.5], np.float32), -1.5, normalised=True)
    with pytest.raises(NeedMoreLogprobs):
        compute_logprobs([part], [5], 1, VOCAB, 0)


def test_sampled_tokens_have_no_rows() -> None:
    with pytest.raises(StateError):
        compute_logprobs([SampledToken(3, 1.0)], [3], 1, VOCAB, 0)
