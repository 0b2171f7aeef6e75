"""The ways to do the batched step that ours is compared with, one module a library.

Every peer appends Q slots to every row and attends, as ``kv_cache_attention_step`` does, and keeps
its buffers in the layout that its library likes best; to lay them out is not timed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch

COPIED, IN_PLACE = "cache copied", "written in place"

_MODULES = {
    "kvlib": "peers.ours",
    "torch": "peers.torch_peers",
    "onnxruntime": "peers.onnxruntime_peers",
    "jax": "peers.jax_peers",
    "transformers": "peers.transformers_peers",
}


@dataclass(frozen=True)
class Peer:
    """One way to do the step.

    ``prepare`` takes the arguments of a step by name, which the peer may write to if it works in
    place, and returns two functions.  The first does the step and takes nothing; the second takes
    what the first returned, and returns context [B, H_q, Q, D], keys and values [B, H_k, M, D].
    """

    name: str
    how: str
    cache: str  # COPIED or IN_PLACE
    weights: bool  # whether the attention weights come out, too
    prepare: Callable

    @property
    def returns(self):
        return f"{self.cache}, {'weights' if self.weights else 'no weights'}"


def installed():
    """Return the peers that can be imported, and the names of the packages that the others lack."""
    found, missing = [], []
    for module in _MODULES.values():
        try:
            found += import_module(module).PEERS
        except ModuleNotFoundError as error:
            package = error.name.partition(".")[0]
            if package in ("peers", "kvlib"):
                raise
            missing.append(package)
    return found, missing


def visible(args):
    """Return which slots each query may attend, [B, 1, Q, M], where every row appends Q."""
    slot = torch.arange(args["key_cache"].shape[2])
    last = args["lengths"][:, None] + torch.arange(args["query"].shape[2])  # [B, Q]
    return (slot <= last[:, :, None])[:, None]


def spoil(args):
    """Put NaN where the new slots go, so that a peer has to write them."""
    Q = args["query"].shape[2]
    for row, length in enumerate(args["lengths"].tolist()):
        for name in ("key_cache", "value_cache"):
            args[name][row, :, length : length + Q] = torch.nan


def check(peer, read, result, expected):
    """Raise unless a peer computed what ours did: the context, and every live slot of the caches."""
    live = torch.arange(expected["key_cache"].shape[2]) < expected["lengths"][:, None]
    context, keys, values = read(result)
    wanted = {
        "context": (context, expected["context"]),
        "live keys": (_slots(keys, live), _slots(expected["key_cache"], live)),
        "live values": (_slots(values, live), _slots(expected["value_cache"], live)),
    }
    for what, (got, want) in wanted.items():
        try:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        except AssertionError as error:
            raise AssertionError(f"{peer.name} is no peer, its {what} differ: {error}") from None


def _slots(cache, where):
    """Return the chosen slots, [number of slots, H_k, D]."""
    return cache.transpose(1, 2)[where]
