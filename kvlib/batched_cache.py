"""One attention step over a batch of caches of different length, with grouped heads.

Contract: ``kv_cache_attention_step(...)``, and a twin ``kv_cache_attention_step_(...)``
that writes into the caches it is given. Shapes: B batch rows, H_q query heads, H_k
key/value heads, Q new slots in a call, M capacity, D key size, D_v value size.
"""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch.autograd import forward_ad
from torch.nn.functional import pad, scaled_dot_product_attention

from kvlib._tensors import bind_sizes, full_precision, require_floating_alike, wide
from kvlib.visibility import may_attend

__all__ = ["kv_cache_attention_step", "kv_cache_attention_step_"]

_SHAPES = {
    "query": ("B", "H_q", "Q", "D"),
    "new_key": ("B", "H_k", "Q", "D"),
    "new_value": ("B", "H_k", "Q", "D_v"),
    "key_cache": ("B", "H_k", "M", "D"),
    "value_cache": ("B", "H_k", "M", "D_v"),
    "lengths": ("B",),
    "append_mask": ("B", "Q"),
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
    inside `torch.autocast` too, and returned in the dtype of the inputs. What unused and not
    appended slots hold, NaN included, reaches no output but the copied caches, and no gradient.
    Live numbers must be finite, and so must scores in that precision; this is not checked. Differentiable twice
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

    For float32 and float64 no cache is copied, but for what the two switches say, and a row is
    read only up to its last live slot. This is the step to decode with; to train, use
    `kv_cache_attention_step`.

    Parameters
    ----------
    query, new_key, new_value, key_cache, value_cache, lengths, append_mask, options
        As for `kv_cache_attention_step`. The caches get the appended slots written, so nothing
        else may share memory with them; `lengths` is not changed.
    need_weights : bool
        Return the attention weights. Without them PyTorch's own attention takes each row, in the
        dtype of the inputs, which for float16 and bfloat16 rounds the weights before they meet
        the values. Where D equals D_v, and a slot's features are neighbours in memory, it stores
        no scores; elsewhere it copies what it reads of a row, and weights cost less time.
    check_data : bool
        Read `lengths` and `append_mask`, check them, and cut the work to the live slots: the
        one time that the host waits for the device. Without it the host waits for nothing,
        wrong numbers overwrite live slots, and work and memory follow M, so pass views of the
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
        As from `kv_cache_attention_step`, and if a cache was expanded, or both are one tensor;
        memory shared in other ways is not noticed. Nothing has been written then.
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

    with full_precision(query.device.type):
        if rows is None or _in_transform():
            append = _append_ if in_place else _append
            key_cache = append(key_cache, new_key, lengths, append_mask)
            value_cache = append(value_cache, new_value, lengths, append_mask)
            M = key_cache.shape[2]
            n_slots = M if rows is None else max(map(sum, rows))
            visible = _visible(lengths, append_mask, n_slots)
            attention, context = _attend_masked(
                query, key_cache, value_cache, visible, scale
            )
        elif recorded:
            attention, context = _attend_rows_recorded(
                query, new_key, new_value, key_cache, value_cache, rows, scale
            )
            key_cache = _append(key_cache, new_key, lengths, append_mask)
            value_cache = _append(value_cache, new_value, lengths, append_mask)
        else:
            if not in_place:
                key_cache, value_cache = key_cache.clone(), value_cache.clone()
            _append_rows_(key_cache, new_key, rows)
            _append_rows_(value_cache, new_value, rows)
            attend = _attend_rows if need_weights else _attend_rows_fused
            attention, context = attend(
                query, key_cache, value_cache, rows, scale
            )

    result = {
        "key_cache": key_cache,
        "value_cache": value_cache,
        "lengths": _new_lengths(lengths, append_mask, rows),
        "context": context,
    }
    return result | {"attention": attention} if need_weights else result


def _new_lengths(lengths, append_mask, rows):
    """Return how many slots of each row are live after the call."""
    if rows is None:
        return (lengths.long() + append_mask.sum(dim=1)).to(lengths.dtype)
    new = torch.tensor(
        [length + count for length, count in rows],
        dtype=lengths.dtype,
        device="cpu",
    )
    # Without non_blocking the host would wait until the device has caught up.
    return new.to(lengths.device, non_blocking=True)


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
    future = _future(Q, query.device) if Q > 1 else None
    tensors = queries, key_cache, value_cache, attention, context
    by_row = zip(*(tensor.unbind() for tensor in tensors))
    for row, (length, count) in zip(by_row, rows):
        _attend_row(*row, Q, length, count, future, scale)
    attention = attention.view(B, H_q, Q, M).to(query.dtype)
    return attention, context.view(B, H_q, Q, D_v).to(query.dtype)


def _attend_row(
    queries, keys, values, attention, context, Q, length, count, future, scale
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
    if count > 1:
        new = live.unflatten(1, (-1, Q))[..., length:]  # [H_k, group, Q, count]
        new.masked_fill_(future[:, :count], -math.inf)
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
    longest = max(length for length, _ in rows)
    if Q > 1 and longest > 0:
        # Added to the scores of the longest row; other rows use a part of it.
        bias = tensors[0].new_zeros(Q, longest + Q)
        bias[:, longest:].masked_fill_(_future(Q, query.device), -math.inf)
    contexts = []
    by_row = zip(*(tensor.chunk(B) for tensor in tensors))
    for (queries, keys, values), (length, count) in zip(by_row, rows):
        end, skipped = length + count, longest - length
        context = _attend_row_fused(
            queries if count == Q else queries[:, :, :count],
            keys[:, :, :end],
            values[:, :, :end],
            bias[:count, skipped : skipped + end] if count > 1 and length else None,
            scale,
        )
        idle = Q - count
        contexts.append(pad(context, (0, 0, 0, idle)) if idle else context)
    return None, torch.cat(contexts).to(query.dtype)


def _attend_row_fused(queries, keys, values, bias, scale):
    """Return the context [1, H_q, n, D_v] of a row's n appended queries.

    Without a bias, the queries are either one or the row's first.
    """
    (_, H_q, n, D), (_, H_k, _, D_v) = queries.shape, values.shape
    group = H_q // H_k
    if n == 0:
        return queries.new_zeros(1, H_q, n, D_v)
    if n == 1:
        # Nothing is hidden, so the heads of a group can be queries of one head.
        queries = queries.reshape(1, H_k, group, D)
    else:
        queries = queries.reshape(H_k, group, n, D)
        keys = keys.transpose(0, 1).expand(-1, group, -1, -1)
        values = values.transpose(0, 1).expand(-1, group, -1, -1)
    is_causal = n > 1 and bias is None
    context = scaled_dot_product_attention(
        queries, keys, values, attn_mask=bias, is_causal=is_causal, scale=scale
    )
    return context.reshape(1, H_q, n, D_v)


def _future(Q, device):
    """Return which of the slots appended in a call are a query's future, [Q, Q].

    It is the same in every row: the slots before them are the past of every query.
    """
    new = torch.arange(Q, device=device)
    return ~may_attend(new, new[:, None], 0, Q)


def _attend_rows_recorded(
    query, new_key, new_value, key_cache, value_cache, rows, scale
):
    """Return attention [B, H_q, Q, M] and context [B, H_q, Q, D_v], for autograd.

    Each row is joined from what it reads, so that no gradient passes through
    the whole of a cache.
    """
    Q, M, dtype = query.shape[2], key_cache.shape[2], query.dtype
    tensors = query, new_key, new_value, key_cache, value_cache
    by_row = zip(rows, *(tensor.to(wide(dtype)).unbind() for tensor in tensors))
    attentions, contexts = [], []
    for (length, count), queries, new_keys, new_values, keys, values in by_row:
        attention, context = _attend_row_recorded(
            queries[:, :count],
            torch.cat([keys[:, :length], new_keys[:, :count]], dim=1),
            torch.cat([values[:, :length], new_values[:, :count]], dim=1),
            scale,
        )
        idle, unused = Q - count, M - length - count
        attentions.append(pad(attention, (0, unused, 0, idle)))
        contexts.append(pad(context, (0, 0, 0, idle)))
    return torch.stack(attentions).to(dtype), torch.stack(contexts).to(dtype)


def _attend_row_recorded(queries, keys, values, scale):
    """Return attention [H_q, n, end] and context [H_q, n, D_v] of n new queries."""
    (H_q, n, D), (H_k, end, D_v) = queries.shape, values.shape
    group_rows = H_q // H_k * n
    queries = queries.reshape(H_k, group_rows, D)
    ignored = queries.new_empty(1, 1, 1)
    scores = torch.baddbmm(ignored, queries, keys.mT, beta=0, alpha=scale)
    scores = scores.view(H_q, n, end)
    if n > 1:
        future = pad(_future(n, keys.device), (end - n, 0))  # [n, end]
        scores = scores.masked_fill(future, -math.inf)
        # The second time is for the gradient, which a huge value would spoil.
        attention = torch.softmax(scores, dim=-1).masked_fill(future, 0)
    else:
        attention = torch.softmax(scores, dim=-1)
    context = attention.view(H_k, group_rows, end) @ values
    return attention, context.view(H_q, n, D_v)


def _append(cache, new, lengths, append_mask):
    """Return a copy of the cache with the appended slots written."""
    slots, to_write = _offers(cache, new, lengths, append_mask)
    return cache.transpose(1, 2).index_put(slots, to_write).transpose(1, 2)


def _append_(cache, new, lengths, append_mask):
    """Write the appended slots, and return the cache itself."""
    slots, to_write = _offers(cache, new, lengths, append_mask)
    cache.transpose(1, 2).index_put_(slots, to_write)
    return cache


def _offers(cache, new, lengths, append_mask):
    """Return the rows and slots on offer, and what is to stand there, [B, Q, H_k, D].

    An offered slot that is not appended keeps what it holds, by writing it again:
    so no shape depends on what append_mask holds.
    """
    B, _, M, _ = cache.shape
    new, append_mask = new[:, :, :M], append_mask[:, :M]
    row = torch.arange(B, device=cache.device)[:, None]
    offered = torch.arange(new.shape[2], device=cache.device)
    slot = (lengths.long()[:, None] + offered) % M  # [B, Q], distinct in a row
    held = cache.transpose(1, 2)[row, slot]
    appended = append_mask[:, :, None, None]
    return (row, slot), torch.where(appended, new.transpose(1, 2), held)


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
