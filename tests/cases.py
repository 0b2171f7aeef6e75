"""Inputs that several test files share: batches of every shape, and a look at their bits."""

import torch
from hypothesis import settings
from hypothesis import strategies as st

from kvlib._tensors import wide

torch.set_num_threads(1)

#: The same examples on every run, on every machine: a failure that comes and goes teaches nobody.
PROPERTY = settings(deadline=None, derandomize=True, database=None, max_examples=100)

FLOATS = ("query", "new_key", "new_value", "key_cache", "value_cache")
INTEGERS = (
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)

#: One row of every kind: empty and idle; empty, appends two; appends all and is full; full and idle;
#: appends one of three.
RAGGED = {"lengths": (0, 0, 2, 5, 3), "counts": (0, 2, 3, 0, 1), "n_queries": 3, "capacity": 5}


def batch(
    lengths,
    counts,
    n_queries,
    capacity,
    *,
    H_q=4,
    H_k=2,
    D=3,
    D_v=2,
    dtype=torch.float64,
    seed=0,
    **options,
):
    """Return random arguments for ``kv_cache_attention_step``, as a dict."""
    generator = torch.Generator().manual_seed(seed)
    B, Q, M = len(lengths), n_queries, capacity

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "query": normal(B, H_q, Q, D),
        "new_key": normal(B, H_k, Q, D),
        "new_value": normal(B, H_k, Q, D_v),
        "key_cache": normal(B, H_k, M, D),
        "value_cache": normal(B, H_k, M, D_v),
        "lengths": torch.tensor(lengths, dtype=torch.int64),
        "append_mask": torch.tensor([[t < n for t in range(Q)] for n in counts], dtype=torch.bool).view(
            B, Q
        ),
        "options": options,
    }


def row(args, b):
    """Return row b of a batch as a batch of one row."""
    return {name: value if name == "options" else value[b : b + 1] for name, value in args.items()}


def as_lists(args):
    """Return the arguments of a batch as ``reference.batched_step`` takes them."""
    lists = {name: value.tolist() for name, value in args.items() if name != "options"}
    return lists | args["options"]


def with_gradients(args):
    """Return the same batch with fresh floating leaves that require gradients."""
    return args | {name: args[name].detach().clone().requires_grad_() for name in FLOATS}


def bits(tensor):
    """Return the bits of a floating tensor as integers, which tell NaNs and zeros apart."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().contiguous().view(integer)


def assert_same_bits(actual, expected):
    assert actual.dtype == expected.dtype
    assert torch.equal(bits(actual), bits(expected))


def snapshot(args):
    """Return what ``assert_unchanged`` needs to prove that a batch is as it was."""
    return {
        name: dict(value) if name == "options" else (value, value._version, value.detach().clone())
        for name, value in args.items()
    }


def assert_unchanged(args, before):
    assert args["options"] == before["options"]
    for name in args.keys() - {"options"}:
        tensor, version, copy = before[name]
        assert args[name] is tensor
        assert tensor._version == version, f"{name} was written in place"
        if name in FLOATS:
            assert_same_bits(tensor, copy)
        else:
            assert torch.equal(tensor, copy), name


def live_slots(args):
    """Return which slots hold a live token after the call, [B, M]."""
    new_lengths = args["lengths"].long() + args["append_mask"].sum(dim=1)
    return torch.arange(args["key_cache"].shape[2]) < new_lengths[:, None]


def appended_slots(args):
    """Return which slots the call writes, [B, M]."""
    return live_slots(args) & (
        torch.arange(args["key_cache"].shape[2]) >= args["lengths"].long()[:, None]
    )


def per_slot(where):
    """Shape a choice of rows and slots so that it broadcasts over heads and features."""
    return where[:, None, :, None]


def poisoned(args, key=0.0, value=0.0, query=0.0):
    """Fill what no query may ever read: unused tails, slots that are not appended, idle queries."""
    idle, tail = per_slot(~args["append_mask"]), per_slot(~live_slots(args))
    fills = zip(FLOATS, (idle, idle, idle, tail, tail), (query, key, value, key, value))
    return args | {
        name: args[name].double().masked_fill(where, fill).to(args[name].dtype)
        for name, where, fill in fills
    }


def rounding(args):
    """Return how far two ways to compute the context of a batch may be apart.

    Each may err by a few roundings of the values it averages, and by what an error in the largest
    score does to their weights.
    """
    dtype = args["query"].dtype
    eps, score_eps = torch.finfo(dtype).eps, torch.finfo(wide(dtype)).eps
    keys, values = (
        torch.cat([args[new], args[cache]], dim=2).double().nan_to_num(0, 0, 0).abs().max()
        for new, cache in (("new_key", "key_cache"), ("new_value", "value_cache"))
    )
    queries = args["query"].double().nan_to_num(0, 0, 0).abs()
    D = queries.shape[3]
    scores = queries.max() * keys * args["options"].get("scale", D**-0.5) * D if queries.numel() else 0
    return float((4 * eps + 8 * score_eps * scores) * values)


@st.composite
def batches(draw, dtype=torch.float64):
    """Draw arguments for ``kv_cache_attention_step``: any shape, any lengths, any prefix to append."""
    size = st.integers(1, 4)
    B, H_k, group_size, D, D_v = (draw(size) for _ in range(5))
    M, Q = draw(st.integers(1, 6)), draw(st.integers(0, 4))
    lengths = [draw(st.integers(0, M)) for _ in range(B)]
    counts = [draw(st.integers(0, min(Q, M - length))) for length in lengths]
    scale = draw(st.sampled_from([None, 0.01, 1.0, 30.0]))
    return batch(
        lengths,
        counts,
        Q,
        M,
        H_q=H_k * group_size,
        H_k=H_k,
        D=D,
        D_v=D_v,
        dtype=dtype,
        seed=draw(st.integers(0, 2**32)),
        **({} if scale is None else {"scale": scale}),
    )
