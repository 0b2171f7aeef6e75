"""A cache that is a plain tuple of keys and values, grown by concatenation.

Contract: ``kv_cache_step(q_new, k_new, v_new, cache)``.
"""

from __future__ import annotations

import math

import torch

from kvlib._tensors import bind_sizes, full_precision, require_floating_alike, wide

__all__ = ["kv_cache_step"]

_SHAPES = {"q_new": ("B", "Q", "D"), "k_new": ("B", "Q", "D"), "v_new": ("B", "Q", "D_v")}
_CACHE_SHAPES = {"cache[0]": ("B", "T", "D"), "cache[1]": ("B", "T", "D_v")}


def kv_cache_step(
    q_new: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Decode one token: append its key and value, then attend everything in the cache.

    No mask is needed. The cache ends with the token itself, so it holds no future.

    Parameters
    ----------
    q_new, k_new : torch.Tensor, shape (B, 1, D)
        Query and key of the new token of each row.
    v_new : torch.Tensor, shape (B, 1, D_v)
        Its value.
    cache : tuple of torch.Tensor, or None
        Keys (B, T, D) and values (B, T, D_v) of the T tokens before, as an earlier call
        returned them; None for the first token.

    Returns
    -------
    output : torch.Tensor, shape (B, 1, D_v)
        The attention output of the new token, in the dtype of the inputs. Scores and
        softmax are computed in float32 or wider, inside `torch.autocast` too.
    cache : tuple of torch.Tensor
        Keys (B, T + 1, D) and values (B, T + 1, D_v): new tensors. The cache that was
        passed in is left as it was, and still usable.

    Raises
    ------
    TypeError
        If an argument is not a tensor of a floating dtype, or the cache is not a pair.
    ValueError
        If shapes, dtypes or devices disagree, if a size other than T is 0, or if there is not
        exactly one new token.
    """
    _validate(q_new, k_new, v_new, cache)
    if cache is None:
        keys, values = k_new.clone(), v_new.clone()
    else:
        keys = torch.cat([cache[0], k_new], dim=1)
        values = torch.cat([cache[1], v_new], dim=1)
    compute_dtype = wide(q_new.dtype)
    query = q_new.to(compute_dtype) / math.sqrt(q_new.shape[-1])
    with full_precision(q_new.device.type):
        scores = torch.bmm(query, keys.to(compute_dtype).mT)
        weights = torch.softmax(scores, dim=-1)
        output = torch.bmm(weights, values.to(compute_dtype))
    return output.to(q_new.dtype), (keys, values)


def _validate(q_new, k_new, v_new, cache):
    shapes, tensors = _SHAPES, {"q_new": q_new, "k_new": k_new, "v_new": v_new}
    if cache is not None:
        if not isinstance(cache, tuple) or len(cache) != 2:
            raise TypeError(f"cache was {_what(cache)}; it must be a tuple (keys, values), or None")
        shapes = shapes | _CACHE_SHAPES
        tensors |= {"cache[0]": cache[0], "cache[1]": cache[1]}
    sizes = bind_sizes(shapes, tensors, may_be_zero={"Q", "T"})
    require_floating_alike(tensors)
    if sizes["Q"] != 1:
        raise ValueError(
            f"q_new, k_new and v_new held {sizes['Q']} new tokens; they must hold exactly 1: this step has "
            "no mask, so the first of several tokens would attend the later ones, its own future"
        )


def _what(value):
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"
