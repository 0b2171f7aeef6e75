"""Plant small faults in kvlib, one at a time, and see that the tests catch every one.

    python tests/mutants.py [WORD]

Each fault is an edit of one place in one file. It is made in a temporary copy of the project, where the
tests of that file then run until one fails. Without a fault, all of them must pass. The exit code is not
zero if a fault survives, or if the text it edits is not found exactly once: mend the test, or the edit.
With WORD, only the faults whose description holds it are planted.
"""

import multiprocessing
import os
import shutil
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
N_AT_ONCE = 2
HELPERS = ("cases.py", "reference.py")
BATCHED_TESTS = (
    "test_batched_cache.py",
    "test_batched_cache_in_place.py",
    "test_batched_cache_in_torch.py",
)
TESTS = {
    "__init__.py": ("test_numpy_cache.py",),
    "visibility.py": ("test_visibility.py",),
    "numpy_cache.py": ("test_numpy_cache.py",),
    "tuple_cache.py": ("test_tuple_cache.py",),
    "batched_cache.py": BATCHED_TESTS,
    "_tensors.py": ("test_tuple_cache.py", *BATCHED_TESTS),
    "_numbers.py": ("test_visibility.py", "test_numpy_cache.py"),
    "llama.py": ("test_llama.py",),
}


class Mutant(NamedTuple):
    """One fault: in kvlib's `file`, `old` becomes `new`."""

    file: str
    fault: str
    old: str
    new: str


INIT = [
    Mutant(
        "__init__.py",
        "torch is imported at once",
        "from importlib import import_module\n",
        "from importlib import import_module\nimport torch\n",
    ),
    Mutant(
        "__init__.py",
        "missing torch is a bare ModuleNotFoundError",
        'if error.name != "torch":',
        'if error.name == "torch":',
    ),
]

VISIBILITY = [
    ("the mask hides the query's own slot", "(slot <= length + query)", "(slot < length + query)"),
    (
        "the mask shows one slot of the future",
        "(slot <= length + query)",
        "(slot <= length + query + 1)",
    ),
    ("the mask hides the cached past", "(slot <= length + query)", "(slot <= query)"),
    ("the mask shows the whole chunk", "(slot <= length + query)", "(slot < length + count)"),
    ("one idle query attends", "(query < count) &", "(query <= count) &"),
    ("appended or early enough is enough", "(query < count) &", "(query < count) |"),
    ("past and chunk swap numbers", '("past", "chunk",', '("chunk", "past",'),
    (
        "unused wins over idle",
        '        "idle": query >= count,\n        "unused": slot >= length + count,\n',
        '        "unused": slot >= length + count,\n        "idle": query >= count,\n',
    ),
    (
        "chunk wins over past",
        '        "past": slot < length,\n        "chunk": slot < own_slot,\n',
        '        "chunk": slot < own_slot,\n        "past": slot < length,\n',
    ),
    (
        "the first unused slot counts as future",
        '"unused": slot >= length + count',
        '"unused": slot > length + count',
    ),
    ("the own slot counts as chunk", '"chunk": slot < own_slot', '"chunk": slot <= own_slot'),
    ("one idle query has states", '"idle": query >= count', '"idle": query > count'),
    ("the sentence swaps slot and query", "slot=slot, query=query,", "slot=query, query=slot,"),
    ("the sentence gives the old length", "new_length=length + count", "new_length=length"),
    (
        "the query sentence ends one slot late",
        "    last = length + query\n",
        "    last = length + query + 1\n",
    ),
    (
        "the query sentence misses the first idle query",
        "    if query >= count:",
        "    if query > count:",
    ),
    (
        "the query sentence forgets the chunk of an empty row",
        'if last else "one"',
        'if length else "one"',
    ),
    (
        "a row may append more than is offered",
        "(counts > n_queries).any()",
        "(counts > n_queries + 1).any()",
    ),
    ("a row must leave an offered slot", "(counts > n_queries).any()", "(counts >= n_queries).any()"),
    ("a row may hold more than its capacity", "(lengths + counts > capacity)", "(lengths > capacity)"),
    ("a row must leave a slot free", "(lengths + counts > capacity)", "(lengths + counts >= capacity)"),
    ("lengths and counts may differ in rows", "if len(lengths) != len(counts):", "if False:"),
    (
        "lengths and counts are swapped",
        "lengths[:, None, None],\n        counts[",
        "counts[:, None, None],\n        lengths[",
    ),
]

