"""One attention step over a batch of caches of different length, with grouped heads.

Contract: ``kv_cache_attention_step(...)``, and a twin ``kv_cache_attention_step_(...)``
that writes into the caches it is given. Shapes: B batch rows, H_q query heads, H_k
key/value heads, Q new slots in a call, M capacity, D key size, D_v value size.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from numbers import Real

import torch
from torch.autograd import forward_ad
from torch.nn.functional import pad, scaled_dot_product_attention

from kvlib._tensors import bind_sizes, require_floating_alike, wide
from kvlib.visibility import may_attend

__all__ = ["kv_cache_attention_step", "kv_cache_attention_step_"]

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
    inside `torch.autocast` too, and returned in the dtype of the inputs. What unused and not appended slots hold, NaN
    included, reaches no output but the copied caches, and no gradient. Live numbers must be
    finite, and so must scores in that precision; this is not checked. Differentiable twice
    in query, new keys and values, and both caches.

    Where what `lengths` and `append_mask` hold cannot be read, it is not checked: while
    compiling or exporting, for meta and fake tensors, and for batches inside `torch.vmap`.
    """
    return _step(
        query, new_key, new_value, key_cache, value_cache,
        lengths, append_mask, options,
        in_place=False, need_weights=True, check_data=True,
    )


def kv_cache_attention_step_(
    query: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    lengths: torch.Tensor,
    append_mask: torch.Tensor,
    options: dict,
    *,
    need_weights: bool = True,
    check_data: bool = True,
) -> dict[str, torch.Tensor]:
    """Do the step of `kv_cache_attention_step`, but write into the caches that are given.

    Nothing of the size of a cache is allocated for float32 or float64, and a row is read only
    up to its last live slot. This is the step to decode with; to train, use
    `kv_cache_attention_step`.

    Parameters
    ----------
    query, new_key, new_value, key_cache, value_cache, lengths, append_mask, options
        As for `kv_cache_attention_step`. The caches get the appended slots written; `lengths`
        is not changed.
    need_weights : bool
        Return the attention weights. Without them the scores are never stored: PyTorch's fused
        attention takes each row, in the dtype of the inputs, which for float16 and bfloat16
        rounds the weights before they meet the values.
    check_data : bool
        Read `lengths` and `append_mask`, check them, and cut the work to the live slots: the
        one time that the host waits for the device. Without it the host waits for nothing,
        wrong numbers make wrong results, and work and memory follow M, so pass views of the
        slots that may be live.

    Returns
    -------
    dict of str to torch.Tensor
        As from `kv_cache_attention_step`; ``key_cache`` and ``value_cache`` are the very
        tensors that were passed, and ``attention`` is there only if weights are needed.

    Raises
    ------
    RuntimeError
        If a gradient is being recorded: it would need what this step overwrites.
    TypeError, ValueError
        As from `kv_cache_attention_step`, and if slots of a cache share memory. Nothing has
        been written then.
    """
    return _step(
        query, new_key, new_value, key_cache, value_cache,
        lengths, append_mask, options,
        in_place=True, need_weights=need_weights, check_data=check_data,
    )


