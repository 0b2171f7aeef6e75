"""One attention step over a batch of caches of different length, with grouped heads.

Contract: ``kv_cache_attention_step(...)``. Shapes: B batch rows, H_q query heads, H_k
key/value heads, Q new slots in a call, M capacity, D key size, D_v value size.
"""

from __future__ import annotations

import math
from numbers import Real

import torch

from kvlib._tensors import bind_sizes, require_floating_alike, wide
from kvlib.visibility import may_attend

__all__ = ["kv_cache_attention_step"]

_SHAPES = {
    "query": "B H_q Q D",
    "new_key": "B H_k Q D",
    "new_value": "B H_k Q D_v",
    "key_cache": "B H_k M D",
    "value_cache": "B H_k M D_v",
    "lengths": "B",
    "append_mask": "B Q",
}


def kv_cache_attention_step(
    query: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    lengths: torch.Tensor,
    append_mask: torch.Tensor,
    options: dict,
) -> dict[str, torch.Tensor]:
    """Append new slots to every row's cache, and attend from each of them.

    Row b appends the first ``append_mask[b].sum()`` of its Q offered slots behind its
    ``lengths[b]`` live ones. `kvlib.visibility.may_attend` says which slots a query may
    then attend. Query head h reads key/value head ``h // (H_q // H_k)``.

    Parameters
    ----------
    query : torch.Tensor, shape (B, H_q, Q, D)
        Queries of the offered slots, projected and position-rotated if the model rotates.
    new_key : torch.Tensor, shape (B, H_k, Q, D)
        Their keys, likewise. H_q must be a multiple of H_k.
    new_value : torch.Tensor, shape (B, H_k, Q, D_v)
        Their values.
    key_cache : torch.Tensor, shape (B, H_k, M, D)
        Cached keys; only the first ``lengths[b]`` slots of row b are ever read.
    value_cache : torch.Tensor, shape (B, H_k, M, D_v)
        Cached values, likewise.
    lengths : torch.Tensor of integers, shape (B,)
        Live slots of each row before the call: a count, not a last index.
    append_mask : torch.Tensor of bool, shape (B, Q)
        True for the offered slots to append: in every row Trues first, then Falses.
    options : dict
        ``{"scale": s}`` multiplies the scores by s, a positive number; without it,
        s is ``1 / sqrt(D)``.

    Returns
    -------
    dict of str to torch.Tensor
        ``key_cache`` (B, H_k, M, D) and ``value_cache`` (B, H_k, M, D_v): copies with the
        appended slots written and every other bit as it was; ``lengths`` (B,): live slots
        after the call, in the dtype of the input; ``attention`` (B, H_q, Q, M): the
        weights, zero wherever a query may not attend; ``context`` (B, H_q, Q, D_v).
        The attention and the context of a query that was not appended are zero.

    Raises
    ------
    TypeError
        If an argument has the wrong type or a dtype of the wrong kind.
    ValueError
        If shapes, dtypes or devices disagree; if a size other than Q is 0; if H_q is not a
        multiple of H_k; if lengths, the append mask or the scale are out of range; or if a
        row would overflow. The message names the argument, what it was, and what it must be.

    Notes
    -----
    Scores, softmax and context are computed in float32, or in float64 for float64 inputs,
    and returned in the dtype of the inputs. What unused and not appended slots hold, NaN
    included, reaches no output but the copied caches, and no gradient. Live numbers must be
    finite, and so must scores in that precision; this is not checked. Differentiable twice
    in query, new keys and values, and both caches.
    """
    scale = _validate(
        query, new_key, new_value, key_cache, value_cache,
        lengths, append_mask, options,
    )
    Q, M = query.shape[2], key_cache.shape[2]
    old_lengths, counts = lengths.long(), append_mask.sum(dim=1)  # [B]
    key_cache = _append(key_cache, new_key, old_lengths, append_mask)
    value_cache = _append(value_cache, new_value, old_lengths, append_mask)
    visible = _visible(old_lengths, counts, Q, M)
    attention, context = _attend(query, key_cache, value_cache, visible, scale)
    return {
        "key_cache": key_cache,
        "value_cache": value_cache,
        "lengths": (old_lengths + counts).to(lengths.dtype),
        "attention": attention,
        "context": context,
    }


def _append(cache, new, lengths, append_mask):
    """Return a copy of the cache with the appended slots written.

    Offered slot t of row b, if appended, fills slot lengths[b] + t.
    """
    row, offered = append_mask.nonzero(as_tuple=True)
    updated = cache.clone()
    updated[row, :, lengths[row] + offered] = new[row, :, offered]
    return updated


