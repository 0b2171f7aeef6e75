"""The check that a count, a size or an index is a whole number that is large enough."""

from __future__ import annotations

import operator


def whole_number(name, number, least=0):
    """Return `number` as an int.

    Raises
    ------
    TypeError
        If it is not a whole number; True and False are not.
    ValueError
        If it is less than `least`.
    """
    try:
        whole = operator.index(number)
    except TypeError:
        whole = None
    if whole is None or isinstance(number, bool):
        raise TypeError(f"{name} was {number!r}; it must be a whole number")
    if whole < least:
        raise ValueError(f"{name} was {whole}; it must be {least} or more")
    return whole