NUMPY = [
    ("keys() hands out the buffer", "return self._stored()[0].copy()", "return self._stored()[0]"),
    ("values() hands out the buffer", "return self._stored()[1].copy()", "return self._stored()[1]"),
    (
        "keys() and values() show the whole buffer",
        "return self._keys[: self._len], self",
        "return self._keys, self",
    ),
    (
        "every step copies the whole buffer",
        "    keys, values = cache._stored()\n",
        "    keys, values = cache._keys.copy()[: len(cache)], cache._values.copy()[: len(cache)]\n",
    ),
    (
        "what fits is stored before the error",
        "        if end > self._max_len:\n",
        "        if end > self._max_len:\n"
        "            room = self._max_len - self._len\n"
        "            self._keys[self._len :], self._values[self._len :] = k[:room], v[:room]\n"
        "            self._len += room\n",
    ),
    (
        "the keys count before the values are checked",
        'k, v = _steps("k", k, self.d_k), _steps("v", v, self.d_v)',
        'k = _steps("k", k, self.d_k)\n        self._keys[: len(k)] = k[: self._max_len]\n'
        '        v = _steps("v", v, self.d_v)',
    ),
    ("the last slot cannot be filled", "if end > self._max_len:", "if end >= self._max_len:"),
    ("more values than keys are taken", "if len(k) != len(v):", "if len(k) > len(v):"),
    ("several steps count as one", "        self._len = end\n", "        self._len += min(len(k), 1)\n"),
    (
        "steps are stored in reverse",
        "self._keys[self._len : end] = k",
        "self._keys[self._len : end] = k[::-1]",
    ),
    ("the write starts at slot 0", "self._values[self._len : end] = v", "self._values[: len(v)] = v"),
    ("softmax without the maximum", "        return scores - scores.max()\n", "        return scores\n"),
    ("weights do not sum to one", "        weights /= weights.sum()\n", ""),
    ("the scale is dropped", "    q = q / math.sqrt(len(q))\n", ""),
    ("scores are divided by d_k", "math.sqrt(len(q))", "len(q)"),
    (
        "overflowing scores are not scaled up again",
        "(scores - scores.max()) / shrink / shrink",
        "scores - scores.max()",
    ),
    ("overflowing scores are NaN", "    if np.isfinite(scores).all():", "    if True:"),
    ("an empty cache is decoded", "    if len(cache) == 0:", "    if False:"),
    ("anything may be a cache", "    if not isinstance(cache, KVCache):", "    if False:"),
    ("a query of any size is taken", "    if q.shape != (cache.d_k,):", "    if q.size != cache.d_k:"),
    ("NaN is stored", "    if not np.isfinite(array).all():", "    if np.isposinf(array).any():"),
    ("booleans are numbers", 'not in "iuf"', 'not in "iufb"'),
    ("a step may have any size", "or array.shape[-1] != size:", "or array.size % size:"),
    (
        "a size of zero is taken",
        'whole_number("d_k", d_k, least=1)',
        'whole_number("d_k", d_k)',
    ),
]

TUPLE = [
    (
        "the new key comes first",
        "torch.cat([cache[0], k_new], dim=1)",
        "torch.cat([k_new, cache[0]], dim=1)",
    ),
    (
        "the new value comes first",
        "torch.cat([cache[1], v_new], dim=1)",
        "torch.cat([v_new, cache[1]], dim=1)",
    ),
    ("the first key is not copied", "k_new.clone(), v_new.clone()", "k_new, v_new.clone()"),
    ("the first value is not copied", "k_new.clone(), v_new.clone()", "k_new.clone(), v_new"),
    (
        "the cache cuts gradients",
        "torch.cat([cache[0], k_new], dim=1)",
        "torch.cat([cache[0].detach(), k_new], dim=1)",
    ),
    ("the scale is dropped", " / math.sqrt(q_new.shape[-1])", ""),
    ("scores are divided by D", "math.sqrt(q_new.shape[-1])", "q_new.shape[-1]"),
    (
        "scores are divided by the square root of D_v",
        "math.sqrt(q_new.shape[-1])",
        "math.sqrt(v_new.shape[-1])",
    ),
    ("softmax over the queries", "torch.softmax(scores, dim=-1)", "torch.softmax(scores, dim=1)"),
    ("computed in half precision", "compute_dtype = wide(q_new.dtype)", "compute_dtype = q_new.dtype"),
    ("autocast rounds products", "    with full_precision(q_new.device.type):", "    if True:"),
    ("several new tokens are taken", 'if sizes["Q"] != 1:', 'if sizes["Q"] < 1:'),
    ("a list is a cache", "not isinstance(cache, tuple) or", "not isinstance(cache, (tuple, list)) or"),
    ("mixed dtypes are taken", "    require_floating_alike(tensors)\n", ""),
]

