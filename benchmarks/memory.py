"""How much memory a step takes beyond what it was given, counted and not sampled.

torch's profiler records every allocation and every release that goes through torch's allocator,
in order; their running sum has an exact peak.  What a library takes from elsewhere, such as the
packing buffers of a matrix product, is not in it.
"""

from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile


def peak(step):
    """Return the most bytes of tensors that a call of `step` holds at a time, and what it returns."""
    step()  # so that what is allocated once, on first use, does not count
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate((event.nbytes() for event in events), initial=0)), result


def new_bytes(result, args):
    """Return the bytes of the tensors in a result that are not among the arguments."""
    given = {tensor.data_ptr() for tensor in args.values()}
    tensors = [value for value in result.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.nbytes for tensor in tensors if tensor.data_ptr() not in given)
