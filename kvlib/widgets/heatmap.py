"""The attention heatmap: how much of each slot every query takes."""

from __future__ import annotations

import base64
import math
import sys

import numpy as np

from kvlib import visibility
from kvlib.widgets._host import Widget, checks, spoken, synced
from kvlib.widgets._table import table
from kvlib.widgets._text import GLYPHS, HEATMAP_CAPTION, LABELS, NO_QUERY, SPACES, explain
from kvlib.widgets._validation import index, text, whole

#: Scores are shipped as float32, with room for the difference of any two.
_LARGEST_SCORE = 1e38


class AttentionHeatmap(Widget):
    """Queries against slots, with the attention weight in each cell.

    The scores of the cells that `kvlib.visibility` lets a query attend are shipped to the
    browser, which computes their softmax.  What masked cells hold is never looked at.

    Parameters
    ----------
    scores : array_like, shape (L, B, H_q, Q, M)
        Scaled scores before the softmax, as numpy arrays or torch tensors.  Leading axes of
        size one may be left out, down to (Q, M).
    lengths, counts : sequence of int, shape (B,)
        Live slots of each row before the call, and how many of the Q offered it appends.
    n_kv_heads : int, optional
        H_k, a divisor of H_q; query head h reads KV head ``h // (H_q // H_k)``.  Without
        it every query head has its own.
    tokens : sequence of sequence of str, optional
        The text in each row's slots, at least for those live after the call.
    layer, row, head : int
        What is shown first.
    selected : tuple of int, (query, slot)
        The cell whose sentence is shown first.
    title : str
        Shown above the picture, and its name for screen readers.

    Raises
    ------
    TypeError, ValueError
        If an argument is of the wrong type or does not fit the others, or if a score that
        counts is not finite.

    Notes
    -----
    In a notebook ``layer``, ``row``, ``head`` and ``selected`` are traits, kept in step
    with the browser both ways.

    Examples
    --------
    >>> from kvlib.widgets import AttentionHeatmap
    >>> AttentionHeatmap([[0.0, 1.0, 0.0], [0.5, 0.5, 2.0]], lengths=[1], counts=[2])
    <Attention heatmap: 1 layer, 1 row, 1 head on 1 KV head, 2 queries, 3 slots>
    """

    _kind = "heatmap"
    _fields = ("data", "layer", "row", "head", "selected", "title")
    data = synced()
    layer = synced()
    row = synced()
    head = synced()
    selected = synced()
    title = synced()

    def __init__(
        self,
        scores,
        lengths,
        counts,
        n_kv_heads=None,
        tokens=None,
        layer=0,
        row=0,
        head=0,
        selected=(0, 0),
        title="",
    ):
        data = _data(scores, lengths, counts, n_kv_heads, tokens)
        start = {"layer": layer, "row": row, "head": head, "selected": selected}
        start = {name: _choice(name, value, data["shape"]) for name, value in start.items()}
        super().__init__(data=data, **start, title=text("title", title))

    @classmethod
    def from_decode_step(cls, q, cache, **first):
        """Show what `kvlib.decode_step` computes.

        Parameters
        ----------
        q : array_like, shape (D,) or (Q, D)
            The query of the newest step in the cache, or those of its newest Q steps, oldest
            first.
        cache : KVCache
            The cache, the steps of the queries included.
        **first
            ``tokens``, ``selected``, ``title``: as in the class.
        """
        queries = np.atleast_2d(_numpy(q))
        if queries.ndim != 2 or queries.shape[1] != cache.d_k:
            raise ValueError(f"q has shape {np.shape(q)}; it must be ({cache.d_k},) or (Q, {cache.d_k})")
        keys = np.zeros((cache.max_len, cache.d_k))
        keys[: len(cache)] = cache.keys()
        return cls._from_newest("q", queries[None], keys[None], len(cache), **first)

    @classmethod
    def from_tuple_step(cls, q_new, cache, **first):
        """Show what `kvlib.kv_cache_step` computes.

        Parameters
        ----------
        q_new : array_like, shape (B, Q, D)
            The queries of the newest Q tokens in the cache, oldest first: Q = 1 for one call,
            more to see several calls in one picture.
        cache : tuple of array_like
            What the last call returned: keys (B, T, D) and values (B, T, D_v).
        **first
            ``tokens``, ``row``, ``selected``, ``title``: as in the class.
        """
        queries, keys = _numpy(q_new), _numpy(cache[0])
        if queries.ndim != 3 or keys.ndim != 3 or queries.shape[::2] != keys.shape[::2]:
            raise ValueError(
                f"q_new has shape {queries.shape} and the cached keys {keys.shape}; "
                "they must be (B, Q, D) and (B, T, D)"
            )
        return cls._from_newest("q_new", queries, keys, keys.shape[1], **first)

    @classmethod
    def from_batched_step(cls, query, result, lengths, append_mask, options=None, **first):
        """Show what `kvlib.kv_cache_attention_step` returned.

        Parameters
        ----------
        query : array_like, shape (B, H_q, Q, D)
            The query of the call.
        result : dict
            What the call returned.
        lengths, append_mask, options
            As in the call: ``lengths`` (B,) counts the slots that were live before it.
        **first
            ``tokens``, ``row``, ``head``, ``selected``, ``title``: as in the class.

        Raises
        ------
        TypeError, ValueError
            As in the class, and if the arguments are not those of the call: the lengths and
            weights that they give must be those of the result.
        """
        counts = _counts(append_mask, np.shape(query))
        after = [length + count for length, count in zip(_list(lengths), counts)]
        returned = _list(result["lengths"])
        if after != returned:
            raise ValueError(
                f"lengths and append_mask give {after} live slots after the call, but the result has "
                f"{returned}; lengths must be those before the call"
            )
        return cls.from_layers(
            [query], [result["key_cache"]], lengths, append_mask, options, [result["attention"]], **first
        )

    @classmethod
    def from_layers(
        cls, queries, key_caches, lengths, append_mask, options=None, attention=None, **first
    ):
        """Show one call of `kvlib.kv_cache_attention_step` for each layer of a model.

        Parameters
        ----------
        queries : sequence of array_like, L of shape (B, H_q, Q, D)
            The query of each layer's call.
        key_caches : sequence of array_like, L of shape (B, H_k, M, D)
            The keys after each layer's call.
        lengths, append_mask, options
            As in the calls: ``lengths`` (B,) counts the slots that were live before them.
        attention : sequence of array_like, L of shape (B, H_q, Q, M), optional
            The weights that the calls returned; the picture is refused if it differs.
        **first
            ``tokens``, ``layer``, ``row``, ``head``, ``selected``, ``title``: as in the class.

        Raises
        ------
        TypeError, ValueError
            As in the class, and if the weights differ from ``attention``.
        """
        lengths, counts = _list(lengths), _counts(append_mask, np.shape(queries[0]))
        scale = (options or {}).get("scale")
        parts = [
            _scores(_numpy(query), _numpy(keys), lengths, counts, scale)
            for query, keys in zip(queries, key_caches, strict=True)
        ]
        scores = np.stack([part for part, _ in parts])
        heatmap = cls(scores, lengths, counts, n_kv_heads=np.shape(key_caches[0])[1], **first)
        if attention is not None:
            for layer, ((_, reach), returned) in enumerate(zip(parts, attention, strict=True)):
                heatmap._require_agreement(layer, returned, reach)
        return heatmap

    @classmethod
    def _from_newest(cls, name, queries, keys, n_steps, **first):
        """Show the queries (B, Q, D) of the newest of n_steps steps, on keys (B, M, D)."""
        rows, n_queries, _ = queries.shape
        if not 1 <= n_queries <= n_steps:
            raise ValueError(
                f"{name} holds {n_queries} queries for {n_steps} steps in the cache; "
                "there must be at least one, and the step of each must be there"
            )
        lengths, counts = [n_steps - n_queries] * rows, [n_queries] * rows
        scores, _ = _scores(queries[:, None], keys[:, None], lengths, counts, None)
        return cls(scores, lengths, counts, **first)

    def weights(self, layer=0, row=0, head=0):
        """Return the weights in the picture.

        Parameters
        ----------
        layer, row, head : int

        Returns
        -------
        numpy.ndarray of float64, shape (Q, M)
            Zero wherever a query may not attend.
        """
        layer, row, head = (
            _choice(name, value, self.data["shape"])
            for name, value in [("layer", layer), ("row", row), ("head", head)]
        )
        n_queries, capacity = self.data["shape"][3:]
        weights = np.zeros((n_queries, capacity))
        for query, (_, gaps) in enumerate(self._numbers(layer, row, head)):
            powers = np.exp(gaps.astype(np.float64))
            weights[query, : len(gaps)] = powers / powers.sum()
        return weights

    def _numbers(self, layer, row, head):
        """Yield the peak score and the gaps below it of each appended query, as shipped."""
        _, _, heads, _, _ = self.data["shape"]
        lengths, counts = self.data["lengths"], self.data["counts"]
        sizes = [
            sum(length + query + 2 for query in range(count)) for length, count in zip(lengths, counts)
        ]
        at = layer * heads * sum(sizes) + heads * sum(sizes[:row]) + head * sizes[row]
        numbers = np.frombuffer(base64.b64decode(self.data["numbers"]), "<f4")
        for query in range(counts[row]):
            end = at + lengths[row] + query + 2
            yield numbers[at], numbers[at + 1 : end]
            at = end

    def _require_agreement(self, layer, returned, reach):
        """Raise unless these are the weights of a layer, up to the rounding of their dtype.

        Gaps are shipped as float32, which moves no weight by 1e-7.  The call's own rounding
        grows with ``reach``, the largest sum of sizes in one of its dot products.
        """
        _, rows, heads, _, _ = self.data["shape"]
        shown = np.array(
            [[self.weights(layer, row, head) for head in range(heads)] for row in range(rows)]
        )
        coarse = _eps(returned)
        tolerance = 1e-7 + 2 * coarse + 8 * min(coarse, 2.0**-23) * max(1, reach)
        returned = _numpy(returned)
        if shown.shape != returned.shape or not np.all(np.abs(shown - returned) <= tolerance):
            raise ValueError(
                f"the weights of layer {layer} differ from the attention that the call returned; "
                "query, lengths, append_mask and options must be those of the call"
            )

    @checks("layer", "row", "head", "selected")
    def _check_choice(self, name, value):
        return _choice(name, value, self.data["shape"])

    def _summary(self):
        layers, rows, heads, queries, slots = self.data["shape"]
        counted = (
            [(layers, "layer"), (rows, "row"), (heads, "head")],
            [(queries, "query"), (slots, "slot")],
        )
        first, last = (", ".join(_count(*pair) for pair in pairs) for pairs in counted)
        return f"{first} on {_count(self.data['n_kv_heads'], 'KV head')}, {last}"

    def _still(self):
        lengths, counts = self.data["lengths"], self.data["counts"]
        length, count = lengths[self.row], counts[self.row]
        _, _, _, n_queries, capacity = self.data["shape"]
        weights = self.weights(self.layer, self.row, self.head)

        def cell(query, slot):
            if not visibility.may_attend(slot, query, length, count):
                name = visibility.state(slot, query, length, count)
                return name, GLYPHS[name], ""
            weight = weights[query, slot]
            shown = "1.0" if weight >= 0.995 else f"{weight:.2f}"[1:]
            return "weight", shown, f"--kv-weight:{weight:.4f}"

        still = table(
            caption=_sentence_case(", ".join(self._picture())),
            columns=[(str(slot), self._token(slot)) for slot in range(capacity)],
            rows=[(f"query {query}", self._token(self._own_slot(query))) for query in range(n_queries)],
            cells=[[cell(query, slot) for slot in range(capacity)] for query in range(n_queries)],
        )
        legend = ", ".join(f"{GLYPHS[name]} {LABELS[name]}" for name in ("future", "unused", "idle"))
        return f'{still}<p class="kv-caption">{HEATMAP_CAPTION} Masked: {legend}.</p>'

    def _own_slot(self, query):
        """Return where the token of a query is, or None if it was not appended."""
        return self.data["lengths"][self.row] + query if query < self.data["counts"][self.row] else None

    def _token(self, slot):
        """Return the text in a slot, "" where there is none."""
        after = self.data["lengths"][self.row] + self.data["counts"][self.row]
        if not self.data["tokens"] or slot is None or slot >= after:
            return ""
        return self.data["tokens"][self.row][slot].translate(str.maketrans(SPACES))

    def _spoken(self):
        if self.data["shape"][3] == 0:
            return spoken(*NO_QUERY)
        query, slot = self.selected
        length, count = self.data["lengths"][self.row], self.data["counts"][self.row]
        result = "masked, no weight"
        if visibility.may_attend(slot, query, length, count):
            weight = self.weights(self.layer, self.row, self.head)[query, slot]
            peak, gaps = list(self._numbers(self.layer, self.row, self.head))[query]
            shown = "below 0.0001" if 0 < weight < 0.00005 else f"{weight:.4f}"
            result = f"weight {shown}, score {float(peak) + float(gaps[slot]):.3f}"
        query_token, slot_token = (
            f" “{token}”" if token else ""
            for token in (self._token(self._own_slot(query)), self._token(slot))
        )
        place = [*self._picture(), f"query {query}{query_token}", f"key in slot {slot}{slot_token}"]
        return spoken(
            f"{_sentence_case(', '.join(place))}: {result}.", explain(slot, query, length, count)
        )

    def _picture(self):
        """Return which picture is shown, in words; what there is only one of goes without saying."""
        layers, rows, heads, _, _ = self.data["shape"]
        share = heads // self.data["n_kv_heads"]
        group = f" of KV head {self.head // share}" if share > 1 else ""
        parts = [
            (layers, f"layer {self.layer}"),
            (rows, f"row {self.row}"),
            (heads, f"head {self.head}{group}"),
        ]
        return [part for size, part in parts if size > 1]