BATCHED = [
    # What is written, and where.
    (
        "the given caches are written",
        "= key_cache.clone(), value_cache.clone()",
        "= key_cache, value_cache",
    ),
    (
        "the given value cache is written",
        "= key_cache.clone(), value_cache.clone()",
        "= key_cache.clone(), value_cache",
    ),
    (
        "the whole cache is cleared",
        "= key_cache.clone(), value_cache.clone()",
        "= torch.zeros_like(key_cache), torch.zeros_like(value_cache)",
    ),
    (
        "the tail is cleared",
        "        slots[:, length : length + count] = appended\n",
        "        slots[:, length : length + count] = appended\n        slots[:, length + count :] = 0\n",
    ),
    (
        "writes land one slot early",
        "slots[:, length : length + count] = appended",
        "slots[:, max(length - 1, 0) :][:, :count] = appended",
    ),
    (
        "writes land one slot late",
        "slots[:, length : length + count] = appended",
        "slots.roll(-1, 1)[:, length : length + count] = appended",
    ),
    ("every slot gets the first offered one", "+ count] = appended", "+ count] = appended[:, :1]"),
    (
        "offered slots that are not appended are written",
        "slots[:, length : length + count] = appended",
        "slots[:, length : length + Q] = offered[:, : slots.shape[1] - length]",
    ),
    ("the last offered slots are appended", "else offered[:, :count]", "else offered[:, Q - count :]"),
    (
        "a copy is written, not the given cache",
        "append = _append_ if in_place else _append",
        "append = _append",
    ),
    (
        "all rows together write the given cache",
        "append = _append_ if in_place else _append",
        "append = _append_",
    ),
    ("a copy of the written cache is returned", "    return cache\n", "    return cache.clone()\n"),
    (
        "the cache cuts gradients",
        "return cache.transpose(1, 2).index_put(",
        "return cache.detach().transpose(1, 2).index_put(",
    ),
    (
        "what is written cuts gradients",
        "new.transpose(1, 2), held)",
        "new.detach().transpose(1, 2), held)",
    ),
    ("offered slots do not wrap around the end", "+ offered) % M  #", "+ offered)  #"),
    (
        "more offered slots than the cache has are written",
        "    new, append_mask = new[:, :, :M], append_mask[:, :M]\n",
        "",
    ),
    (
        "appended and held slots are swapped",
        "torch.where(appended, new.transpose(1, 2), held)",
        "torch.where(appended, held, new.transpose(1, 2))",
    ),
    (
        "every offered slot is written",
        "torch.where(appended, new.transpose(1, 2), held)",
        "torch.where(appended | True, new.transpose(1, 2), held)",
    ),
    (
        "slots are moved by a gather that changes NaNs",
        "held = cache.transpose(1, 2)[row, slot]",
        "held = cache.gather(2, slot[:, None, :, None].expand(new.shape)).transpose(1, 2)",
    ),
    # The lengths that are returned.
    (
        "the length before is returned",
        "(lengths.long() + append_mask.sum(dim=1)).to(lengths.dtype)",
        "lengths.clone()",
    ),
    (
        "offered slots are counted as appended",
        "(lengths.long() + append_mask.sum(dim=1)).to(lengths.dtype)",
        "(lengths.long() + append_mask.shape[1]).to(lengths.dtype)",
    ),
    (
        "lengths become int64",
        "(lengths.long() + append_mask.sum(dim=1)).to(lengths.dtype)",
        "lengths.long() + append_mask.sum(dim=1)",
    ),
    ("the host waits to hand the new lengths over", ", non_blocking=True", ""),
    (
        "the given lengths are changed",
        "(lengths.long() + append_mask.sum(dim=1)).to(lengths.dtype)",
        "lengths.copy_(lengths.long() + append_mask.sum(dim=1))",
    ),
    # Row by row, with weights.
    ("a row's scale is dropped", "beta=0, alpha=scale, out=live", "beta=0, out=live"),
    (
        "a row is computed in half precision",
        "wide(query.dtype), H_q // H_k * Q",
        "query.dtype, H_q // H_k * Q",
    ),
    (
        "a row sees the future",
        "        new.masked_fill_(future[:, :count], -math.inf)\n",
        "        pass\n",
    ),
    (
        "two new tokens see each other",
        "    if count > 1:\n        new =",
        "    if count > 2:\n        new =",
    ),
    ("the first slots are hidden, not the new ones", "[..., length:]  #", "[..., :count]  #"),
    (
        "heads and queries of a group are mixed up",
        "new = live.unflatten(1, (-1, Q))[",
        "new = live.unflatten(1, (Q, -1)).transpose(1, 2)[",
    ),
    ("the tail of a row has scores of zero", "    tail.fill_(-math.inf)\n", "    tail.fill_(0)\n"),
    (
        "idle queries of a row keep their weights",
        "        attention.unflatten(1, (-1, Q))[:, :, count:] = 0\n",
        "",
    ),
    (
        "idle queries of a row keep their context",
        "        context.unflatten(1, (-1, Q))[:, :, count:] = 0\n",
        "",
    ),
    (
        "the future is the past",
        "~may_attend(new, new[:, None], 0, Q)",
        "~may_attend(new[:, None], new, 0, Q)",
    ),
    # Row by row, without weights.
    (
        "scores are stored where no weights are needed",
        "attend = _attend_rows if need_weights else _attend_rows_fused",
        "attend = _attend_rows",
    ),
    (
        "weights are returned without need",
        'return result | {"attention": attention} if need_weights else result',
        'return result | {"attention": attention}',
    ),
    ("torch's attention gets float8", "    if query.dtype.itemsize == 1:", "    if False:"),
    (
        "the future is not hidden from torch's attention",
        "        bias[:, longest:].masked_fill_(_future(Q, query.device), -math.inf)\n",
        "",
    ),
    (
        "the bias of the longest row is that of all",
        "bias[:count, skipped : skipped + end]",
        "bias[:count, :end]",
    ),
    ("the bias hides the first slots", "bias[:, longest:].masked_fill_", "bias[:, :Q].masked_fill_"),
    (
        "two queries get no bias",
        "if count > 1 and length else None,",
        "if count > 2 and length else None,",
    ),
    ("the last queries are taken", "else queries[:, :, :count],", "else queries[:, :, Q - count :],"),
    (
        "the first queries are idle",
        "contexts.append(pad(context, (0, 0, 0, idle)) if",
        "contexts.append(pad(context, (0, 0, idle, 0)) if",
    ),
    (
        "a query's heads are grouped across",
        "queries = queries.reshape(1, H_k, group, D)",
        "queries = queries.reshape(1, group, H_k, D).transpose(1, 2)",
    ),
    (
        "the heads of several queries are grouped across",
        "queries = queries.reshape(H_k, group, n, D)",
        "queries = queries.reshape(group, H_k, n, D).transpose(0, 1)",
    ),
    ("the first chunk of a row sees the future", "is_causal = n > 1 and bias is None", "is_causal = False"),
    (
        "rows without a past are given a bias",
        "if count > 1 and length else None,",
        "if count > 1 else None,",
    ),
    ("torch's attention takes its own scale", "bias is None, scale=scale", "bias is None"),
    # Row by row, recorded.
    ("a recorded row's scale is dropped", "keys.mT, beta=0, alpha=scale)", "keys.mT, beta=0)"),
    (
        "new keys come before the past",
        "torch.cat([keys[:, :length], new_keys[:, :count]]",
        "torch.cat([new_keys[:, :count], keys[:, :length]]",
    ),
    (
        "cached values carry no gradient",
        "torch.cat([values[:, :length],",
        "torch.cat([values[:, :length].detach(),",
    ),
    (
        "new keys carry no gradient",
        "new_keys[:, :count]], dim=1",
        "new_keys[:, :count].detach()], dim=1",
    ),
    (
        "a recorded row is computed in half precision",
        "(tensor.to(wide(dtype)) for",
        "(tensor.to(dtype) for",
    ),
    ("a recorded row's unused slots come first", "(0, unused, 0, idle)", "(unused, 0, 0, idle)"),
    ("a recorded row's idle queries come first", "(0, unused, 0, idle)", "(0, unused, idle, 0)"),
    ("a recorded row's future is its past", "(end - n, 0))  # [n, end]", "(0, end - n))  # [n, end]"),
    ("a recorded row sees the future", "scores = scores.masked_fill(future, -math.inf)", "pass"),
    ("a huge future value spoils gradients", ".masked_fill(future, 0)", ""),
    (
        "weights cut gradients",
        "context = attention.view(H_k, group_rows, end) @",
        "context = attention.detach().view(H_k, group_rows, end) @",
    ),
    (
        "returned weights carry no gradient",
        "return torch.stack(attentions).to(dtype)",
        "return torch.stack(attentions).detach().to(dtype)",
    ),
    # All rows together.
    (
        "keys are tiled over the query heads",
        "queries.reshape(B, H_k, group_rows, D) @ keys.mT",
        "queries @ keys.repeat(1, H_q // H_k, 1, 1).mT",
    ),
    (
        "values are tiled over the query heads",
        "attention.reshape(B, H_k, group_rows, n_slots) @ values",
        "attention @ values.repeat(1, H_q // H_k, 1, 1)",
    ),
    ("the scale is dropped", " @ keys.mT * scale\n", " @ keys.mT\n"),
    ("scores are divided by the scale", " @ keys.mT * scale\n", " @ keys.mT / scale\n"),
    (
        "the mask takes the length after for before",
        "visible = _visible(lengths, append_mask, n_slots)",
        "visible = _visible(lengths + append_mask.sum(dim=1), append_mask, n_slots)",
    ),
    (
        "the mask swaps length and count",
        "    return may_attend(slot, query, length, count)\n",
        "    return may_attend(slot, query, count, length)\n",
    ),
    ("the shortest row tells how far to read", "else max(map(sum, rows))", "else min(map(sum, rows))"),
    ("idle rows are NaN inside", "hidden & ~idle, -math.inf", "hidden, -math.inf"),
    (
        "idle queries are NaN",
        "torch.softmax(scores, dim=-1).masked_fill(hidden, 0)",
        "torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1)",
    ),
    ("idle queries get the mean", ".masked_fill(hidden, 0)", ""),
    ("hidden scores are a large negative number", "hidden & ~idle, -math.inf)", "hidden & ~idle, -1e9)"),
    (
        "idle queries are not blanked",
        "queries = query.to(compute_dtype).masked_fill(idle, 0)",
        "queries = query.to(compute_dtype)",
    ),
    (
        "unused keys are not blanked",
        "keys = keys[:, :, :n_slots].to(compute_dtype).masked_fill(unread, 0)",
        "keys = keys[:, :, :n_slots].to(compute_dtype)",
    ),
    (
        "unused values are not blanked",
        "values = values[:, :, :n_slots].to(compute_dtype).masked_fill(unread, 0)",
        "values = values[:, :, :n_slots].to(compute_dtype)",
    ),
    (
        "computed in half precision",
        "compute_dtype = wide(query.dtype)\n",
        "compute_dtype = query.dtype\n",
    ),
    (
        "weights are rounded before they meet the values",
        "context = attention.reshape",
        "context = attention.to(query.dtype).to(compute_dtype).reshape",
    ),
    (
        "weights cut gradients, all rows together",
        "context = attention.reshape",
        "context = attention.detach().reshape",
    ),
    (
        "the weights end at the longest row",
        "return pad(attention, (0, M - n_slots)).to(",
        "return attention.to(",
    ),
    # Which way is taken, and what is refused.
    (
        "autocast rounds products",
        "    with full_precision(query.device.type):",
        "    if True:",
    ),
    ("recording is seen where gradients are off", "torch.is_grad_enabled() and any(", "any("),
    (
        "forward derivatives go unseen",
        "    ) or any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)\n",
        "    )\n",
    ),
    (
        "transforms go unseen",
        "return torch._C._are_functorch_transforms_active()",
        "return False",
    ),
    (
        "caches need not be writable",
        "    if in_place:\n        _require_writable(",
        "    if False:\n        _require_writable(",
    ),
    (
        "gradients are recorded in place",
        "    if recorded:\n        raise",
        "    if False:\n        raise",
    ),
    ("expanded caches are written", "if any(stride == 0 and size > 1 for", "if any(False for"),
    (
        "expanded value caches are written",
        '{"key_cache": key_cache, "value_cache": value_cache}.items()',
        '{"key_cache": key_cache}.items()',
    ),
    ("axes of size one are refused", "stride == 0 and size > 1 for", "stride == 0 for"),
    ("one tensor is both caches", "    if value_cache is key_cache:", "    if False:"),
    ("a compiler reads data", "    if torch.compiler.is_compiling():", "    if False:"),
    (
        "tensors without data are refused",
        "    except RuntimeError:\n        return None",
        "    except IndexError:\n        return None",
    ),
    (
        "a tracer's symbols are numbers",
        "return rows if all(isinstance(length, int) for length, _ in rows) else None",
        "return rows",
    ),
    (
        "data is read although it need not be checked",
        "_read(lengths, append_mask) if check_data else None",
        "_read(lengths, append_mask)",
    ),
    ("data is never checked", "_read(lengths, append_mask) if check_data else None", "None"),
    (
        "the lengths are read twice",
        "    rows = _read(lengths",
        "    lengths.max().item()\n    rows = _read(lengths",
    ),
    ("the scale is 1 / D", "1 / math.sqrt(d_k)", "1 / d_k"),
    ("very small scales are refused", "if not limits.tiny <= number", "if not 1e-30 <= number"),
    (
        "the scale must fit float32 in float64, too",
        'sizes["D"], wide(query.dtype))',
        'sizes["D"], torch.float32)',
    ),
    ("head counts need not divide", 'if sizes["H_q"] % sizes["H_k"]:', "if False:"),
    ("mixed dtypes are taken", "    require_floating_alike(floats)\n", ""),
    ("negative lengths are taken", "if not 0 <= length <= capacity:", "if not length <= capacity:"),
    ("a full row is refused", "if not 0 <= length <= capacity:", "if not 0 <= length < capacity:"),
    ("any append mask is taken", "if not all(appended[:count]):", "if False:"),
    ("overflow is not refused", "if length + count > capacity:", "if False:"),
    (
        "the last slot cannot be filled",
        "if length + count > capacity:",
        "if length + count >= capacity:",
    ),
    ("lengths wrap around", "if length + count > largest:", "if False:"),
    ("the largest length is refused", "if length + count > largest:", "if length + count >= largest:"),
    ("boolean lengths are taken", " or lengths.dtype == torch.bool:", ":"),
    (
        "integer append masks are taken",
        "if append_mask.dtype != torch.bool:",
        "if append_mask.dtype.is_floating_point:",
    ),
    ("unknown options are ignored", "    if unknown:", "    if False:"),
    ("True is a scale", " or isinstance(scale, bool):", ":"),
]

