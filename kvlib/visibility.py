"""The rule: which cache slot each query may attend, and why.

Everything that shows, computes or explains visibility takes it from here: the
attention kernel, the widgets, the tests and the pages.

A call offers Q new slots to every row of the batch.  Row b starts the call with
``length`` live slots and appends the first ``count`` of the offered ones.  Query t
belongs to offered slot t, so it lands in slot ``length + t``.  It may attend slot j
exactly when it was appended and j is not later than its own slot.
"""

from __future__ import annotations

import numpy as np

from kvlib._numbers import whole_number

__all__ = [
    "STATES",
    "SENTENCES",
    "QUERY_SENTENCES",
    "may_attend",
    "mask",
    "states",
    "state",
    "sentence",
    "query_sentence",
]

#: Every state a (query, slot) pair can be in.  ``states`` returns indices into this tuple.
STATES = ("past", "chunk", "self", "future", "unused", "idle")

#: Why a query may or may not attend a slot, by state.
SENTENCES = {
    "past": "Slot {slot} was filled before this call: it is the past of query {query}.",
    "chunk": "Slot {slot} holds a token appended before query {query} in this call.",
    "self": "Slot {slot} holds the token of query {query} itself.",
    "future": "Slot {slot} holds a token appended after query {query} in this call: it is the future.",
    "unused": "Slot {slot} is unused: after this call the length of the row is {new_length}.",
    "idle": "Query {query} is idle: nothing was appended for it, so it attends no slot.",
}

#: Which slots a query attends: none, only the first, or several.
QUERY_SENTENCES = {
    "idle": "Query {query} is idle and attends no slot.",
    "one": "Query {query} attends slot 0 only.",
    "many": "Query {query} attends slots 0 to {last}.",
}

# Sums of a few of these still fit int64.
_LARGEST = 2**60


def may_attend(slot, query, length, count):
    """Say whether a query may attend a slot: the one rule of this project.

    Only comparisons, ``+`` and ``&`` are used, so Python integers, numpy arrays and
    torch tensors all work and broadcast in their own way. Nothing is checked, and
    ``length + query`` must fit the integer type.

    Parameters
    ----------
    slot : int or array of int
        j, the index of a cache slot, from 0.
    query : int or array of int
        t, the index of a query among the Q that the call offers, from 0.
    length : int or array of int
        Live slots of the row *before* the call: a count, not a last index.
    count : int or array of int
        How many of the offered slots the row appends.

    Returns
    -------
    bool or array of bool
        True where the query may attend the slot.
    """
    return (query < count) & (slot <= length + query)


def mask(lengths, counts, n_queries, capacity):
    """Return who may attend what, for a whole batch.

    Parameters
    ----------
    lengths, counts : sequence of int, shape (B,)
        Live slots of each row before the call, and how many it appends.
    n_queries : int
        Q, the slots that the call offers to every row.
    capacity : int
        M, the slots of every row's buffer.

    Returns
    -------
    numpy.ndarray of bool, shape (B, Q, M)
        True where a query may attend a slot.

    Raises
    ------
    TypeError, ValueError
        If an argument is not a whole number, is negative, or does not fit the others.
    """
    return may_attend(*_grid(lengths, counts, n_queries, capacity))


def states(lengths, counts, n_queries, capacity):
    """Return the state of every (query, slot) pair, as indices into `STATES`.

    Parameters and errors are those of `mask`.

    Returns
    -------
    numpy.ndarray of int8, shape (B, Q, M)
        ``STATES[result[b, t, j]]`` names why query t of row b may or may not attend slot j.
    """
    reasons = _reasons(*_grid(lengths, counts, n_queries, capacity))
    return np.select(list(reasons.values()), [STATES.index(name) for name in reasons]).astype(np.int8)


def state(slot, query, length, count):
    """Return the state of one (query, slot) pair, one of `STATES`.

    Parameters
    ----------
    slot, query, length, count : int
        As in `may_attend`.
    """
    cell = {"slot": slot, "query": query, "length": length, "count": count}
    reasons = _reasons(*_whole_each(cell))
    return next(name for name, holds in reasons.items() if holds)


def sentence(slot, query, length, count):
    """Return the plain sentence that says why a query may or may not attend a slot.

    Parameters
    ----------
    slot, query, length, count : int
        As in `may_attend`.
    """
    return SENTENCES[state(slot, query, length, count)].format(
        slot=slot, query=query, new_length=length + count
    )


def query_sentence(query, length, count):
    """Return the plain sentence that says which slots a query attends.

    Parameters
    ----------
    query, length, count : int
        As in `may_attend`.
    """
    query, length, count = _whole_each({"query": query, "length": length, "count": count})
    last = length + query
    if query >= count:
        kind = "idle"
    else:
        kind = "many" if last else "one"
    return QUERY_SENTENCES[kind].format(query=query, last=last)


def _reasons(slot, query, length, count):
    """Return, by state and in order of precedence, where each reason holds."""
    own_slot = length + query
    return {
        "idle": query >= count,
        "unused": slot >= length + count,
        "past": slot < length,
        "chunk": slot < own_slot,
        "self": slot == own_slot,
        "future": slot > own_slot,
    }


def _grid(lengths, counts, n_queries, capacity):
    """Return slot, query, length and count, validated and shaped to broadcast to (B, Q, M)."""
    n_queries, capacity = _whole_each({"n_queries": n_queries, "capacity": capacity})
    lengths, counts = _whole_numbers("lengths", lengths), _whole_numbers("counts", counts)
    if len(lengths) != len(counts):
        raise ValueError(
            f"counts has {len(counts)} rows; it must have as many as lengths, {len(lengths)}"
        )
    if (counts > n_queries).any():
        raise ValueError(
            f"counts was {counts.tolist()}; no row can append more than the {n_queries} slots offered"
        )
    if (lengths + counts > capacity).any():
        raise ValueError(
            f"lengths + counts was {(lengths + counts).tolist()}; "
            f"no row can hold more than its capacity of {capacity} slots"
        )
    return (
        np.arange(capacity),
        np.arange(n_queries)[:, None],
        lengths[:, None, None],
        counts[:, None, None],
    )


def _whole_each(numbers):
    return [whole_number(name, number) for name, number in numbers.items()]


def _whole_numbers(name, numbers):
    try:
        numbers = list(numbers)
    except TypeError:
        raise TypeError(f"{name} was {numbers!r}; it must be a sequence of whole numbers") from None
    whole = _whole_each({f"{name}[{row}]": number for row, number in enumerate(numbers)})
    for row, number in enumerate(whole):
        if number > _LARGEST:
            raise ValueError(f"{name}[{row}] was {number}; it must be {_LARGEST} or less")
    return np.array(whole, dtype=np.int64)
