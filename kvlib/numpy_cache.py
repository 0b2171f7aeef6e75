"""A fixed-capacity key/value cache for one sequence, and one decode step over it.

Contract: ``KVCache(max_len, d_k, d_v)`` and ``decode_step(q, cache)``, numpy only.
"""

from __future__ import annotations

import math

import numpy as np

from kvlib._numbers import whole_number

__all__ = ["KVCache", "decode_step"]


class KVCache:
    """The keys and values of one sequence, in a buffer that never grows.

    Parameters
    ----------
    max_len : int
        M, the number of steps there is room for; at least 1.
    d_k, d_v : int
        D and D_v, the sizes of one key and one value; at least 1.

    Raises
    ------
    TypeError, ValueError
        If a size is not a whole number, or is less than 1.
    """

    def __init__(self, max_len, d_k, d_v):
        self._max_len = whole_number("max_len", max_len, least=1)
        self._keys = np.zeros((self._max_len, whole_number("d_k", d_k, least=1)))
        self._values = np.zeros((self._max_len, whole_number("d_v", d_v, least=1)))
        self._len = 0

    def __len__(self):
        return self._len

    def __repr__(self):
        return f"<KVCache: {self._len} of {self._max_len} steps, d_k={self.d_k}, d_v={self.d_v}>"

    @property
    def max_len(self):
        """M, the number of steps there is room for."""
        return self._max_len

    @property
    def d_k(self):
        """D, the size of one key."""
        return self._keys.shape[1]

    @property
    def d_v(self):
        """D_v, the size of one value."""
        return self._values.shape[1]

    def append(self, k, v):
        """Store a copy of one or more steps behind those already stored.

        Either everything is stored, or an error is raised and nothing has changed.

        Parameters
        ----------
        k : array_like, shape (d_k,) or (n, d_k)
            The key of one step, or of n steps; n may be 0.
        v : array_like, shape (d_v,) or (n, d_v)
            The values of the same steps.

        Raises
        ------
        TypeError
            If k or v does not hold real numbers.
        ValueError
            If the steps do not fit, if k and v differ in their number of steps, if a shape
            is wrong, or if a number is not finite: one NaN would spoil every later output.
        """
        k, v = _steps("k", k, self.d_k), _steps("v", v, self.d_v)
        if len(k) != len(v):
            raise ValueError(
                f"v has {len(v)} steps; it must have as many as k, {len(k)}"
            )
        end = self._len + len(k)
        if end > self._max_len:
            raise ValueError(
                f"k and v add {len(k)} steps to the {self._len} stored, "
                f"{end} in all; they must fit in max_len, {self._max_len}"
            )
        self._keys[self._len : end] = k
        self._values[self._len : end] = v
        self._len = end

    def keys(self):
        """Return the stored keys, in the order of the appends.

        Returns
        -------
        numpy.ndarray of float64, shape (len(cache), d_k)
            A copy: it is the caller's, and neither changes the cache nor changes with it.
        """
        return self._stored()[0].copy()

    def values(self):
        """Return the stored values, in the order of the appends.

        Returns
        -------
        numpy.ndarray of float64, shape (len(cache), d_v)
            A copy: it is the caller's, and neither changes the cache nor changes with it.
        """
        return self._stored()[1].copy()

    def _stored(self):
        """Return the stored keys and values as views of the buffers: reading them copies nothing."""
        return self._keys[: self._len], self._values[: self._len]


def decode_step(q, cache):
    """Attend from one query to every step in the cache.

    The key and the value of the query's own token must have been appended before: a
    token attends itself.

    Parameters
    ----------
    q : array_like, shape (d_k,)
        The query.
    cache : KVCache
        The steps to attend; at least one.

    Returns
    -------
    output : numpy.ndarray of float64, shape (d_v,)
        The weighted mean of the values.
    weights : numpy.ndarray of float64, shape (len(cache),)
        Softmax of the scores ``K q / sqrt(d_k)``; they sum to 1.

    Raises
    ------
    TypeError
        If the cache is not a `KVCache`, or q does not hold real numbers.
    ValueError
        If the cache is empty, or if q has another shape or a number that is not finite.
    """
    if not isinstance(cache, KVCache):
        raise TypeError(
            f"cache was a {type(cache).__name__}; it must be a KVCache"
        )
    if len(cache) == 0:
        raise ValueError(
            "cache was empty; it must hold at least one step: append first"
        )
    q = _array("q", q)
    if q.shape != (cache.d_k,):
        raise ValueError(
            f"q had shape {q.shape}; it must be ({cache.d_k},), "
            "one query of size d_k"
        )
    keys, values = cache._stored()
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        weights = np.exp(_scores_below_best(keys, q))
        weights /= weights.sum()
        return weights @ values, weights


def _scores_below_best(keys, q):
    """Return how far each score ``K q / sqrt(d_k)`` lies below the best one.

    The result is finite or -inf, never NaN.
    """
    q = q / math.sqrt(len(q))
    scores = keys @ q
    if np.isfinite(scores).all():
        return scores - scores.max()
    _require_finite("q", q)
    # The products overflow float64: compare the scores of shrunken keys and a
    # shrunken query, then blow their differences up again.
    largest = np.finfo(np.float64).max / 2 / len(q)
    shrink = np.sqrt(largest / np.abs(keys).max() / np.abs(q).max())
    scores = (keys * shrink) @ (q * shrink)
    return (scores - scores.max()) / shrink / shrink


def _array(name, numbers):
    """Return `numbers` as a float64 array, or say why they cannot be one."""
    try:
        array = np.asarray(numbers)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} was not an array: {error}; it must be a rectangle of numbers") from error
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{name} had dtype {array.dtype}; it must hold real numbers")
    if array.dtype == np.float64:
        return array
    with np.errstate(over="ignore"):
        return array.astype(np.float64)


def _require_finite(name, array):
    if not np.isfinite(array).all():
        raise ValueError(f"{name} held NaN or infinity; every number must be finite")


def _steps(name, numbers, size):
    """Return `numbers` as steps, shape (n, size)."""
    array = _array(name, numbers)
    _require_finite(name, array)
    if array.ndim not in (1, 2) or array.shape[-1] != size:
        raise ValueError(
            f"{name} had shape {array.shape}; it must be ({size},) for one step or (n, {size}) for n steps"
        )
    return array.reshape(-1, size)