TENSORS = [
    (
        "sizes need not agree",
        "if sizes.setdefault(letter, size) != size:",
        "if sizes.setdefault(letter, size) < 0:",
    ),
    (
        "any number of dimensions is taken",
        "if len(shape) != len(letters):",
        "if len(shape) > len(letters):",
    ),
    ("sizes of zero are taken", "if size == 0 and letter", "if size < 0 and letter"),
    ("sparse tensors are taken", "if tensor.layout is not torch.strided:", "if False:"),
    ("mixed devices are taken", '    require_same("device", tensors)\n', ""),
    (
        "integers are computed with",
        "if not tensor.dtype.is_floating_point or tensor",
        "if tensor.dtype == torch.bool or tensor",
    ),
    ("scale factors are numbers", " or tensor.dtype in _NO_NUMBERS:", ":"),
    ("mixed dtypes are taken", '    require_same("dtype", tensors)\n', ""),
    (
        "float64 is computed in float32",
        "torch.float64 if dtype == torch.float64 else torch.float32",
        "torch.float32",
    ),
]

NUMBERS = [
    ("negative numbers are taken", "    if whole < least:", "    if False:"),
    ("True is a number", " or isinstance(number, bool):", ":"),
]

LLAMA = [
    (
        "all rows share their positions",
        "cache.lengths[:, None] + torch",
        "cache.lengths.max() + torch",
    ),
    (
        "keys are stored without their position",
        "query, key = _rotate(query, turns), _rotate(key, turns)",
        "query = _rotate(query, turns)",
    ),
    (
        "halves are rotated in place of neighbours",
        "x.unflatten(-1, (-1, 2)))",
        "x.unflatten(-1, (2, -1)).mT.contiguous())",
    ),
    ("token ids index as they come", "        tokens = tokens.long()\n", ""),
    ("the cache never learns what was appended", 'cache.lengths = step["lengths"]', "pass"),
    (
        "the lengths are changed in place",
        'cache.lengths = step["lengths"]',
        'cache.lengths.copy_(step["lengths"])',
    ),
    ("a clone shares its keys", "tuple(keys.clone() for keys in self.keys)", "self.keys"),
    ("a clone shares its values", "tuple(values.clone() for values in self.values)", "self.values"),
    (
        "a cache may have other layers than the model",
        "if not len(cache.keys) == len(cache.values) == len(self.layers):",
        "if False:",
    ),
    ("prompts and cache may differ in rows", "if len(prompts) != len(cache.lengths):", "if False:"),
    ("the output is always the embedding", '.get("output.weight", weights', '.get("", weights'),
    ("finished rows go on", "running = running & ~torch.isin(chosen, stop)", "pass"),
    (
        "the prompt's scores come one token late",
        "final = counts - 1 - start",
        "final = counts - 2 - start",
    ),
]

