"""The two smaller caches against the least they could do, and how cost grows with the prefix.

    python benchmarks/small_caches.py           about a minute
    python benchmarks/small_caches.py --quick   a few seconds

Keys and values are of size 64.  Prefixes for the growth are long enough to leave the fixed cost
of a call behind, and to use numpy's threads, of which it decides itself, throughout.
"""

import argparse
import os
import statistics
from itertools import product

import numpy as np
import timing
import torch
from report import Interference, duration, goal, machine, print_goals, print_table, versions
from torch.nn.functional import scaled_dot_product_attention

from kvlib import KVCache, decode_step, kv_cache_attention_step_, kv_cache_step, tuple_cache

SEED = 20241
D = 64  # of keys and values alike
LONG_PREFIXES = (8192, 16384, 32768, 65536)
QUICK_PREFIXES = (1024, 2048)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="measure for a moment, over short prefixes")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch (default: all)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    seconds, prefixes = (0.2, QUICK_PREFIXES) if options.quick else (3, LONG_PREFIXES)

    interference = Interference()
    print(
        "\n== The two smaller caches ==\n", machine(), versions(), f"Seed {SEED}, D = {D}.\n", sep="\n"
    )
    goals = [compare_decode_step(256, seconds)]
    for B, T in product((1, 8), (16, 256, 4096)):
        goals += compare_cache_step(B, T, seconds)
    print_goals(goals)
    print_growth(prefixes, seconds)
    print(interference)


def compare_decode_step(length, seconds):
    """Time decode_step against the two matrix products that it needs, over arrays at hand.

    A softmax between the products, without any check, is the least that numpy can do.
    """
    q, cache = _decode_step_inputs(length)
    keys, values = cache.keys(), cache.values()

    def bare():
        return (keys @ q) @ values

    def least():
        scores = keys @ q
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        return weights @ values

    steps = {"ours": lambda: decode_step(q, cache), "bare": bare, "least": least}
    taken = timing.interleave(steps, seconds)
    print(
        f"decode_step: a softmax without checks makes the two products take "
        f"{timing.ratio(taken, 'least', 'bare'):.2f} times as long."
    )
    return goal(
        f"decode_step, len {length}, over two bare products",
        timing.ratio(taken, "ours", "bare"),
        at_most=1.5,
    )


def compare_cache_step(B, T, seconds):
    """Time kv_cache_step against concatenation and scaled_dot_product_attention.

    The latter is faster over heads, if only one, than over [B, T, D]: both are measured.
    """
    q, k, v, cache = _cache_step_inputs(B, T)

    def grown():
        return torch.cat([cache[0], k], dim=1), torch.cat([cache[1], v], dim=1)

    def plain():
        keys, values = grown()
        return scaled_dot_product_attention(q, keys, values), (keys, values)

    def one_head():
        keys, values = grown()
        heads = (x[:, None] for x in (q, keys, values))
        return scaled_dot_product_attention(*heads)[:, 0], (keys, values)

    def ours():
        return kv_cache_step(q, k, v, cache)

    def checks():
        return tuple_cache._validate(q, k, v, cache)

    rivals = {"cat and sdpa": plain, "cat and sdpa of one head": one_head}
    for rival in rivals.values():
        torch.testing.assert_close(ours(), rival())
    taken = timing.interleave({"ours": ours, "checks": checks, **rivals}, seconds)
    print(f"kv_cache_step, B={B} T={T}: its checks are {timing.ratio(taken, 'checks', 'ours'):.0%} of it.")
    return [
        goal(f"kv_cache_step, B={B} T={T}, over {name}", timing.ratio(taken, "ours", name), at_most=1)
        for name in rivals
    ]


def print_growth(prefixes, seconds):
    """Print the time of a token at each prefix, and the exponent that fits it."""
    makers = {
        "decode_step": decode_step_at,
        "kv_cache_step": cache_step_at,
        "kv_cache_attention_step_": lambda prefix: attention_step_at(prefix, 2 * max(prefixes)),
    }
    rows = []
    for name, maker in makers.items():
        taken = timing.interleave({prefix: maker(prefix) for prefix in prefixes}, seconds)
        medians = [statistics.median(taken[prefix]) for prefix in prefixes]
        rows.append([name, *map(duration, medians), f"{timing.slope(prefixes, medians):.2f}"])
    print(
        "Time of one token after a prefix of so many, and the exponent p of prefix ** p that fits best."
    )
    print(
        f"The batched step: B = 2 rows of that prefix, heads 8/2, M = {2 * max(prefixes)} throughout, no weights."
    )
    print_table(["", *map(str, prefixes), "exponent"], rows)


def decode_step_at(prefix):
    q, cache = _decode_step_inputs(prefix)
    return lambda: decode_step(q, cache)


def cache_step_at(prefix):
    inputs = _cache_step_inputs(1, prefix)
    return lambda: kv_cache_step(*inputs)


def attention_step_at(prefix, capacity):
    random = torch.Generator().manual_seed(SEED)
    B, H_q, H_k = 2, 8, 2
    shapes = [
        (B, H_q, 1, D),
        (B, H_k, 1, D),
        (B, H_k, 1, D),
        (B, H_k, capacity, D),
        (B, H_k, capacity, D),
    ]
    floats = [torch.randn(shape, generator=random) for shape in shapes]
    lengths, append = torch.full((B,), prefix), torch.ones(B, 1, dtype=torch.bool)
    return lambda: kv_cache_attention_step_(*floats, lengths, append, {}, need_weights=False)


def _decode_step_inputs(length):
    random = np.random.default_rng(SEED)
    cache = KVCache(length, D, D)
    cache.append(random.standard_normal((length, D)), random.standard_normal((length, D)))
    return random.standard_normal(D), cache


def _cache_step_inputs(B, T):
    """Return query, key and value of a new token, and the keys and values of T tokens before."""
    random = torch.Generator().manual_seed(SEED)
    q, k, v, *cache = (torch.randn(B, n, D, generator=random) for n in (1, 1, 1, T, T))
    return q, k, v, tuple(cache)


if __name__ == "__main__":
    with torch.no_grad():
        main()