def _step(
    query, new_key, new_value, key_cache, value_cache,
    lengths, append_mask, options, in_place, need_weights, check_data,
):
    """Do the step: this is the body of both twins."""
    scale, rows = _validate(
        query, new_key, new_value, key_cache, value_cache,
        lengths, append_mask, options, check_data,
    )
    recorded = _is_recorded(query, new_key, new_value, key_cache, value_cache)
    if in_place:
        _require_writable(key_cache, value_cache, recorded)
    row_by_row = rows is not None and not recorded and not _in_transform()

    with _full_precision(query.device.type):
        if row_by_row:
            if not in_place:
                key_cache, value_cache = key_cache.clone(), value_cache.clone()
            _append_rows_(key_cache, new_key, rows)
            _append_rows_(value_cache, new_value, rows)
            attend = _attend_rows if need_weights else _attend_rows_fused
            attention, context = attend(
                query, key_cache, value_cache, rows, scale
            )
            new_lengths = lengths.new_tensor([sum(row) for row in rows])
        else:
            scatter = torch.Tensor.scatter_ if in_place else torch.Tensor.scatter
            keys = _offers(key_cache, new_key, lengths, append_mask)
            values = _offers(value_cache, new_value, lengths, append_mask)
            key_cache = scatter(key_cache, 2, *keys)
            value_cache = scatter(value_cache, 2, *values)
            n_read = key_cache.shape[2] if rows is None else max(map(sum, rows))
            visible = _visible(lengths, append_mask, n_read)
            attention, context = _attend_masked(
                query, key_cache, value_cache, visible, scale
            )
            counts = append_mask.sum(dim=1)
            new_lengths = (lengths.long() + counts).to(lengths.dtype)

    result = {
        "key_cache": key_cache,
        "value_cache": value_cache,
        "lengths": new_lengths,
        "context": context,
    }
    return result | {"attention": attention} if need_weights else result


def _append_rows_(cache, new, rows):
    """Write the appended slots of each row behind its live ones."""
    Q = new.shape[2]
    by_row = zip(cache.unbind(), new.unbind(), rows)
    for slots, offered, (length, count) in by_row:
        appended = offered if count == Q else offered[:, :count]
        slots[:, length : length + count] = appended


def _attend_rows(query, key_cache, value_cache, rows, scale):
    """Return attention [B, H_q, Q, M] and context [B, H_q, Q, D_v]."""
    (B, H_q, Q, D), (_, H_k, M, D_v) = query.shape, value_cache.shape
    compute_dtype, group_rows = wide(query.dtype), H_q // H_k * Q
    # The query heads that share a key/value head are neighbours: as rows of one
    # matrix they meet its keys and values in one product.
    queries = query.to(compute_dtype).reshape(B, H_k, group_rows, D)
    attention = queries.new_empty(B, H_k, group_rows, M)
    context = queries.new_empty(B, H_k, group_rows, D_v)
    tensors = queries, key_cache, value_cache, attention, context
    by_row = zip(*(tensor.unbind() for tensor in tensors))
    for row, (length, count) in zip(by_row, rows):
        _attend_row(*row, Q, length, count, scale)
    attention = attention.view(B, H_q, Q, M).to(query.dtype)
    return attention, context.view(B, H_q, Q, D_v).to(query.dtype)


def _attend_row(
    queries, keys, values, attention, context, Q, length, count, scale
):
    """Fill in one row's attention [H_k, group_rows, M] and context.

    Only its live slots are read, so nothing needs hiding but the future.
    """
    end = length + count
    keys = keys[:, :end].to(queries.dtype)
    values = values[:, :end].to(queries.dtype)
    # The weights are computed where they are returned: no other memory is used.
    live, tail = attention[:, :, :end], attention[:, :, end:]
    torch.baddbmm(live, queries, keys.mT, beta=0, alpha=scale, out=live)
    if Q > 1:
        new = live.unflatten(1, (-1, Q))[..., length:]  # [H_k, group, Q, count]
        slot = torch.arange(count, device=new.device)
        query = torch.arange(Q, device=new.device)[:, None]
        new.masked_fill_(~may_attend(slot, query, 0, Q), -math.inf)
    tail.fill_(-math.inf)
    torch.softmax(attention, dim=-1, out=attention)
    torch.bmm(live, values, out=context)
    if count < Q:
        attention.unflatten(1, (-1, Q))[:, :, count:] = 0
        context.unflatten(1, (-1, Q))[:, :, count:] = 0


