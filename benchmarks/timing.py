"""Interleaved timing: every contender in every round, in an order drawn anew."""

import gc
import math
import random
import statistics
import time

import torch

LONG = 0.02  # seconds; a call this long needs no company to be timed well
SETTLE = 0.003  # seconds; the threads of one library spin for about that long after their work


def interleave(steps, seconds, least_rounds=5, most_rounds=61, seed=0):
    """Time each of several steps, in rounds over all of them.

    In a round the steps come in an order drawn at random.  Each waits until the threads of the
    one before have gone to sleep, makes a call that does not count, unless calls are long, and
    then so many calls that they take some milliseconds.

    Parameters
    ----------
    steps : dict of str to callable
    seconds : float
        About how long all rounds may take together.
    least_rounds, most_rounds : int
        Limits to the number of rounds, whatever they take.
    seed : int
        Of the order.

    Returns
    -------
    dict of str to list of float
        Seconds a call, one number a round.
    """
    calls = {name: _calls(step) for name, step in steps.items()}
    shuffle = random.Random(seed).shuffle
    names, taken, start = list(steps), {name: [] for name in steps}, time.perf_counter()
    gc.collect()
    gc.disable()
    try:
        for done in range(most_rounds):
            if done >= least_rounds and time.perf_counter() - start > seconds:
                break
            shuffle(names)
            for name in names:
                taken[name].append(_sample(steps[name], calls[name]))
    finally:
        gc.enable()
    return taken


def _calls(step):
    """Warm a step up, and say how many calls make a sample."""
    start = time.perf_counter()
    step()
    if time.perf_counter() - start > 50 * LONG:
        return 1
    start = time.perf_counter()
    step()
    step()
    once = (time.perf_counter() - start) / 2
    return 1 if once > LONG else min(20, math.ceil(LONG / 8 / once))


def _sample(step, calls):
    time.sleep(SETTLE)
    if calls > 1:
        step()
    start = time.perf_counter()
    for _ in range(calls):
        step()
    return (time.perf_counter() - start) / calls


def ratio(taken, name, base):
    """Return how many times as long one step takes as another: the median over the rounds."""
    return statistics.median(one / other for one, other in zip(taken[name], taken[base]))


def geometric_mean(numbers):
    return math.exp(statistics.fmean(map(math.log, numbers)))


def slope(sizes, seconds):
    """Return the exponent p of the power law, size ** p, that fits best on logarithmic axes."""
    return statistics.linear_regression(list(map(math.log, sizes)), list(map(math.log, seconds))).slope


class Copy:
    """A copy of a large buffer into another that is in use already: what the memory bus allows."""

    def __init__(self, n_bytes=2**28):
        self._source = torch.ones(n_bytes // 4)
        self._target = torch.zeros_like(self._source)
        self._seconds = []

    def measure(self):
        """Time some more copies: called now and then, it sees what the machine did meanwhile."""
        self._seconds += interleave({"copy": lambda: self._target.copy_(self._source)}, seconds=0)[
            "copy"
        ]

    @property
    def bandwidth(self):
        """Bytes read plus bytes written, a second: the median of all copies so far."""
        return 2 * self._source.nbytes / statistics.median(self._seconds)

    def cost_of_fresh_memory(self):
        """Return the time of a copy into newly allocated memory over that of a copy as measured."""
        steps = {"copy": lambda: self._target.copy_(self._source), "clone": self._source.clone}
        return ratio(interleave(steps, seconds=0), "clone", "copy")
