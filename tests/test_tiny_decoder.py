"""The decoder that the pages count with: both of its ways to generate agree, in result and in cost."""

import numpy as np
import pytest

from kvlib import costs
from kvlib.costs import Work
from kvlib.tiny_decoder import (
    TinyDecoder,
    full_causal_attention,
    generate_by_caching,
    generate_by_recomputing,
)

SIZES = [(1, 1), (1, 4), (3, 1), (5, 12)]  # prompt tokens, new tokens


@pytest.fixture
def decoder():
    return TinyDecoder(n_layers=2, head_dim=16, seed=0)


@pytest.mark.parametrize("n_prompt, n_new", SIZES)
def test_caching_generates_what_recomputing_generates(decoder, n_prompt, n_new):
    prompt = list(range(n_prompt))
    recomputed = generate_by_recomputing(decoder, prompt, n_new)
    cached = generate_by_caching(decoder, prompt, n_new)
    assert len(cached.tokens) == n_prompt + n_new
    assert cached.tokens == recomputed.tokens
    np.testing.assert_allclose(cached.logits, recomputed.logits, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("n_prompt, n_new", SIZES)
@pytest.mark.parametrize("n_layers, head_dim", [(1, 1), (2, 16), (3, 5)])
def test_the_counted_work_equals_the_formulas(n_layers, head_dim, n_prompt, n_new):
    decoder, prompt = TinyDecoder(n_layers, head_dim), list(range(n_prompt))
    sizes = dict(n_layers=n_layers, head_dim=head_dim, itemsize=8)
    recomputed = generate_by_recomputing(decoder, prompt, n_new).work
    cached = generate_by_caching(decoder, prompt, n_new).work
    assert recomputed == costs.recomputing(n_prompt, n_new, **sizes)
    assert cached == costs.caching(n_prompt, n_new, **sizes)


def test_the_decoder_generates_more_than_one_token_over_and_over(decoder):
    # A decoder that always says the same would agree with itself in any way of generating.
    assert len(set(generate_by_caching(decoder, [0], 12).tokens)) > 3


def test_every_token_depends_on_every_token_before_it(decoder):
    logits, _ = decoder.full_pass([3, 1, 4, 1, 5], Work())
    for changed in range(4):
        tokens = [3, 1, 4, 1, 5]
        tokens[changed] = 40
        others, _ = decoder.full_pass(tokens, Work())
        moved = np.abs(others - logits).max(axis=1) > 1e-6
        assert moved.tolist() == [i >= changed for i in range(5)]


def test_a_longer_text_leaves_the_keys_and_values_of_its_prefix_alone_at_every_layer(decoder):
    _, short = decoder.full_pass([7, 8, 9], Work())
    _, long = decoder.full_pass([7, 8, 9, 10], Work())
    for (short_k, short_v), (long_k, long_v) in zip(short, long, strict=True):
        np.testing.assert_allclose(long_k[:3], short_k, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(long_v[:3], short_v, rtol=1e-12, atol=1e-14)


def test_the_caches_hold_the_keys_and_values_of_a_full_pass(decoder):
    caches = decoder.new_caches(3)
    for token in [7, 8, 9]:
        decoder.cached_step(token, caches, Work())
    _, keys_and_values = decoder.full_pass([7, 8, 9], Work())
    for cache, (k, v) in zip(caches, keys_and_values, strict=True):
        np.testing.assert_allclose(cache.keys(), k, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(cache.values(), v, rtol=1e-12, atol=1e-14)


def test_full_causal_attention_equals_one_softmax_a_prefix():
    rng = np.random.default_rng(1)
    q, k, v = rng.normal(size=(5, 4)), rng.normal(size=(5, 4)), rng.normal(size=(5, 3))
    rows = []
    for t in range(5):
        weights = [np.exp(q[t] @ k[j] / 2) for j in range(t + 1)]
        rows.append(sum(w * v[j] for j, w in enumerate(weights)) / sum(weights))
    np.testing.assert_allclose(full_causal_attention(q, k, v), rows, rtol=1e-12)


def test_the_same_seed_gives_the_same_decoder_and_another_seed_another():
    first, again, other = (TinyDecoder(seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first.embedding, again.embedding)
    assert not np.array_equal(first.embedding, other.embedding)


@pytest.mark.parametrize("generate", [generate_by_recomputing, generate_by_caching])
def test_generating_refuses_an_empty_prompt_and_nothing_to_generate(decoder, generate):
    with pytest.raises(ValueError, match="^prompt was empty; it must hold at least one token"):
        generate(decoder, [], 3)
    with pytest.raises(ValueError, match="^n_new was 0; it must be 1 or more"):
        generate(decoder, [0], 0)
    with pytest.raises(TypeError, match="^n_new was 2.5; it must be a whole number"):
        generate(decoder, [0], 2.5)


@pytest.mark.parametrize("generate", [generate_by_recomputing, generate_by_caching])
@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        ([0, 50], ValueError, r"^prompt\[1\] was 50; it must be less than n_vocab = 50"),
        ([-1], ValueError, r"^prompt\[0\] was -1; it must be 0 or more"),
        ("ab", TypeError, r"^prompt\[0\] was 'a'; it must be a whole number"),
    ],
)
def test_generating_refuses_what_is_no_token_of_the_decoder(decoder, generate, prompt, error, words):
    with pytest.raises(error, match=words):
        generate(decoder, prompt, 3)


@pytest.mark.parametrize("name", ["n_layers", "head_dim", "n_vocab"])
def test_a_decoder_of_an_impossible_size_is_refused(name):
    with pytest.raises(ValueError, match=f"^{name} was 0; it must be 1 or more"):
        TinyDecoder(**{name: 0})