def _data(scores, lengths, counts, n_kv_heads, tokens):
    """Return everything the browser needs to compute the weights, as JSON-ready values."""
    scores = _numpy(scores)
    if not 2 <= scores.ndim <= 5:
        raise ValueError(f"scores has shape {scores.shape}; it must be (L, B, H_q, Q, M), or end so")
    scores = scores.reshape((1,) * (5 - scores.ndim) + scores.shape)
    layers, rows, heads, n_queries, capacity = scores.shape
    if 0 in (layers, rows, heads, capacity):
        raise ValueError(f"scores has shape {scores.shape}; only Q, the next to last size, may be 0")
    seen = visibility.mask(lengths, counts, n_queries, capacity)
    if len(seen) != rows:
        raise ValueError(f"lengths has {len(seen)} rows; it must have as many as scores, {rows}")
    n_kv_heads = heads if n_kv_heads is None else whole("n_kv_heads", n_kv_heads)
    if n_kv_heads < 1 or heads % n_kv_heads:
        raise ValueError(f"n_kv_heads was {n_kv_heads}; it must divide the {heads} query heads")
    lengths, counts = [int(length) for length in lengths], [int(count) for count in counts]
    return {
        "numbers": base64.b64encode(_ship(scores, seen, lengths, counts)).decode("ascii"),
        "shape": [layers, rows, heads, n_queries, capacity],
        "lengths": lengths,
        "counts": counts,
        "n_kv_heads": n_kv_heads,
        "tokens": _tokens(tokens, lengths, counts, capacity),
    }


