"""Hugging Face transformers: its eager attention on its static cache.

That cache has one position for all rows.  As transformers' own padding does, rows of different
length are padded on the left, so that all end in the same slot, and the mask hides the padding.
The mask is made beforehand: transformers makes it once for all layers.
"""

from types import SimpleNamespace

import torch
from transformers.cache_utils import StaticLayer
from transformers.models.llama.modeling_llama import eager_attention_forward

from peers import IN_PLACE, Peer


def _rolled(cache, by):
    """Return the cache, row b moved `by[b]` slots to the right."""
    return torch.stack([row.roll(n, dims=1) for row, n in zip(cache, by.tolist())])


def _eager(args):
    query, lengths = args["query"], args["lengths"]
    H_k, M = args["key_cache"].shape[1:3]
    padding = lengths.max() - lengths  # [B]
    layer = StaticLayer(M)
    layer.lazy_initialization(args["new_key"], args["new_value"])
    layer.keys.copy_(_rolled(args["key_cache"], padding))
    layer.values.copy_(_rolled(args["value_cache"], padding))

    slot = torch.arange(M)
    last = lengths.max() + torch.arange(query.shape[2])
    seen = (slot >= padding[:, None, None]) & (slot <= last[:, None])  # [B, Q, M]
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(query.dtype).min)[:, None]
    module = SimpleNamespace(num_key_value_groups=query.shape[1] // H_k, training=False)
    scaling = query.shape[-1] ** -0.5

    def step():
        layer.cumulative_length.fill_(lengths_before)
        keys, values = layer.update(args["new_key"], args["new_value"])
        return eager_attention_forward(module, query, keys, values, mask, scaling)

    def read(result):
        return result[0].transpose(1, 2), _rolled(layer.keys, -padding), _rolled(layer.values, -padding)

    lengths_before = lengths.max().item()
    return step, read


PEERS = [Peer("hf eager_", "transformers' eager attention on its StaticLayer", IN_PLACE, True, _eager)]