def _attend_rows_fused(query, key_cache, value_cache, rows, scale):
    """Return None and context [B, H_q, Q, D_v], by PyTorch's own attention."""
    B, _, Q, _ = query.shape
    tensors = query, key_cache, value_cache
    if query.dtype.itemsize == 1:  # PyTorch's attention does not take float8
        tensors = [tensor.float() for tensor in tensors]
    by_row = zip(*(tensor.chunk(B) for tensor in tensors))
    contexts = []
    for (queries, keys, values), (length, count) in zip(by_row, rows):
        end = length + count
        context = _attend_row_fused(
            queries if count == Q else queries[:, :, :count],
            keys[:, :, :end],
            values[:, :, :end],
            length,
            scale,
        )
        contexts.append(pad(context, (0, 0, 0, Q - count)) if count < Q else context)
    return None, torch.cat(contexts).to(query.dtype)


def _attend_row_fused(queries, keys, values, length, scale):
    """Return the context [1, H_q, n, D_v] of one row's n appended queries."""
    (_, H_q, n, D), (_, H_k, end, D_v) = queries.shape, values.shape
    if n == 0:
        return queries.new_zeros(1, H_q, n, D_v)
    group, visible = H_q // H_k, None
    if n == 1:
        # Nothing is hidden: the heads of a group can be queries of one head.
        queries = queries.reshape(1, H_k, group, D)
    else:
        queries = queries.reshape(H_k, group, n, D)
        keys = keys.transpose(0, 1).expand(-1, group, -1, -1)
        values = values.transpose(0, 1).expand(-1, group, -1, -1)
        slot = torch.arange(end, device=queries.device)
        query = torch.arange(n, device=queries.device)[:, None]
        visible = may_attend(slot, query, length, n)
    context = scaled_dot_product_attention(
        queries, keys, values, attn_mask=visible, scale=scale
    )
    return context.reshape(1, H_q, n, D_v)


def _offers(cache, new, lengths, append_mask):
    """Return the slots that are offered, and what is to stand in each.

    Where an offered slot is not appended, it gets what it holds: so no shape
    depends on what append_mask holds.
    """
    M = cache.shape[2]
    new, append_mask = new[:, :, :M], append_mask[:, :M]
    offered = torch.arange(new.shape[2], device=new.device)
    slots = (lengths.long()[:, None] + offered) % M  # [B, Q], distinct in a row
    slots = slots[:, None, :, None].expand(new.shape)
    held = cache.gather(2, slots)
    return slots, torch.where(append_mask[:, None, :, None], new, held)


def _visible(lengths, append_mask, n_slots):
    """Return which slot each query may attend, [B, Q, n_slots]."""
    length = lengths.long()[:, None, None]
    count = append_mask.sum(dim=1)[:, None, None]
    slot = torch.arange(n_slots, device=lengths.device)
    query = torch.arange(append_mask.shape[1], device=lengths.device)[:, None]
    return may_attend(slot, query, length, count)


def _attend_masked(query, keys, values, visible, scale):
    """Return attention [B, H_q, Q, M] and context [B, H_q, Q, D_v]."""
    (B, H_q, Q, D), (_, H_k, M, D_v) = query.shape, values.shape
    n_slots = visible.shape[2]  # slots after these are unused in every row
    hidden = ~visible[:, None]  # [B, 1, Q, n_slots]
    idle = ~visible.any(dim=2)[:, None, :, None]  # [B, 1, Q, 1]
    unread = ~visible.any(dim=1)[:, None, :, None]  # [B, 1, n_slots, 1]

    # A weight of zero does not silence a NaN: blank what nobody reads.
    compute_dtype = wide(query.dtype)
    queries = query.to(compute_dtype).masked_fill(idle, 0)
    keys = keys[:, :, :n_slots].to(compute_dtype).masked_fill(unread, 0)
    values = values[:, :, :n_slots].to(compute_dtype).masked_fill(unread, 0)

    group_rows = H_q // H_k * Q
    scores = queries.reshape(B, H_k, group_rows, D) @ keys.mT * scale
    scores = scores.reshape(B, H_q, Q, n_slots)
    # An idle query keeps its zeros: a softmax over nothing but -inf is NaN.
    scores = scores.masked_fill(hidden & ~idle, -math.inf)
    attention = torch.softmax(scores, dim=-1).masked_fill(hidden, 0)
    context = attention.reshape(B, H_k, group_rows, n_slots) @ values
    context = context.reshape(B, H_q, Q, D_v).to(query.dtype)
    return pad(attention, (0, M - n_slots)).to(query.dtype), context