def _ship(scores, seen, lengths, counts):
    """Return, by layer, row, head and appended query, the peak score and the gaps below it."""
    layers, rows, heads, _, _ = scores.shape
    counted = scores[np.broadcast_to(seen[None, :, None], scores.shape)]
    if not np.all(np.abs(counted) <= _LARGEST_SCORE):
        worst = counted[~(np.abs(counted) <= _LARGEST_SCORE)][0]
        raise ValueError(
            f"scores holds {worst} where a query attends; it must be finite and below 1e38 in size"
        )
    pieces = [
        np.append(peak := visible.max(), visible - peak)
        for layer in range(layers)
        for row in range(rows)
        for head in range(heads)
        for query in range(counts[row])
        for visible in [scores[layer, row, head, query, : lengths[row] + query + 1]]
    ]
    return np.concatenate([*pieces, []]).astype("<f4").tobytes()


def _tokens(tokens, lengths, counts, capacity):
    if tokens is None:
        return None
    tokens = [list(row) for row in tokens]
    if len(tokens) != len(lengths):
        raise ValueError(
            f"tokens has {len(tokens)} rows; it must have as many as lengths, {len(lengths)}"
        )
    for row, labels in enumerate(tokens):
        after = lengths[row] + counts[row]
        if not after <= len(labels) <= capacity:
            raise ValueError(
                f"tokens[{row}] has {len(labels)} labels; it must have {after} for the live slots, "
                f"and at most {capacity}"
            )
        for slot, label in enumerate(labels):
            text(f"tokens[{row}][{slot}]", label)
    return tokens


