"""The step of this library, as a function and in place."""

from kvlib import kv_cache_attention_step, kv_cache_attention_step_
from peers import COPIED, IN_PLACE, Peer


def _read(result):
    return result["context"], result["key_cache"], result["value_cache"]


def _functional(args):
    return lambda: kv_cache_attention_step(**args, options={}), _read


def _in_place(args):
    return lambda: kv_cache_attention_step_(**args, options={}, need_weights=False), _read


def _in_place_weights(args):
    return lambda: kv_cache_attention_step_(**args, options={}), _read


FUNCTIONAL = Peer("ours", "kv_cache_attention_step", COPIED, True, _functional)
BARE = Peer("ours_", "kv_cache_attention_step_ with need_weights=False", IN_PLACE, False, _in_place)
WITH_WEIGHTS = Peer("ours_ w", "kv_cache_attention_step_", IN_PLACE, True, _in_place_weights)

PEERS = [FUNCTIONAL, BARE, WITH_WEIGHTS]


def counterpart(peer):
    """Return ours that a peer is compared with: in place, the one that returns the weights if the peer does."""
    if peer.cache == COPIED:
        return FUNCTIONAL
    return WITH_WEIGHTS if peer.weights else BARE