def _visible(lengths, counts, n_queries, capacity):
    """Return which slot each query may attend, [B, Q, M]."""
    slot = torch.arange(capacity, device=lengths.device)
    query = torch.arange(n_queries, device=lengths.device)[:, None]
    length, count = lengths[:, None, None], counts[:, None, None]
    return may_attend(slot, query, length, count)


def _attend(query, keys, values, visible, scale):
    """Return attention [B, H_q, Q, M] and context [B, H_q, Q, D_v]."""
    (B, H_q, Q, D), (_, H_k, M, D_v) = query.shape, values.shape
    hidden = ~visible[:, None]  # [B, 1, Q, M]
    idle = ~visible.any(dim=2)[:, None, :, None]  # [B, 1, Q, 1]
    unread = ~visible.any(dim=1)[:, None, :, None]  # [B, 1, M, 1]

    # A weight of zero does not silence a NaN: blank what nobody reads.
    compute_dtype = wide(query.dtype)
    queries = query.to(compute_dtype).masked_fill(idle, 0)
    keys = keys.to(compute_dtype).masked_fill(unread, 0)
    values = values.to(compute_dtype).masked_fill(unread, 0)

    # The query heads that share a key/value head are neighbours: as rows of one
    # matrix they meet its keys and values in one product.
    group_rows = H_q // H_k * Q
    scores = queries.reshape(B, H_k, group_rows, D) @ keys.mT * scale
    scores = scores.reshape(B, H_q, Q, M)
    # An idle query keeps its zeros: a softmax over nothing but -inf is NaN.
    scores = scores.masked_fill(hidden & ~idle, -math.inf)
    attention = torch.softmax(scores, dim=-1).masked_fill(hidden, 0)
    context = attention.reshape(B, H_k, group_rows, M) @ values
    context = context.reshape(B, H_q, Q, D_v)
    return attention.to(query.dtype), context.to(query.dtype)


def _validate(query, new_key, new_value, key_cache, value_cache, lengths, append_mask, options):
    """Check every promise that the caller makes, and return the scale."""
    floats = {
        "query": query,
        "new_key": new_key,
        "new_value": new_value,
        "key_cache": key_cache,
        "value_cache": value_cache,
    }
    tensors = floats | {"lengths": lengths, "append_mask": append_mask}
    sizes = bind_sizes(_SHAPES, tensors, may_be_zero={"Q"})
    require_floating_alike(floats)
    if sizes["H_q"] % sizes["H_k"]:
        raise ValueError(
            f"query had H_q = {sizes['H_q']} heads; it must have a multiple of the "
            f"H_k = {sizes['H_k']} heads of new_key"
        )
    _validate_append(lengths, append_mask, sizes["M"])
    return _scale(options, sizes["D"], wide(query.dtype))


def _validate_append(lengths, append_mask, capacity):
    if lengths.dtype.is_floating_point or lengths.dtype.is_complex or lengths.dtype == torch.bool:
        raise TypeError(f"lengths had dtype {lengths.dtype}; it must be an integer dtype")
    if append_mask.dtype != torch.bool:
        raise TypeError(f"append_mask had dtype {append_mask.dtype}; it must be torch.bool")
    rows = zip(lengths.tolist(), append_mask.tolist())
    for row, (length, appended) in enumerate(rows):
        count = sum(appended)
        if not 0 <= length <= capacity:
            raise ValueError(f"lengths[{row}] was {length}; it must be between 0 and M = {capacity}")
        if not all(appended[:count]):
            raise ValueError(f"append_mask[{row}] was {appended}; every True must come before every False")
        if length + count > capacity:
            raise ValueError(
                f"append_mask[{row}] appends {count} slots to lengths[{row}] = {length}, "
                f"{length + count} in all; they must fit in M = {capacity}"
            )
        if length + count > torch.iinfo(lengths.dtype).max:
            raise ValueError(
                f"lengths had dtype {lengths.dtype}; it must be able to hold {length + count}, "
                f"the length of row {row} after the call"
            )


def _scale(options, d_k, compute_dtype):
    if not isinstance(options, dict):
        raise TypeError(f"options was a {type(options).__name__}; it must be a dict")
    unknown = sorted(map(repr, options.keys() - {"scale"}))
    if unknown:
        raise ValueError(f"options had the keys {', '.join(unknown)}; 'scale' is the only key there is")
    scale = options.get("scale", 1 / math.sqrt(d_k))
    if not isinstance(scale, Real) or isinstance(scale, bool):
        raise TypeError(f"options['scale'] was {scale!r}; it must be a positive finite number")
    limits = torch.finfo(compute_dtype)
    try:
        number = float(scale)
    except OverflowError:
        number = math.inf
    if not limits.tiny <= number <= limits.max:
        raise ValueError(
            f"options['scale'] was {scale!r}; it must be a positive finite number that {compute_dtype} can hold"
        )
    return number
