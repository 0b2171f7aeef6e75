"""JAX's dot_product_attention computes what the step does, and so do its gradients.

It has grouped heads but no cache and one size for keys and values.  Decoding takes its own lengths of
keys, and prompts its own causal rule, so there nothing but the numbers comes from kvlib; ragged chunks
take the rule of kvlib as a mask.  The gradients of both, derived by two systems, agree in the query, in
what is appended, and in the caches.
"""

from functools import partial

import cases
import jax
import numpy as np
import pytest
import torch

from kvlib import kv_cache_attention_step, visibility

#: Numbers of order 1, in float32: JAX takes every softmax in it.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}

HEADS = [
    {"H_q": 4, "H_k": 4, "D": 3},
    {"H_q": 6, "H_k": 2, "D": 5, "scale": 0.7},
    {"H_q": 5, "H_k": 1, "D": 8},
]
#: A batch whose rows are empty, begun and full, and append all, some or none.
CHUNKS = {"lengths": (0, 0, 2, 5, 3, 1), "counts": (0, 2, 3, 0, 1, 3), "n_queries": 3, "capacity": 5}


def batch(lengths, counts, n_queries, capacity, *, D, **others):
    return cases.batch(lengths, counts, n_queries, capacity, D=D, D_v=D, dtype=torch.float32, **others)


def arrays(args):
    """Return the floating arguments for JAX."""
    return {name: jax.numpy.asarray(args[name].numpy()) for name in cases.FLOATS}


@partial(jax.jit, static_argnames=("scale", "is_causal"))
def attend(floats, row, offered, slot, **rule):
    """Return the context that JAX computes after some appends, [B, H_q, Q, D].

    Of each of these rows, this offered slot goes into this slot of the cache.
    """

    def appended(cache, new):
        return cache.at[row, :, slot].set(new[row, :, offered]).swapaxes(1, 2)

    keys = appended(floats["key_cache"], floats["new_key"])
    values = appended(floats["value_cache"], floats["new_value"])
    return jax.nn.dot_product_attention(floats["query"].swapaxes(1, 2), keys, values, **rule).swapaxes(1, 2)


def appends(args):
    row, offered = (index.numpy() for index in args["append_mask"].nonzero(as_tuple=True))
    return {"row": row, "offered": offered, "slot": args["lengths"].numpy()[row] + offered}


def rule_of_kvlib(args):
    shape = args["query"].shape[2], args["key_cache"].shape[2]
    counts = args["append_mask"].sum(dim=1)
    return visibility.mask(args["lengths"].tolist(), counts.tolist(), *shape)[:, None]


def assert_near(actual, expected):
    torch.testing.assert_close(actual, torch.from_numpy(np.array(expected)), **TOLERANCE)


@pytest.mark.parametrize("heads", HEADS)
def test_decoding_agrees_with_jax_by_lengths_of_keys(step, heads):
    args = batch((0, 3, 6, 1), (1, 1, 1, 1), 1, 7, **heads)
    filled = args["lengths"].numpy().astype(np.int32) + 1
    expected = attend(arrays(args), **appends(args), **args["options"], key_value_seq_lengths=filled)
    assert_near(step(**args)["context"], expected)


@pytest.mark.parametrize("heads", HEADS)
def test_prompts_agree_with_jax_by_its_causal_rule(step, heads):
    counts = (4, 1, 3, 2)
    args = batch((0, 0, 0, 0), counts, 4, 6, **heads)
    asked = np.array(counts, dtype=np.int32)
    rule = {"is_causal": True, "query_seq_lengths": asked, "key_value_seq_lengths": asked}
    expected = attend(arrays(args), **appends(args), **args["options"], **rule)
    assert_near(step(**args)["context"], expected)


@pytest.mark.parametrize("heads", HEADS)
def test_ragged_chunks_agree_with_jax_under_the_rule(step, heads):
    args = batch(**CHUNKS, **heads)
    expected = attend(arrays(args), **appends(args), **args["options"], mask=rule_of_kvlib(args))
    # Without a slot to attend, JAX takes the mean over all.
    expected = np.where(args["append_mask"].numpy()[:, None, :, None], expected, 0)
    assert_near(step(**args)["context"], expected)


@pytest.mark.parametrize("heads", HEADS)
def test_gradients_agree_with_jax(heads):
    args = batch(**CHUNKS, **heads)
    asked = appends(args) | args["options"] | {"mask": rule_of_kvlib(args)}
    direction = torch.randn(args["query"].shape, generator=torch.Generator().manual_seed(1))
    direction = direction.where(args["append_mask"][:, None, :, None], 0)

    def along_direction(floats):
        return (attend(floats, **asked) * direction.numpy()).sum()

    expected = jax.grad(along_direction)(arrays(args))
    args = cases.with_gradients(args)
    leaves = [args[name] for name in cases.FLOATS]
    gradients = torch.autograd.grad((kv_cache_attention_step(**args)["context"] * direction).sum(), leaves)
    for name, gradient in zip(cases.FLOATS, gradients, strict=True):
        assert gradient.any(), name
        assert_near(gradient, expected[name])
