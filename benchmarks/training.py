"""Forward and backward of the functional step, against scaled_dot_product_attention's."""

import grid
import timing
import torch
from peers import ours, torch_peers

CONTENDERS = [ours.FUNCTIONAL, *(peer for peer in torch_peers.PEERS if peer.name == "sdpa")]
_LEAVES = ("query", "new_key", "new_value", "key_cache", "value_cache")


def ratio(cell, seconds):
    """Return the time of sdpa over that of ours, each differentiated in all five inputs through the context."""
    args = grid.draw(cell)
    random = torch.Generator().manual_seed(grid.SEED)
    for name in _LEAVES:
        args[name].requires_grad_()
    direction = torch.randn(args["query"].shape, generator=random)
    steps = {peer.name: _there_and_back(peer, args, direction) for peer in CONTENDERS}
    one, other = (step() for step in steps.values())
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    del one, other
    return timing.ratio(timing.interleave(steps, seconds, least_rounds=3), *reversed(steps))


def _there_and_back(peer, args, direction):
    step, read = peer.prepare(args)
    leaves = [args[name] for name in _LEAVES]
    return lambda: torch.autograd.grad(read(step())[0], leaves, direction)
