"""Plain torch: what one writes oneself, and scaled_dot_product_attention."""

import math

import torch
from torch.nn.functional import scaled_dot_product_attention

from peers import COPIED, IN_PLACE, Peer, visible


def _read(result):
    return result[:3]


def _written(args, keys, values):
    """Write the new slots into caches, and return these."""
    row = torch.arange(len(keys))[:, None]
    slot = args["lengths"][:, None] + torch.arange(args["query"].shape[2])  # [B, Q]
    keys[row, :, slot] = args["new_key"].transpose(1, 2)
    values[row, :, slot] = args["new_value"].transpose(1, 2)
    return keys, values


def _copied(args):
    return _written(args, args["key_cache"].clone(), args["value_cache"].clone())


def _bias(args):
    """Return what is added to the scores: minus infinity where a query may not attend."""
    return torch.zeros(()).masked_fill(~visible(args), -math.inf)


def textbook(args):
    """Heads repeated, the mask added, all slots attended."""
    keys, values = _copied(args)
    query, group = args["query"], args["query"].shape[1] // keys.shape[1]
    every_key, every_value = (cache.repeat_interleave(group, dim=1) for cache in (keys, values))
    scores = query @ every_key.mT / math.sqrt(query.shape[-1]) + _bias(args)
    weights = torch.softmax(scores, dim=-1)
    return weights @ every_value, keys, values, weights


def folded(args):
    """The query heads of a group as rows of one matrix, instead of repeated keys and values."""
    keys, values = _copied(args)
    query, (B, H_k, M, D) = args["query"], keys.shape
    rows = query.reshape(B, H_k, -1, D)
    scores = (rows @ keys.mT / math.sqrt(D)).view(*query.shape[:3], M) + _bias(args)
    weights = torch.softmax(scores, dim=-1)
    context = weights.view(B, H_k, -1, M) @ values
    return context.view(query.shape), keys, values, weights


def sdpa(args):
    """scaled_dot_product_attention over all slots of copied caches."""
    keys, values = _copied(args)
    context = scaled_dot_product_attention(args["query"], keys, values, visible(args), enable_gqa=True)
    return context, keys, values


def sdpa_in_place(args):
    """The same over caches that are written in place."""
    keys, values = _written(args, args["key_cache"], args["value_cache"])
    context = scaled_dot_product_attention(args["query"], keys, values, visible(args), enable_gqa=True)
    return context, keys, values


def sdpa_rows(args):
    """scaled_dot_product_attention over each row's live slots, one row after the other."""
    keys, values, query = args["key_cache"], args["value_cache"], args["query"]
    Q = query.shape[2]
    context = torch.empty_like(query)
    for row, length in enumerate(args["lengths"].tolist()):
        new, live = slice(length, length + Q), slice(length + Q)
        keys[row, :, new] = args["new_key"][row]
        values[row, :, new] = args["new_value"][row]
        mask = None if Q == 1 else torch.ones(Q, length + Q, dtype=torch.bool).tril(length)
        one = slice(row, row + 1)
        context[one] = scaled_dot_product_attention(
            query[one], keys[one, :, live], values[one, :, live], mask, enable_gqa=True
        )
    return context, keys, values


def _prepared(step):
    return lambda args: (lambda: step(args), _read)


PEERS = [
    Peer("textbook", "torch, heads repeated, mask added", COPIED, True, _prepared(textbook)),
    Peer(
        "folded",
        "torch, grouped heads folded into one matrix, mask added",
        COPIED,
        True,
        _prepared(folded),
    ),
    Peer("sdpa", "torch's scaled_dot_product_attention, enable_gqa", COPIED, False, _prepared(sdpa)),
    Peer("sdpa_", "the same, batched over the whole buffer", IN_PLACE, False, _prepared(sdpa_in_place)),
    Peer("sdpa_ rows", "the same, row by row on live slots", IN_PLACE, False, _prepared(sdpa_rows)),
]