def _choice(name, value, shape):
    """Return what is shown first of a dimension, checked against the shape of the scores."""
    layers, rows, heads, n_queries, capacity = shape
    if name != "selected":
        return index(name, value, {"layer": layers, "row": rows, "head": heads}[name])
    try:
        query, slot = value
    except (TypeError, ValueError):
        raise TypeError(f"selected was {value!r}; it must be (query, slot)") from None
    return [index("selected query", query, max(n_queries, 1)), index("selected slot", slot, capacity)]


def _scores(query, keys, lengths, counts, scale):
    """Return the scaled scores (B, H_q, Q, M), and the largest sum of sizes that one adds up.

    What the call does not read counts as zeros, so junk there does no harm.
    """
    if query.ndim != 4 or keys.ndim != 4 or query.shape[::3] != keys.shape[::3]:
        raise ValueError(
            f"query has shape {query.shape} and key_cache {keys.shape}; "
            "they must be (B, H_q, Q, D) and (B, H_k, M, D)"
        )
    _, heads, n_queries, size = query.shape
    kv_heads, capacity = keys.shape[1:3]
    if heads % kv_heads:
        raise ValueError(
            f"query has {heads} heads; it must have a multiple of the {kv_heads} heads of key_cache"
        )
    visibility.mask(lengths, counts, n_queries, capacity)
    appended = np.arange(n_queries) < np.array(counts)[:, None]
    live = np.arange(capacity) < (np.array(lengths) + np.array(counts))[:, None]
    scale = 1 / math.sqrt(size) if scale is None else scale
    query = np.where(appended[:, None, :, None], query, 0) * scale
    keys = np.where(live[:, None, :, None], keys, 0).repeat(heads // kv_heads, axis=1)
    keys = keys.swapaxes(-1, -2)  # [B, H_q, D, M]
    return query @ keys, (np.abs(query) @ np.abs(keys)).max(initial=0)


def _counts(append_mask, query_shape):
    """Return how many slots each row appends."""
    append_mask = _numpy(append_mask).astype(bool)
    if append_mask.shape != query_shape[::2]:
        raise ValueError(
            f"append_mask has shape {append_mask.shape} and query {tuple(query_shape)}; "
            "they must be (B, Q) and (B, H_q, Q, D)"
        )
    counts = append_mask.sum(-1)
    if (append_mask != (np.arange(append_mask.shape[-1]) < counts[:, None])).any():
        raise ValueError("append_mask has a True after a False; every row must hold its Trues first")
    return counts.tolist()


def _numpy(array):
    """Return an array or a tensor of any device and floating dtype as a numpy array."""
    if hasattr(array, "detach"):
        array = array.detach().cpu().double().numpy()
    return np.asarray(array, dtype=np.float64)


def _list(array):
    return array.tolist() if hasattr(array, "tolist") else list(array)


def _eps(array):
    """Return the distance from 1 to the next number of an array's or a tensor's dtype."""
    if hasattr(array, "detach"):
        return sys.modules["torch"].finfo(array.dtype).eps
    return float(np.finfo(np.asarray(array).dtype).eps)


def _sentence_case(words):
    return words[:1].upper() + words[1:]


def _count(number, noun):
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun[:-1] + 'ies' if noun.endswith('y') else noun + 's'}"
