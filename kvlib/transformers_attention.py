"""This kernel as the attention of Hugging Face transformers, on cache buffers of fixed capacity.

After `register`, the causal decoders of transformers take "kvlib" as their attention
implementation; with a `RaggedCache` they generate on
`kvlib.batched_cache.kv_cache_attention_step_`, and what they attend to can be shown::

    register()
    model.set_attn_implementation("kvlib")
    cache = RaggedCache(model.config, capacity=32)
    tokens = model.generate(ids, max_new_tokens=8, cache=cache)
    cache.reset()
    model(tokens, cache=cache, output_attentions=True)
    AttentionHeatmap.from_layers(**cache.last_step())

A transformers model pads: its batch is a table of B rows and T columns, and ``attention_mask``
says which columns hold tokens.  This cache does not: each row's tokens fill its slots from slot 0
on, in the order of their columns, and a column of padding takes no slot.

Shapes: B batch rows, H_q query heads, H_k key/value heads, Q new columns in a call, T columns
so far, the new ones included, M capacity, D key size, D_v value size, L layers.
"""

from __future__ import annotations

try:
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs
    from transformers.masking_utils import causal_mask_function, sdpa_mask
    from transformers.utils.output_capturing import _active_collector
except ModuleNotFoundError as error:
    raise ImportError(
        f"kvlib.transformers_attention needs {error.name}, which is not installed; "
        "pip install 'kvlib[transformers]' adds it"
    ) from error

from kvlib._numbers import whole_number
from kvlib.batched_cache import kv_cache_attention_step, kv_cache_attention_step_

__all__ = ["RaggedCache", "register"]

#: What a model may ask of its attention that this step does not do, by the argument that asks for it.
_NOT_DONE = {
    "softcap": "scores are not capped",
    "s_aux": "there are no attention sinks",
    "position_bias": "nothing is added to the scores",
    "cu_seq_lens_q": "a row holds one sequence; pad instead of packing",
}


def register():
    """Make "kvlib" an attention implementation of transformers.

    Models then take it by ``model.set_attn_implementation("kvlib")``, or by
    ``attn_implementation="kvlib"`` where they are made.

    Notes
    -----
    With a `RaggedCache` new tokens are appended to its buffers in place, or to copies of them
    where autograd follows.  Without a cache (``use_cache=False``, or a training pass) every token
    attends the tokens before it in its row, and gradients flow.

    ``output_attentions=True`` returns weights in the columns of the padded batch, (B, H_q, Q, T),
    as eager attention does, except that padding attends to nothing: its weights are zero.

    What this step cannot do is refused while the model runs, by an error that names it: dropout,
    capped scores, attention sinks, a bias on the scores, a mask of more dimensions than (B, T),
    attention that is not causal or does not see the whole past, a mask that no longer shows the past
    that the cache holds, and a cache that is full or is not a `RaggedCache`.
    """
    AttentionInterface.register("kvlib", _attention)
    AttentionMaskInterface.register("kvlib", _columns)


