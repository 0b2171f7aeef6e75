"""A decoder small enough to count: numpy, random weights, one head, no positions.

It generates in two ways, by recomputing everything and by caching, and tallies in a
`kvlib.costs.Work` what it does while it does it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvlib import visibility
from kvlib._numbers import whole_number
from kvlib.costs import Work
from kvlib.numpy_cache import KVCache, decode_step

__all__ = [
    "Generation",
    "TinyDecoder",
    "full_causal_attention",
    "generate_by_recomputing",
    "generate_by_caching",
]


class Layer(NamedTuple):
    """The weights of one layer, each of shape (D, D)."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    output: np.ndarray


class Generation(NamedTuple):
    """What was generated, and at what cost."""

    tokens: list  #: int, prompt included
    logits: np.ndarray  #: (n_new, n_vocab), what each new token was chosen from
    work: Work


class TinyDecoder:
    """A causal decoder with fixed random weights.

    Parameters
    ----------
    n_layers : int
        L.
    head_dim : int
        D, the width of everything: embeddings, keys and values of its one head.
    n_vocab : int
        Tokens are 0 to n_vocab - 1.
    seed : int
        The same seed gives the same weights.

    Raises
    ------
    TypeError, ValueError
        If a size is not a whole number of at least 1; the message names it.
    """

    def __init__(self, n_layers=2, head_dim=16, n_vocab=50, seed=0):
        for name, size in {"n_layers": n_layers, "head_dim": head_dim, "n_vocab": n_vocab}.items():
            whole_number(name, size, least=1)
        rng = np.random.default_rng(seed)

        def weights(*shape):
            return rng.normal(size=shape)

        self.head_dim = head_dim
        self.embedding = weights(n_vocab, head_dim)
        self.layers = [
            Layer(*(weights(head_dim, head_dim) / np.sqrt(head_dim) for _ in Layer._fields))
            for _ in range(n_layers)
        ]
        self.unembedding = weights(head_dim, n_vocab)

    def full_pass(self, tokens, work):
        """Run all tokens at once, remembering nothing.

        Parameters
        ----------
        tokens : sequence of int, length t
        work : Work
            What this pass does is added to it.

        Returns
        -------
        logits : numpy.ndarray, shape (t, n_vocab)
            Row i is the prediction that follows token i.
        keys_and_values : list of (K, V), one a layer, each of shape (t, D)
        """
        x = self.embedding[tokens]
        keys_and_values = []
        for layer in self.layers:
            q, k, v = _project(x, layer, work)
            work.bytes_moved += k.nbytes + v.nbytes  # written, ...
            work.bytes_moved += k.nbytes + v.nbytes  # ... then read to attend
            x = _finish(x, full_causal_attention(q, k, v, work), layer)
            keys_and_values.append((k, v))
        return x @ self.unembedding, keys_and_values

    def new_caches(self, max_len):
        """Return one empty `KVCache` a layer, with room for max_len tokens."""
        return [KVCache(max_len, self.head_dim, self.head_dim) for _ in self.layers]

    def cached_step(self, token, caches, work):
        """Run one token; everything before it comes from the caches.

        Parameters
        ----------
        token : int
        caches : list of KVCache, one a layer
            Each gets one key and one value appended.
        work : Work
            What this step does is added to it.

        Returns
        -------
        numpy.ndarray, shape (n_vocab,)
            The prediction that follows the token.
        """
        x = self.embedding[token]
        for layer, cache in zip(self.layers, caches, strict=True):
            q, k, v = _project(x, layer, work)
            cache.append(k, v)
            work.bytes_moved += k.nbytes + v.nbytes  # written, ...
            context, attention = decode_step(q, cache)
            work.bytes_moved += len(cache) * (k.nbytes + v.nbytes)  # ... all read
            work.scores += attention.size
            work.visible_scores += attention.size
            x = _finish(x, context, layer)
        return x @ self.unembedding


def generate_by_recomputing(decoder, prompt, n_new):
    """Generate greedily; every step runs the whole text so far.

    Parameters
    ----------
    decoder : TinyDecoder
    prompt : sequence of int
        At least one token.
    n_new : int
        How many tokens to generate; at least 1.

    Returns
    -------
    Generation

    Raises
    ------
    TypeError, ValueError
        If there is nothing to start from or nothing to generate, or a token is not one of
        the decoder's.
    """
    _check_request(decoder, prompt, n_new)
    tokens, chosen_from, work = list(prompt), [], Work()
    for _ in range(n_new):
        logits, _ = decoder.full_pass(tokens, work)
        chosen_from.append(logits[-1])
        tokens.append(int(logits[-1].argmax()))
    return Generation(tokens, np.array(chosen_from), work)


def generate_by_caching(decoder, prompt, n_new):
    """Generate greedily; every step runs one token.

    Parameters, result and errors are those of `generate_by_recomputing`.
    """
    _check_request(decoder, prompt, n_new)
    tokens, chosen_from, work = list(prompt), [], Work()
    caches = decoder.new_caches(len(prompt) + n_new - 1)  # the last is not run
    for token in prompt[:-1]:
        decoder.cached_step(token, caches, work)
    for _ in range(n_new):
        logits = decoder.cached_step(tokens[-1], caches, work)
        chosen_from.append(logits)
        tokens.append(int(logits.argmax()))
    return Generation(tokens, np.array(chosen_from), work)


def full_causal_attention(q, k, v, work=None):
    """Attend from every token to itself and all before it, through one masked table.

    Parameters
    ----------
    q, k : numpy.ndarray, shape (t, D)
    v : numpy.ndarray, shape (t, D_v)
    work : Work, optional
        The scores computed are added to it.

    Returns
    -------
    numpy.ndarray, shape (t, D_v)
    """
    t = len(q)
    visible = visibility.mask([0], [t], t, t)[0]
    scores = q @ k.T / np.sqrt(q.shape[-1])
    if work is not None:
        work.scores += scores.size
        work.visible_scores += int(visible.sum())
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ v


def _project(x, layer, work):
    """Return query, key and value of x, one row of shape (D,) or several of shape (t, D)."""
    weights = (layer.query, layer.key, layer.value)
    work.rows_projected += len(weights) * len(np.atleast_2d(x))
    return tuple(x @ weight for weight in weights)


def _finish(x, context, layer):
    """Add what attention found to x, and bring each row back to a mean square of one."""
    x = x + context @ layer.output
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True))


def _check_request(decoder, prompt, n_new):
    if len(prompt) == 0:
        raise ValueError("prompt was empty; it must hold at least one token to start from")
    n_vocab = len(decoder.embedding)
    for place, token in enumerate(prompt):
        if whole_number(f"prompt[{place}]", token) >= n_vocab:
            raise ValueError(f"prompt[{place}] was {token}; it must be less than n_vocab = {n_vocab}")
    whole_number("n_new", n_new, least=1)