MUTANTS = INIT + [
    Mutant(file, *edit)
    for file, edits in (
        ("visibility.py", VISIBILITY),
        ("numpy_cache.py", NUMPY),
        ("tuple_cache.py", TUPLE),
        ("batched_cache.py", BATCHED),
        ("_tensors.py", TENSORS),
        ("_numbers.py", NUMBERS),
        ("llama.py", LLAMA),
    )
    for edit in edits
]


def run_tests(tests, mutant=None):
    """Run tests on a copy of the project with or without a fault; return pytest's exit code and output.

    Runs in a process of its own: it replaces what the process imports, and what it prints to.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(ROOT / "kvlib", copy / "kvlib", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        (copy / "tests").mkdir()
        for name in (*HELPERS, *tests):
            shutil.copy(ROOT / "tests" / name, copy / "tests")
        if mutant:
            target = copy / "kvlib" / mutant.file
            target.write_text(target.read_text().replace(mutant.old, mutant.new))
        os.chdir(copy)
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = folder  # some tests start a Python of their own
        with open("output", "w+") as output, redirect_stdout(output), redirect_stderr(output):
            code = pytest.main([*"-x -q --tb=line --assert=plain -p no:cacheprovider".split(), "tests"])
            output.seek(0)
            return code, output.read()


def try_mutant(mutant):
    """Plant a fault and print what became of it; return whether the tests caught it."""
    name = f"kvlib/{mutant.file}: {mutant.fault}"
    n_found = (ROOT / "kvlib" / mutant.file).read_text().count(mutant.old)
    if n_found != 1:
        print(
            f"NOT PLANTED  {name}: its text occurs {n_found} times, not once: {mutant.old!r}", flush=True
        )
        return False
    code, output = run_tests(TESTS[mutant.file], mutant)
    if code == pytest.ExitCode.TESTS_FAILED:
        caught_by = next(line for line in output.splitlines() if line.startswith(("FAILED", "ERROR")))
        print(f"caught       {name}, by {caught_by.split('::')[-1].split(' - ')[0]}", flush=True)
        return True
    print(
        f"SURVIVED     {name}" if code == 0 else f"BROKEN       {name}: no test ran\n{output}",
        flush=True,
    )
    return False


def main(word=""):
    mutants = [mutant for mutant in MUTANTS if word in f"{mutant.file} {mutant.fault}"]
    if not mutants:
        sys.exit(f"no fault has {word!r} in its description")
    context = multiprocessing.get_context("forkserver")
    # Importing these takes longer than most tests do.
    context.set_forkserver_preload(
        ["torch.distributed.tensor", "numpy.testing", "hypothesis.strategies"]
    )
    with ProcessPoolExecutor(N_AT_ONCE, context, max_tasks_per_child=1) as pool:
        healthy = pool.submit(run_tests, sorted({name for names in TESTS.values() for name in names}))
        caught = list(pool.map(try_mutant, mutants))
    code, output = healthy.result()
    if code != 0:
        sys.exit(f"{output}\nThe tests fail without any fault, so they say nothing about faults.")
    if not all(caught):
        sys.exit(
            f"{caught.count(False)} of {len(mutants)} faults were not caught: see the capitals above."
        )
    print(f"All {len(mutants)} faults were caught.")


if __name__ == "__main__":
    main(*sys.argv[1:2])