class RaggedCache(Cache):
    """The cache of a transformers model in buffers of fixed capacity, whose rows differ in length.

    Pass it as ``cache`` to a model or its ``generate``.  Buffers are made when the first keys come:
    (B, H_k, M, D) and (B, H_k, M, D_v) per layer.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        That of the model.
    capacity : int
        M, the most tokens that a row can hold.  The padding of a batch does not count.

    Raises
    ------
    TypeError
        If the capacity is not a whole number.
    ValueError
        If it is less than 1, or if a layer keeps anything but the keys and values of its whole
        past, such as one with a sliding window shorter than the capacity.

    Notes
    -----
    ``get_seq_length`` counts columns, as transformers does: those of padding too.  ``reset``,
    ``crop``, ``reorder_cache`` (beam search) and the other methods of `transformers.Cache` that
    pick rows work as usual.

    Examples
    --------
    >>> from transformers import LlamaConfig
    >>> RaggedCache(LlamaConfig(num_hidden_layers=2), capacity=8)
    RaggedCache(2 layers, capacity 8, lengths [])
    """

    def __init__(self, config, capacity):
        capacity = whole_number("capacity", capacity, least=1)
        kinds, options = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        for index, (kind, option) in enumerate(zip(kinds, options)):
            _require_whole_past(index, kind, option.get("sliding_window"), capacity)
        super().__init__(layers=[_RaggedLayer(capacity) for _ in kinds])

    def __repr__(self):
        return (
            f"{type(self).__name__}({len(self)} layers, capacity {self.get_max_length()}, "
            f"lengths {self.lengths.tolist()})"
        )

    @property
    def lengths(self):
        """The tokens that each row holds, a tensor of integers of shape (B,); empty before the first call."""
        return self.layers[-1].real.sum(dim=1)

    def last_step(self):
        """Return what `kvlib.widgets.AttentionHeatmap.from_layers` needs to show the last call.

        Only a call with ``output_attentions=True`` is kept, until the next call.

        Returns
        -------
        dict
            ``queries`` and ``attention``, one tensor per layer; ``key_caches``, the buffers themselves;
            ``lengths`` before the call; ``append_mask`` and ``options``.  Rows are packed as in the
            cache: a query that is padding stands behind those that are not.

        Raises
        ------
        ValueError
            If the last call was none with ``output_attentions=True``, or if the layers scale
            their scores differently.
        """
        steps = [layer.step for layer in self.layers]
        if None in steps:
            raise ValueError(
                "the last call kept no attention; it must be one with output_attentions=True"
            )
        options = steps[0]["options"]
        if any(step["options"] != options for step in steps):
            raise ValueError(
                "the layers of this model scale their scores differently; they must agree for a picture"
            )
        return {
            "queries": [step["query"] for step in steps],
            "key_caches": [layer.keys.detach() for layer in self.layers],
            "lengths": steps[0]["lengths"],
            "append_mask": steps[0]["append_mask"],
            "options": options,
            "attention": [step["attention"] for step in steps],
        }


class _RaggedLayer(CacheLayerMixin):
    """The buffers of one layer, and which columns so far hold the tokens that are in them."""

    is_croppable = True

    def __init__(self, capacity):
        super().__init__()
        self.capacity = capacity
        self._forget()

    def _forget(self):
        self.keys = self.values = None
        self.is_initialized = False
        self.real = torch.zeros(0, 0, dtype=torch.bool)  # [B, T]
        self.step = None  # what `RaggedCache.last_step` collects

    def lazy_initialization(self, key_states, value_states):
        B, H_k, _, D = key_states.shape
        # In the dtype of the values: under autocast, rotating leaves keys in full precision.
        self.keys = value_states.new_zeros(B, H_k, self.capacity, D)
        self.values = value_states.new_zeros(B, H_k, self.capacity, value_states.shape[-1])
        self.real = torch.zeros(B, 0, dtype=torch.bool, device=key_states.device)
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        """Hand new keys and values on to the attention, which appends and attends in one call."""
        if not self.get_seq_length():
            self.lazy_initialization(key_states, value_states)
        if len(key_states) != len(self.keys):
            raise ValueError(
                f"the batch had {len(key_states)} rows; it must have {len(self.keys)}, those that the cache holds"
            )
        return _Offered(self, key_states), _Offered(self, value_states)

    def attend(self, query, key, value, columns, options, need_weights):
        """Append the new columns that hold tokens, and return context [B, H_q, Q, D_v] and weights or None."""
        if not torch.equal(columns.past, self.real):
            raise ValueError(
                f"attention_mask showed {columns.past.sum(dim=1).tolist()} tokens in the columns before this call; "
                f"it must show the {self.real.sum(dim=1).tolist()} that the cache holds, in their columns"
            )
        if columns.longest > self.capacity:
            raise ValueError(
                f"capacity was {self.capacity}; it must be {columns.longest} or more, "
                "the tokens that the longest row is to hold"
            )
        arguments = {
            "query": columns.pack(query),
            "new_key": columns.pack(key),
            "new_value": columns.pack(value),
            "key_cache": self.keys,
            "value_cache": self.values,
            "lengths": columns.lengths,
            "append_mask": columns.append_mask,
            "options": options,
        }
        # Buffers that a gradient needs as they are are not written to, whether or not it is recorded now.
        if any(x.requires_grad for x in (query, key, value, self.keys, self.values)):
            result = kv_cache_attention_step(**arguments)
        else:
            result = kv_cache_attention_step_(**arguments, need_weights=need_weights)
        self.keys, self.values, self.real = result["key_cache"], result["value_cache"], columns.real
        context = columns.unpack(result["context"])
        if not need_weights:
            self.step = None
            return context, None
        weights = result["attention"]
        self.step = {
            "query": arguments["query"].detach(),
            "attention": weights.detach(),
            "lengths": columns.lengths,
            "append_mask": columns.append_mask,
            "options": options,
        }
        return context, columns.spread(weights)

    def get_mask_sizes(self, query_length):
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self):
        return self.real.shape[1]

    def get_max_length(self):
        return self.capacity

    def reset(self):
        self._forget()

    def crop(self, tokens_to_remove):
        """Take the last columns off: a negative number, as everywhere in transformers."""
        if tokens_to_remove > 0 or -tokens_to_remove > self.get_seq_length():
            raise ValueError(
                f"tokens_to_remove was {tokens_to_remove}; "
                f"it must be between -{self.get_seq_length()}, the columns there are, and 0"
            )
        self.real = self.real[:, : self.get_seq_length() + tokens_to_remove]
        self.step = None

    def reorder_cache(self, beam_idx):
        self._pick_rows(lambda buffer: buffer.index_select(0, beam_idx.to(buffer.device)))

    def batch_repeat_interleave(self, repeats):
        self._pick_rows(lambda buffer: buffer.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices):
        self._pick_rows(lambda buffer: buffer[indices])

    def _pick_rows(self, pick):
        if self.is_initialized:
            self.keys, self.values, self.real = pick(self.keys), pick(self.values), pick(self.real)
            self.step = None


