"""What the three caches must compute, slowly and obviously: loops over plain Python floats.

Nothing here comes from kvlib. Tensors are nested lists, indexed as [row][head][slot][feature].
"""

import math


def attend(q, keys, values, scale):
    """Return the weights of one query over a list of keys, and the weighted mean of the values."""
    scores = [scale * sum(a * b for a, b in zip(q, key)) for key in keys]
    best = max(scores)
    exps = [math.exp(score - best) for score in scores]
    weights = [exp / sum(exps) for exp in exps]
    context = [sum(w * value[d] for w, value in zip(weights, values)) for d in range(len(values[0]))]
    return weights, context


def decode_step(q, keys, values):
    """Return output and weights, as ``kvlib.decode_step`` does for a cache that holds these steps."""
    weights, output = attend(q, keys, values, 1 / math.sqrt(len(q)))
    return output, weights


def causal_attention(q, k, v):
    """Return the output of every token of one sequence; token t attends tokens 0 to t."""
    scale = 1 / math.sqrt(len(q[0]))
    return [attend(q[t], k[: t + 1], v[: t + 1], scale)[1] for t in range(len(q))]


def batched_step(query, new_key, new_value, key_cache, value_cache, lengths, append_mask, scale=None):
    """Return what ``kvlib.kv_cache_attention_step`` must return, as nested lists."""
    capacity = len(key_cache[0][0])
    group_size = len(query[0]) // len(key_cache[0])
    if scale is None:
        scale = 1 / math.sqrt(len(key_cache[0][0][0]))
    result = {"key_cache": [], "value_cache": [], "lengths": [], "attention": [], "context": []}
    for b, length in enumerate(lengths):
        count = sum(append_mask[b])
        keys = [[list(slot) for slot in head] for head in key_cache[b]]
        values = [[list(slot) for slot in head] for head in value_cache[b]]
        for head in range(len(keys)):
            for t in range(count):
                keys[head][length + t] = list(new_key[b][head][t])
                values[head][length + t] = list(new_value[b][head][t])
        attention, context = [], []
        for h, head_queries in enumerate(query[b]):
            head = h // group_size
            attention.append([])
            context.append([])
            for t, q in enumerate(head_queries):
                row_weights, row_context = [0.0] * capacity, [0.0] * len(values[head][0])
                if t < count:
                    seen = length + t + 1
                    weights, row_context = attend(q, keys[head][:seen], values[head][:seen], scale)
                    row_weights[:seen] = weights
                attention[h].append(row_weights)
                context[h].append(row_context)
        for name, rows in (("key_cache", keys), ("value_cache", values)):
            result[name].append(rows)
        result["lengths"].append(length + count)
        result["attention"].append(attention)
        result["context"].append(context)
    return result
