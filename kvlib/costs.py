"""What generating costs, as counts: an exact formula for everything that the pages count.

`Work` is a tally that a decoder fills while it runs (see `kvlib.tiny_decoder`).  The
functions here predict such tallies without running anything; the tests hold the two equal.
`StepCost` is what one batched step has to move and to compute, whoever runs it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvlib._numbers import whole_number

__all__ = [
    "Work",
    "recomputing",
    "caching",
    "compare",
    "StepCost",
    "attention_step",
    "cache_nbytes",
    "rows_recopied_by_concatenation",
]


@dataclass
class Work:
    """A tally of what was done, added up over all layers and steps."""

    #: Rows multiplied by one of W_q, W_k, W_v.  One token costs three in each layer.
    rows_projected: int = 0
    #: Query-key products computed, hidden ones included.
    scores: int = 0
    #: Those of them that the query may attend.
    visible_scores: int = 0
    #: Bytes of keys and values written when made, plus bytes read to attend.
    bytes_moved: int = 0


def recomputing(n_prompt, n_new, *, n_layers=1, head_dim=1, itemsize=8):
    """Return the work of generating with no cache: every step runs the whole prefix again.

    Parameters
    ----------
    n_prompt, n_new : int
        Tokens given, and tokens generated; at least 1 each.  The steps run over n_prompt,
        n_prompt + 1, ..., n_prompt + n_new - 1 tokens.
    n_layers, head_dim : int
        L and D of a decoder with one head, for which D_v equals D.
    itemsize : int
        Bytes per number.

    Returns
    -------
    Work
        For a decoder that fills the full t x t score table at every step.

    Raises
    ------
    TypeError, ValueError
        If an argument is not a whole number of at least 1; the message names it.
    """
    last, row_nbytes = _last_and_row_nbytes(n_prompt, n_new, n_layers, head_dim, itemsize)
    tokens = _sum_to(last) - _sum_to(n_prompt - 1)
    squares = _sum_of_squares_to(last) - _sum_of_squares_to(n_prompt - 1)
    return Work(
        rows_projected=3 * n_layers * tokens,
        scores=n_layers * squares,
        visible_scores=n_layers * (squares + tokens) // 2,
        bytes_moved=n_layers * 2 * tokens * row_nbytes,
    )


def caching(n_prompt, n_new, *, n_layers=1, head_dim=1, itemsize=8):
    """Return the work of generating with a cache: every token is run once.

    Parameters and errors are those of `recomputing`.

    Returns
    -------
    Work
        For a decoder that takes the prompt, too, one token at a time.
    """
    last, row_nbytes = _last_and_row_nbytes(n_prompt, n_new, n_layers, head_dim, itemsize)
    scores = n_layers * _sum_to(last)
    return Work(
        rows_projected=3 * n_layers * last,
        scores=scores,
        visible_scores=scores,
        bytes_moved=n_layers * (last + _sum_to(last)) * row_nbytes,
    )


def compare(**works):
    """Return tallies side by side as text, one column for each keyword.

    Parameters
    ----------
    **works : Work
        The tallies, by the heading of their column.

    Returns
    -------
    str
        A table with one line for each kind of work.
    """
    lines = [f"{'':14}" + "".join(f"{heading:>11}" for heading in works)]
    for field in fields(Work):
        counts = "".join(f"{getattr(work, field.name):>11,}" for work in works.values())
        lines.append(f"{field.name.replace('_', ' '):14}" + counts)
    return "\n".join(lines)


@dataclass(frozen=True)
class StepCost:
    """What one attention step has to move between memory and processor, and to compute."""

    #: Bytes that the result depends on, each read once.
    bytes_read: int
    #: Bytes of the result that were not there before, each written once.
    bytes_written: int
    #: Products of two numbers, each added to a sum; as floating-point operations, two each.
    multiply_adds: int

    @property
    def bytes_moved(self):
        """Bytes read plus bytes written."""
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self):
        """Multiply-adds per byte moved: the arithmetic intensity."""
        return self.multiply_adds / self.bytes_moved


def attention_step(
    lengths,
    counts,
    n_queries,
    capacity,
    *,
    n_heads,
    n_kv_heads,
    head_dim,
    itemsize,
    head_dim_v=None,
    in_place,
    need_weights,
):
    """Return what a batched attention step has to move and to compute, at the least.

    Counted are the queries, keys, values, contexts and weights, and the products of attention.
    The few integers of the lengths and of the append mask are not, nor is the softmax.  Every
    appended query counts as read, even one that may attend a single slot, with weight 1.

    Parameters
    ----------
    lengths, counts : sequence of int, shape (B,)
        Live slots of each row before the call, and how many of the offered slots it appends.
    n_queries, capacity : int
        Q and M.
    n_heads, n_kv_heads : int
        H_q and H_k; H_q must be a multiple of H_k.
    head_dim, head_dim_v : int
        D and D_v; D_v defaults to D.
    itemsize : int
        Bytes per number: 2 for float16 and bfloat16, 4 for float32.
    in_place : bool
        True for a step that writes the appended slots into the caches that it is given, as
        `kv_cache_attention_step_` does; False for one that returns updated copies.
    need_weights : bool
        Whether the step returns the attention weights, too, for all M slots.

    Returns
    -------
    StepCost
        Of a step that reads each number that it needs once, and writes each new number once.

    Raises
    ------
    TypeError, ValueError
        If a count is not a whole number, is negative, or does not fit the others; the message
        names it.
    """
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    _validate_sizes(n_heads, n_kv_heads, head_dim, itemsize, head_dim_v)
    rows = _step_rows(lengths, counts, n_queries, capacity)
    n_rows, appended = len(rows), sum(n for _, n in rows)
    if in_place:
        old_slots = sum(length for length, n in rows if n)
        new_slots = appended
    else:
        old_slots = n_rows * capacity - appended
        new_slots = n_rows * capacity
    slot = n_kv_heads * (head_dim + head_dim_v)  # numbers in a slot
    weights = n_rows * n_heads * n_queries * capacity if need_weights else 0
    read = (old_slots + appended) * slot + appended * n_heads * head_dim
    written = new_slots * slot + n_rows * n_queries * n_heads * head_dim_v
    visible = sum(n * length + _sum_to(n) for length, n in rows)
    return StepCost(
        bytes_read=read * itemsize,
        bytes_written=(written + weights) * itemsize,
        multiply_adds=visible * n_heads * (head_dim + head_dim_v),
    )


def cache_nbytes(n_layers, n_kv_heads, head_dim, n_tokens, itemsize, head_dim_v=None):
    """Return the bytes that cached keys and values occupy.

    Parameters
    ----------
    n_layers, n_kv_heads : int
        L and H_k.  H_q is no argument: queries are never cached.
    head_dim, head_dim_v : int
        D and D_v; D_v defaults to D.
    n_tokens : int
        Tokens cached, added up over the rows of the batch; or B * M for what is allocated.
    itemsize : int
        Bytes per number: 2 for float16 and bfloat16, 4 for float32.

    Returns
    -------
    int
        L * H_k * n_tokens * (D + D_v) * itemsize.

    Raises
    ------
    TypeError, ValueError
        If an argument is not a whole number or is negative; the message names it.
    """
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    arguments = {
        "n_layers": n_layers,
        "n_kv_heads": n_kv_heads,
        "head_dim": head_dim,
        "n_tokens": n_tokens,
        "itemsize": itemsize,
        "head_dim_v": head_dim_v,
    }
    for name, number in arguments.items():
        whole_number(name, number)
    return n_layers * n_kv_heads * n_tokens * (head_dim + head_dim_v) * itemsize


def rows_recopied_by_concatenation(n_tokens):
    """Return how many rows that were cached already get copied again.

    Concatenation puts old and new rows into new memory, so the append after t tokens copies
    t old rows.  Keys and values are counted once, as one row a token.

    Parameters
    ----------
    n_tokens : int
        Tokens appended one at a time to a cache that starts empty.

    Returns
    -------
    int
        0 + 1 + ... + (n_tokens - 1).

    Raises
    ------
    TypeError, ValueError
        If n_tokens is not a whole number or is negative.
    """
    whole_number("n_tokens", n_tokens)
    return _sum_to(n_tokens - 1)


def _last_and_row_nbytes(n_prompt, n_new, n_layers, head_dim, itemsize):
    """Return the tokens that the last step runs over, and the bytes of one K and one V row."""
    arguments = {
        "n_prompt": n_prompt,
        "n_new": n_new,
        "n_layers": n_layers,
        "head_dim": head_dim,
        "itemsize": itemsize,
    }
    for name, number in arguments.items():
        whole_number(name, number, least=1)
    return n_prompt + n_new - 1, 2 * head_dim * itemsize


def _validate_sizes(n_heads, n_kv_heads, head_dim, itemsize, head_dim_v):
    sizes = {
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "head_dim": head_dim,
        "itemsize": itemsize,
        "head_dim_v": head_dim_v,
    }
    for name, number in sizes.items():
        whole_number(name, number, least=1)
    if n_heads % n_kv_heads:
        raise ValueError(f"n_heads was {n_heads}; it must be a multiple of n_kv_heads, {n_kv_heads}")


def _step_rows(lengths, counts, n_queries, capacity):
    """Return the length and the count of every row, checked."""
    n_queries, capacity = whole_number("n_queries", n_queries), whole_number("capacity", capacity)
    if len(lengths) != len(counts):
        raise ValueError(
            f"counts has {len(counts)} rows; it must have as many as lengths, {len(lengths)}"
        )
    rows = [
        (whole_number(f"lengths[{row}]", length), whole_number(f"counts[{row}]", count))
        for row, (length, count) in enumerate(zip(lengths, counts))
    ]
    for row, (length, count) in enumerate(rows):
        if count > n_queries:
            raise ValueError(f"counts[{row}] was {count}; it must be at most n_queries, {n_queries}")
        if length + count > capacity:
            raise ValueError(
                f"lengths[{row}] + counts[{row}] was {length + count}; "
                f"it must be at most the capacity, {capacity}"
            )
    return rows


def _sum_to(n):
    return n * (n + 1) // 2


def _sum_of_squares_to(n):
    return n * (n + 1) * (2 * n + 1) // 6