class _Offered:
    """New keys or values between `_RaggedLayer.update` and the attention that is to append them."""

    def __init__(self, layer, states):
        self.layer = layer
        self.states = states

    def __getattr__(self, name):
        # Any other attention takes them for the keys of the whole past, and asks for their shape.
        raise AttributeError(
            "a RaggedCache is of use only to a model whose attention implementation is 'kvlib': "
            f"call model.set_attn_implementation('kvlib') first (something else asked its keys for {name!r})"
        )


class _Columns:
    """Which columns of the batch hold tokens, and the way from columns to slots and back.

    One serves all layers of a forward pass.  The slot of a token is the number of tokens before it in
    its row, so gathering each row's tokens at the front of the new columns makes them a prefix.
    """

    def __init__(self, real, n_new):
        T = real.shape[1]
        self.real = real  # [B, T]
        self.past, self.new = real[:, : T - n_new], real[:, T - n_new :]
        self.lengths = self.past.sum(dim=1)
        self.longest = real.sum(dim=1).max().item()
        offered = torch.arange(n_new, device=real.device)
        self.append_mask = offered < self.new.sum(dim=1, keepdim=True)  # [B, Q]
        self.is_packed = torch.equal(self.new, self.append_mask)
        self._order = torch.argsort(~self.new, dim=1, stable=True)
        self._place = torch.argsort(self._order, dim=1)

    def pack(self, x):
        """Return x, [B, H, Q, D], with the tokens of each row in front of its padding."""
        return x if self.is_packed else x.take_along_dim(self._order[:, None, :, None], dim=2)

    def unpack(self, x):
        """Undo `pack`."""
        return x if self.is_packed else x.take_along_dim(self._place[:, None, :, None], dim=2)

    def spread(self, weights):
        """Return weights on slots, [B, H_q, Q, M], as weights on columns, [B, H_q, Q, T], queries unpacked."""
        slots = (self.real.cumsum(dim=1) - 1).clamp(min=0)
        weights = self.unpack(weights).take_along_dim(slots[:, None, None], dim=3)
        return weights.masked_fill(~self.real[:, None, None], 0)