def _is_recorded(*tensors):
    """Say whether autograd, backward or forward, follows one of the tensors."""
    return (
        torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    ) or any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def _in_transform():
    """Say whether a tensor may stand for many, as inside `torch.vmap`."""
    return torch._C._are_functorch_transforms_active()


def _full_precision(device_type):
    """Return a context in which autocast rounds no product to half precision."""
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def _require_writable(key_cache, value_cache, recorded):
    """Check what the step in place asks of its caches."""
    if recorded:
        raise RuntimeError(
            "a gradient is being recorded, and it would need the caches as they were before "
            "kv_cache_attention_step_ writes into them: use kv_cache_attention_step, or torch.no_grad()"
        )
    for name, cache in {"key_cache": key_cache, "value_cache": value_cache}.items():
        if any(stride == 0 and size > 1 for stride, size in zip(cache.stride(), cache.shape)):
            raise ValueError(
                f"{name} had strides {cache.stride()}, so several slots share memory; "
                "every slot must have memory of its own: pass a clone"
            )
    if value_cache is key_cache:
        raise ValueError("value_cache was the same tensor as key_cache; it must be another")


def _validate(
    query, new_key, new_value, key_cache, value_cache,
    lengths, append_mask, options, check_data,
):
    """Check every promise that the caller makes.

    Return the scale and every row's (length, count), or None where no data can be read.
    """
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
    _require_append_dtypes(lengths, append_mask)
    scale = _scale(options, sizes["D"], wide(query.dtype))
    rows = _read(lengths, append_mask) if check_data else None
    return scale, rows and _checked_rows(rows, lengths.dtype, sizes["M"])


def _require_append_dtypes(lengths, append_mask):
    if lengths.dtype.is_floating_point or lengths.dtype.is_complex or lengths.dtype == torch.bool:
        raise TypeError(f"lengths had dtype {lengths.dtype}; it must be an integer dtype")
    if append_mask.dtype != torch.bool:
        raise TypeError(f"append_mask had dtype {append_mask.dtype}; it must be torch.bool")


def _read(lengths, append_mask):
    """Return each row's length and mask as Python numbers, or None where there are none to read.

    A compiler has no numbers yet, a meta or fake tensor never has, and a tensor inside
    `torch.vmap` has many.
    """
    if torch.compiler.is_compiling():
        return None
    try:
        rows = list(zip(lengths.tolist(), append_mask.tolist()))
    except RuntimeError:
        return None
    return rows if all(isinstance(length, int) for length, _ in rows) else None


def _checked_rows(rows, dtype, capacity):
    """Return each row's (length, count), if its lengths and mask are within the contract."""
    largest = torch.iinfo(dtype).max
    counts = [sum(appended) for _, appended in rows]
    for row, ((length, appended), count) in enumerate(zip(rows, counts)):
        if not 0 <= length <= capacity:
            raise ValueError(f"lengths[{row}] was {length}; it must be between 0 and M = {capacity}")
        if not all(appended[:count]):
            raise ValueError(f"append_mask[{row}] was {appended}; every True must come before every False")
        if length + count > capacity:
            raise ValueError(
                f"append_mask[{row}] appends {count} slots to lengths[{row}] = {length}, "
                f"{length + count} in all; they must fit in M = {capacity}"
            )
        if length + count > largest:
            raise ValueError(
                f"lengths had dtype {dtype}; it must be able to hold {length + count}, "
                f"the length of row {row} after the call"
            )
    return [(length, count) for (length, _), count in zip(rows, counts)]


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
