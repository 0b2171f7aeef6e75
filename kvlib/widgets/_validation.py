"""Checks of arguments that only widgets take."""

from __future__ import annotations

import operator


def whole(name, number):
    """Return a whole number of 0 or more as an int."""
    try:
        number = operator.index(number)
    except TypeError:
        raise TypeError(f"{name} was {number!r}; it must be a whole number") from None
    if number < 0:
        raise ValueError(f"{name} was {number}; it must be 0 or more")
    return number


def index(name, number, size):
    """Return an index below size as an int."""
    number = whole(name, number)
    if number >= size:
        raise ValueError(f"{name} was {number}; it must be less than {size}")
    return number


def text(name, value):
    """Return a string."""
    if not isinstance(value, str):
        raise TypeError(f"{name} was {value!r}; it must be a string")
    return value