def _columns(
    batch_size,
    q_length,
    kv_length,
    q_offset=0,
    kv_offset=0,
    mask_function=causal_mask_function,
    attention_mask=None,
    use_vmap=False,
    device="cpu",
    **kwargs,
):
    """Stand in for the mask that transformers makes once in a forward pass: return `_Columns`."""
    if (kv_offset, kv_length) != (0, q_offset + q_length):
        raise ValueError(
            f"the mask was to span {kv_length} columns from column {kv_offset} on, for {q_length} new ones at "
            f"column {q_offset}; it must span {q_offset + q_length} from column 0 on: no cross attention, no cache "
            "but a RaggedCache, and without a cache an attention_mask as wide as the input"
        )
    if attention_mask is None:
        real = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    elif attention_mask.shape[1] < kv_length:
        raise ValueError(
            f"attention_mask had {attention_mask.shape[1]} columns; it must have {kv_length}, "
            f"{q_offset} of the past and {q_length} new ones"
        )
    else:
        # A copy, because the cache keeps it, and the caller may write to theirs.
        real = attention_mask[:, :kv_length].clone()
    columns = _Columns(real, q_length)
    if mask_function is not causal_mask_function:
        sizes = batch_size, q_length, kv_length, q_offset, kv_offset
        mask = sdpa_mask(
            *sizes, mask_function, allow_is_causal_skip=False, use_vmap=use_vmap, device=device
        )
        _require_causal(mask[:, 0], columns)
    return columns


def _require_causal(mask, columns):
    """Raise unless every new token may attend all tokens up to itself and no others, by mask, [B, Q, T]."""
    Q, T = mask.shape[1:]
    place = torch.arange(T, device=mask.device)
    causal = place <= place[T - Q :, None]
    matters = columns.new[:, :, None] & columns.real[:, None, :]
    wrong = ((mask != causal) & matters).nonzero()
    if len(wrong):
        row, query, column = wrong[0].tolist()
        may = "may" if mask[row, query, column] else "may not"
        raise ValueError(
            f"by the model's mask, the token in column {T - Q + query} of row {row} {may} attend that in column "
            f"{column}; it must see all of its past and nothing else: no sliding window, no packed sequences, no "
            "two-way attention, no cross attention"
        )


def _attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """Attend as transformers asks of an implementation: return context [B, Q, H_q, D_v] and weights or None."""
    if dropout:
        raise ValueError(
            f"dropout was {dropout}; it must be 0: call model.eval(), or set the config's to 0"
        )
    for name, instead in _NOT_DONE.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} was given to the attention; it must be None: {instead}")
    if not isinstance(attention_mask, _Columns):
        raise TypeError(
            f"the mask was {_shape(attention_mask)}; attention_mask must be of shape (B, T), or None, "
            "and reach the attention through transformers.masking_utils"
        )
    if isinstance(key, _Offered):
        layer, key, value = key.layer, key.states, value.states
    elif key.shape[2] == query.shape[2] == attention_mask.real.shape[1]:
        layer = _RaggedLayer(capacity=query.shape[2])
        layer.lazy_initialization(key, value)
    else:
        raise ValueError(
            f"key had {key.shape[2]} columns for {query.shape[2]} new ones; the cache must be a RaggedCache: "
            "pass cache=RaggedCache(model.config, capacity=...), or use_cache=False"
        )
    if torch.is_autocast_enabled(query.device.type):
        query, key = query.to(value.dtype), key.to(value.dtype)
    options = {} if scaling is None else {"scale": scaling}
    context, weights = layer.attend(query, key, value, attention_mask, options, _wants_weights())
    return context.transpose(1, 2).contiguous(), weights


def _wants_weights():
    # transformers collects outputs behind the models' backs: not all of them hand output_attentions down.
    return "attentions" in (_active_collector.get() or {})


def _shape(mask):
    return (
        f"of shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else f"a {type(mask).__name__}"
    )


def _require_whole_past(index, kind, window, capacity):
    if kind == "full_attention" or kind == "sliding_attention" and window >= capacity:
        return
    limit = "" if window is None else f" with a window of {window}, less than the capacity of {capacity}"
    raise ValueError(
        f"config made layer {index} a layer of {kind!r}{limit}; every layer must attend its whole past"
    )
