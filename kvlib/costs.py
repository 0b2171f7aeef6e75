"""What generating costs, as counts: an exact formula for everything that the pages count.

`Work` is a tally that a decoder fills while it runs (see `kvlib.tiny_decoder`).  The
functions here predict such tallies without running anything; the tests hold the two equal.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvlib._numbers import whole_number

__all__ = [
    "Work",
    "recomputing",
    "caching",
    "compare",
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


def _sum_to(n):
    return n * (n + 1) // 2


def _sum_of_squares_to(n):
    return n * (n + 1) * (2 * n + 1) // 6
