"""Models of Hugging Face transformers on this kernel, against the same models on their own attention."""

import copy
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
)
from transformers.masking_utils import create_causal_mask

from kvlib import llama, transformers_attention
from kvlib.transformers_attention import RaggedCache, register
from kvlib.widgets import AttentionHeatmap

V, L, N_NEW = 61, 3, 9
README = Path(__file__).parents[2] / "README.md"
LENGTHS = (5, 9, 2)
T = max(LENGTHS)
CAPACITY = T + N_NEW
IDS = torch.randint(1, V, (len(LENGTHS), T), generator=torch.Generator().manual_seed(1))
#: Ones where a prompt stands: at the right, as generation wants it, or at the left, as training does.
LEFT_PADDED = (torch.arange(T) >= T - torch.tensor(LENGTHS)[:, None]).long()
RIGHT_PADDED = LEFT_PADDED.flip(1)

SIZES = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": L,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,  # so that attention is far from even, and logits far from tied
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
KINDS = {
    "Llama, grouped": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 2}),
    "Llama, multi-query": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 1}),
    "Mistral": (MistralForCausalLM, MistralConfig, {"num_key_value_heads": 2, "sliding_window": None}),
    "Mistral, wide window": (
        MistralForCausalLM,
        MistralConfig,
        {"num_key_value_heads": 2, "sliding_window": 3 * CAPACITY},
    ),
    "Qwen2": (Qwen2ForCausalLM, Qwen2Config, {"num_key_value_heads": 2}),
    "Qwen3": (Qwen3ForCausalLM, Qwen3Config, {"num_key_value_heads": 2, "head_dim": 8}),
    "GPT-2": (GPT2LMHeadModel, GPT2Config, {}),
    "GPT-2, scaled by layer": (GPT2LMHeadModel, GPT2Config, {"scale_attn_by_inverse_layer_idx": True}),
}


def build(model_class, config_class, options, dtype=torch.float64):
    """Return a random model on this kernel."""
    torch.manual_seed(0)
    model = model_class(config_class(**SIZES, **options)).to(dtype).eval()
    model.set_attn_implementation("kvlib")
    return model


def stock(model, implementation="sdpa"):
    """Return the same model on an attention of transformers itself."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation(implementation)
    return twin


def generate(model, ids=IDS, mask=LEFT_PADDED, **options):
    return model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=N_NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )


def assert_same_generation(found, expected):
    assert found.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    register()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    return build(*KINDS[request.param])


@pytest.fixture(scope="module")
def small_llama():
    return build(*KINDS["Llama, grouped"])


@pytest.fixture
def cache(small_llama):
    return RaggedCache(small_llama.config, CAPACITY)


# Generation


def test_a_ragged_batch_generates_what_the_stock_model_generates(model):
    cache = RaggedCache(model.config, CAPACITY)
    assert_same_generation(generate(model, cache=cache), generate(stock(model)))
    assert cache.lengths.tolist() == [length + N_NEW - 1 for length in LENGTHS]


@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_a_prompt_in_chunks_generates_what_the_stock_model_generates(model, chunk):
    chunked = generate(model, cache=RaggedCache(model.config, CAPACITY), prefill_chunk_size=chunk)
    assert_same_generation(chunked, generate(stock(model)))


def test_a_row_alone_generates_what_it_generates_in_the_batch(model):
    together = generate(model, cache=RaggedCache(model.config, CAPACITY))
    for row, length in enumerate(LENGTHS):
        ids = IDS[row : row + 1, T - length :]
        alone = generate(model, ids, torch.ones_like(ids), cache=RaggedCache(model.config, CAPACITY))
        assert alone.sequences[0, length:].tolist() == together.sequences[row, T:].tolist()
        for one, many in zip(alone.logits, together.logits):
            torch.testing.assert_close(one[0], many[row])


def test_a_second_turn_continues_from_the_cache(model):
    first = generate(model, cache=RaggedCache(model.config, 3 * CAPACITY))
    expected = generate(stock(model))
    mask = torch.cat([LEFT_PADDED, torch.ones(len(LENGTHS), N_NEW + 4, dtype=torch.int64)], dim=1)
    more = torch.cat([first.sequences, IDS[:, :4]], dim=1)
    second = generate(model, more, mask, cache=first.cache)
    assert_same_generation(second, generate(stock(model), more, mask, cache=expected.cache))


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}])
def test_beam_search_finds_what_the_stock_model_finds(model, options):
    found = generate(model, cache=RaggedCache(model.config, CAPACITY), **options)
    assert found.sequences.tolist() == generate(stock(model), **options).sequences.tolist()


def test_drafts_that_are_taken_back_leave_no_trace(small_llama):
    prompt = IDS[1:2].repeat(1, 2)  # something to copy drafts from
    mask = torch.ones_like(prompt)
    cache = RaggedCache(small_llama.config, 2 * T + N_NEW + 5)
    drafted = generate(small_llama, prompt, mask, cache=cache, prompt_lookup_num_tokens=3)
    assert_same_generation(drafted, generate(stock(small_llama), prompt, mask))


def test_generation_writes_into_the_buffers_it_was_given(small_llama, cache):
    generate(small_llama, cache=cache)
    buffers = [layer.keys for layer in cache.layers] + [layer.values for layer in cache.layers]
    before = [(buffer.data_ptr(), buffer.clone()) for buffer in buffers]
    cache.crop(-3)
    with torch.no_grad():
        mask = torch.ones(len(LENGTHS), cache.get_seq_length() + 1, dtype=torch.int64)
        mask[:, :T] = LEFT_PADDED
        small_llama(IDS[:, :1], attention_mask=mask, cache=cache)
    after = [layer.keys for layer in cache.layers] + [layer.values for layer in cache.layers]
    for (address, old), new in zip(before, after, strict=True):
        assert new.data_ptr() == address
        assert new.shape[2] == CAPACITY
        written = (new != old).any(dim=3).any(dim=1)
        assert [slots.nonzero().flatten().tolist() for slots in written] == [
            [length + N_NEW - 4] for length in LENGTHS
        ]


def test_what_unused_slots_hold_changes_nothing(small_llama, cache):
    with torch.no_grad():
        small_llama(IDS, attention_mask=LEFT_PADDED, cache=cache)
        for layer in cache.layers:
            for row, length in enumerate(LENGTHS):
                layer.keys[row, :, length:] = torch.nan
                layer.values[row, :, length:] = torch.nan
        mask = torch.cat([LEFT_PADDED, torch.ones(len(LENGTHS), 1, dtype=torch.int64)], dim=1)
        found = small_llama(IDS[:, :1], attention_mask=mask, cache=cache).logits
        whole = stock(small_llama)(torch.cat([IDS, IDS[:, :1]], dim=1), attention_mask=mask)
    # No position_ids: every column counts, padding too, on both sides.
    torch.testing.assert_close(found[:, 0], whole.logits[:, -1])


# Forward passes


@pytest.mark.parametrize("mask", [LEFT_PADDED, RIGHT_PADDED, None], ids=["left", "right", "no padding"])
def test_a_pass_without_a_cache_is_causal_attention(model, mask):
    with torch.no_grad():
        found = model(IDS, attention_mask=mask, use_cache=False).logits
        expected = stock(model)(IDS, attention_mask=mask, use_cache=False).logits
    real = torch.ones_like(IDS).bool() if mask is None else mask.bool()
    torch.testing.assert_close(found[real], expected[real])


def test_padding_between_tokens_is_skipped(model):
    mask = torch.ones_like(IDS)
    mask[0, 2:4] = mask[1, 5] = mask[2, [0, 4, 8]] = 0
    real = mask.bool()
    cache = RaggedCache(model.config, CAPACITY)
    with torch.no_grad():
        expected = stock(model)(IDS, attention_mask=mask, use_cache=False).logits
        for part in (
            slice(0, 3),
            slice(3, 4),
            slice(4, T),
        ):  # the whole mask each time: it may run ahead
            out = model(IDS[:, part], attention_mask=mask, cache=cache, output_attentions=True)
            torch.testing.assert_close(out.logits[real[:, part]], expected[:, part][real[:, part]])
            for weights in out.attentions:
                assert (weights.transpose(1, 2)[~real[:, part]] == 0).all()
    assert cache.lengths.tolist() == mask.sum(dim=1).tolist()


@pytest.mark.parametrize("mask", [RIGHT_PADDED, None], ids=["padded", "no padding"])
def test_a_training_pass_has_the_gradients_of_eager_attention(model, mask):
    ours, eager = model, stock(model, "eager")
    losses = []
    for twin in (ours, eager):
        twin.zero_grad()
        labels = IDS if mask is None else IDS.masked_fill(mask == 0, -100)
        losses.append(twin(IDS, attention_mask=mask, labels=labels).loss)
        losses[-1].backward()
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)  # eager rounds its softmax to float32
    for (name, weight), (_, expected) in zip(
        ours.named_parameters(), eager.named_parameters(), strict=True
    ):
        torch.testing.assert_close(weight.grad, expected.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_gradients_flow_through_the_cache(model):
    def gradients(run):
        model.zero_grad()
        run().square().mean().backward()
        return {name: weight.grad.clone() for name, weight in model.named_parameters()}

    def in_two_calls():
        cache = RaggedCache(model.config, CAPACITY)
        model(IDS[:, :4], cache=cache)
        logits = model(IDS[:, 4:], cache=cache).logits
        recorded = [(layer.keys, layer.keys.clone()) for layer in cache.layers]
        with torch.no_grad():
            model(IDS[:, :1], cache=cache)
        for keys, before in recorded:  # the gradients may need them
            assert torch.equal(keys, before)
        return logits

    found = gradients(in_two_calls)
    expected = gradients(lambda: model(IDS, use_cache=False).logits[:, 4:])
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], msg=name)
    assert all(gradient.abs().sum() > 0 for gradient in found.values())


def test_a_pass_under_autocast_computes_in_half_precision():
    model = build(*KINDS["Llama, grouped"], dtype=torch.float32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = model(IDS, cache=RaggedCache(model.config, CAPACITY)).logits
        expected = stock(model)(IDS).logits
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0, atol=0.2)


# Attention weights


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_that_generation_returns_are_those_of_eager_attention(kind):
    model = build(*KINDS[kind], dtype=torch.float32)  # in float64, eager attention makes padding NaN
    found = generate(model, cache=RaggedCache(model.config, CAPACITY), output_attentions=True)
    expected = generate(stock(model, "eager"), output_attentions=True)
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert len(found.attentions) == N_NEW
    for step, (ours, theirs) in enumerate(zip(found.attentions, expected.attentions, strict=True)):
        assert len(ours) == L
        for weights, eager in zip(ours, theirs, strict=True):
            assert weights.shape == eager.shape
            real = LEFT_PADDED.bool() if step == 0 else torch.ones(len(LENGTHS), 1).bool()
            by_query = weights.transpose(1, 2)
            torch.testing.assert_close(by_query[real], eager.transpose(1, 2)[real], rtol=0, atol=1e-5)
            assert (by_query[~real] == 0).all()


def test_weights_come_only_when_asked_for(small_llama, cache):
    with torch.no_grad():
        assert small_llama(IDS, cache=cache).attentions is None
        with pytest.raises(
            ValueError, match="kept no attention; it must be one with output_attentions=True"
        ):
            cache.last_step()


@pytest.mark.parametrize("mask", [LEFT_PADDED, RIGHT_PADDED], ids=["left", "right"])
def test_the_heatmap_shows_the_weights_that_transformers_returns(small_llama, cache, mask):
    with torch.no_grad():
        small_llama(IDS[:, :6], attention_mask=mask[:, :6], cache=cache)
        out = small_llama(IDS[:, 6:], attention_mask=mask, cache=cache, output_attentions=True)
    heatmap = AttentionHeatmap.from_layers(**cache.last_step())
    for row, real in enumerate(mask.bool()):
        for layer in range(L):
            for head in range(4):
                shown = heatmap.weights(layer, row, head)[: real[6:].sum(), : real.sum()]
                returned = out.attentions[layer][row, head][real[6:]][:, real]
                np.testing.assert_allclose(shown, returned, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        lambda model, cache: model(IDS[:, :1], cache=cache),
        lambda model, cache: cache.crop(-1),
        lambda model, cache: cache.reorder_cache(torch.tensor([2, 1, 0])),
        lambda model, cache: cache.reset(),
    ],
    ids=["a call without weights", "crop", "reorder", "reset"],
)
def test_what_changes_the_cache_ends_the_last_step(small_llama, cache, change):
    with torch.no_grad():
        small_llama(IDS, cache=cache, output_attentions=True)
        cache.last_step()
        change(small_llama, cache)
    with pytest.raises(
        ValueError, match="kept no attention; it must be one with output_attentions=True"
    ):
        cache.last_step()


def test_layers_that_scale_differently_are_not_put_into_one_picture():
    model = build(*KINDS["GPT-2, scaled by layer"])
    cache = RaggedCache(model.config, CAPACITY)
    with torch.no_grad():
        model(IDS, cache=cache, output_attentions=True)
    with pytest.raises(ValueError, match="layers of this model scale their scores differently"):
        cache.last_step()


def test_the_example_in_the_readme_generates_and_shows_its_attention():
    model, ids = build(*KINDS["Llama, grouped"]), IDS[1:2]
    expected = stock(model, "eager").generate(ids, do_sample=False, max_new_tokens=8)

    _, example = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf8"), re.DOTALL)
    names = {"model": model, "ids": ids}
    exec(example, names)
    tokens = names["tokens"]
    heatmap = AttentionHeatmap.from_layers(**names["cache"].last_step())

    assert tokens.tolist() == expected.tolist()
    attentions = stock(model, "eager")(tokens, output_attentions=True).attentions
    for layer, weights in enumerate(attentions):
        shown = heatmap.weights(layer, head=3)[:, : T + 8]
        np.testing.assert_allclose(shown, weights[0, 3].detach(), rtol=0, atol=1e-6)


# The cache


def test_a_cache_says_what_it_holds(small_llama, cache):
    assert repr(cache) == f"RaggedCache({L} layers, capacity {CAPACITY}, lengths [])"
    assert cache.get_seq_length() == 0
    with torch.no_grad():
        small_llama(IDS, attention_mask=LEFT_PADDED, cache=cache)
    assert repr(cache) == f"RaggedCache({L} layers, capacity {CAPACITY}, lengths [5, 9, 2])"
    assert cache.get_seq_length() == T  # in columns, as transformers counts
    assert cache.get_max_length() == CAPACITY
    assert cache.layers[0].keys.shape == (len(LENGTHS), 2, CAPACITY, 4)


def test_a_mask_that_is_written_to_after_the_call_leaves_the_cache_as_it_was(small_llama, cache):
    mask = LEFT_PADDED.bool()
    with torch.no_grad():
        small_llama(IDS, attention_mask=mask, cache=cache)
    mask.fill_(True)
    assert cache.lengths.tolist() == list(LENGTHS)


def test_a_cache_that_was_reset_serves_another_batch_like_a_new_one(small_llama, cache):
    generate(small_llama, cache=cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert_same_generation(
        generate(small_llama, IDS[:2], LEFT_PADDED[:2], cache=cache),
        generate(stock(small_llama), IDS[:2], LEFT_PADDED[:2]),
    )


@pytest.mark.parametrize("kept", [0, 1, 5, T])
def test_columns_that_were_cropped_can_be_written_again(small_llama, cache, kept):
    with torch.no_grad():
        whole = small_llama(IDS, attention_mask=LEFT_PADDED, cache=cache).logits
        cache.crop(kept - T)
        assert cache.lengths.tolist() == LEFT_PADDED[:, :kept].sum(dim=1).tolist()
        if kept < T:
            again = small_llama(IDS[:, kept:], attention_mask=LEFT_PADDED, cache=cache).logits
            real = LEFT_PADDED[:, kept:].bool()
            torch.testing.assert_close(again[real], whole[:, kept:][real])


@pytest.mark.parametrize("tokens_to_remove", [1, -T - 1])
def test_a_crop_that_means_nothing_is_refused(small_llama, cache, tokens_to_remove):
    with torch.no_grad():
        small_llama(IDS, attention_mask=LEFT_PADDED, cache=cache)
    with pytest.raises(
        ValueError, match=f"tokens_to_remove was {tokens_to_remove}; it must be between -9"
    ):
        cache.crop(tokens_to_remove)
    assert cache.lengths.tolist() == list(LENGTHS)


@pytest.mark.parametrize(
    ("pick", "rows"),
    [
        (lambda cache: cache.reorder_cache(torch.tensor([2, 2, 0])), [2, 2, 0]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    ],
    ids=["reorder", "repeat", "select"],
)
def test_picked_rows_go_on_as_those_they_were(small_llama, cache, pick, rows):
    mask = torch.cat([LEFT_PADDED, torch.ones(len(LENGTHS), 2, dtype=torch.int64)], dim=1)[rows]
    new = torch.arange(1, 2 * len(rows) + 1).view(-1, 2)  # picked twice, a row still goes its own way
    with torch.no_grad():
        pick(cache)  # nothing to pick from yet
        small_llama(IDS, attention_mask=LEFT_PADDED, cache=cache)
        pick(cache)
        found = small_llama(new, attention_mask=mask, cache=cache).logits
        whole = torch.cat([IDS[rows], new], dim=1)
        expected = stock(small_llama)(whole, attention_mask=mask).logits[:, -2:]
    torch.testing.assert_close(found, expected)
    assert cache.lengths.tolist() == mask.sum(dim=1).tolist()


# Refusals


def test_a_row_that_would_not_fit_is_refused_before_anything_changes(small_llama):
    cache = RaggedCache(small_llama.config, T)
    with torch.no_grad():
        small_llama(IDS, attention_mask=LEFT_PADDED, cache=cache)
        before = [layer.keys.clone() for layer in cache.layers]
        mask = torch.cat([LEFT_PADDED, torch.ones(len(LENGTHS), 2, dtype=torch.int64)], dim=1)
        with pytest.raises(
            ValueError, match="capacity was 9; it must be 11 or more, the tokens that the longest"
        ):
            small_llama(IDS[:, :2], attention_mask=mask, cache=cache)
    assert cache.lengths.tolist() == list(LENGTHS)
    for layer, keys in zip(cache.layers, before):
        assert torch.equal(layer.keys, keys)


def test_a_cache_that_refused_its_first_batch_takes_another(small_llama):
    cache = RaggedCache(small_llama.config, T - 1)
    with torch.no_grad():
        with pytest.raises(ValueError, match="capacity was 8; it must be 9 or more"):
            small_llama(IDS, attention_mask=LEFT_PADDED, cache=cache)
        small_llama(IDS[:1], attention_mask=LEFT_PADDED[:1], cache=cache)
    assert cache.lengths.tolist() == [LENGTHS[0]]


def test_a_batch_with_more_columns_than_the_capacity_fits_if_its_rows_do(small_llama):
    cache = RaggedCache(small_llama.config, 6)
    rows = [0, 2]
    with torch.no_grad():
        out = small_llama(
            IDS[rows], attention_mask=LEFT_PADDED[rows], cache=cache, output_attentions=True
        )
        expected = stock(small_llama)(IDS[rows], attention_mask=LEFT_PADDED[rows]).logits
    torch.testing.assert_close(out.logits[:, -1], expected[:, -1])
    assert out.attentions[0].shape == (2, 4, T, T)


@pytest.mark.parametrize(
    ("capacity", "error", "message"),
    [
        (0, ValueError, "capacity was 0; it must be 1 or more"),
        (2.5, TypeError, "capacity was 2.5; it must be a whole number"),
    ],
)
def test_a_capacity_that_is_none_is_refused(small_llama, capacity, error, message):
    with pytest.raises(error, match=message):
        RaggedCache(small_llama.config, capacity)


def test_a_window_shorter_than_the_capacity_is_refused():
    config = MistralConfig(**SIZES, sliding_window=7)
    RaggedCache(config, 7)
    with pytest.raises(
        ValueError, match="layer 0 a layer of 'sliding_attention' with a window of 7, less than"
    ):
        RaggedCache(config, 8)


def test_a_window_as_long_as_the_rows_hides_nothing():
    rows, longest = [0, 2], LENGTHS[0] + N_NEW - 1
    window = {"num_key_value_heads": 2, "sliding_window": longest}
    model = build(MistralForCausalLM, MistralConfig, window)
    cache = RaggedCache(model.config, longest)
    found = generate(model, IDS[rows], LEFT_PADDED[rows], cache=cache)
    assert_same_generation(found, generate(stock(model), IDS[rows], LEFT_PADDED[rows]))
    assert cache.get_seq_length() > longest == cache.lengths.max()


def test_a_layer_that_keeps_something_else_is_refused():
    config = LlamaConfig(**SIZES, layer_types=["full_attention", "linear_attention", "full_attention"])
    with pytest.raises(
        ValueError, match="layer 1 a layer of 'linear_attention'; every layer must attend"
    ):
        RaggedCache(config, 8)


def test_a_window_that_hides_part_of_the_input_is_refused_without_a_cache_too():
    model = build(MistralForCausalLM, MistralConfig, {"num_key_value_heads": 2, "sliding_window": 4})
    with torch.no_grad():
        model(IDS[:, :4], use_cache=False)
        with pytest.raises(
            ValueError, match="the token in column 4 of row 0 may not attend that in column 0"
        ):
            model(IDS[:, :5], use_cache=False)


def test_packed_sequences_are_refused(small_llama):
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]).expand(len(LENGTHS), -1)
    with pytest.raises(ValueError, match="column 4 of row 0 may not attend that in column 0; .*packed"):
        small_llama(IDS, position_ids=positions, use_cache=False)
    with pytest.raises(ValueError, match="cu_seq_lens_q was given to the attention; it must be None"):
        small_llama(IDS, use_cache=False, cu_seq_lens_q=torch.tensor([0, 4, 9]))


def test_attention_both_ways_is_refused(small_llama):
    with pytest.raises(ValueError, match="the token in column 0 of row 0 may attend that in column 1"):
        small_llama(IDS, use_cache=False, is_causal=False)


@pytest.mark.parametrize(("first_seen", "refused"), [(0, False), (1, True)])
def test_what_a_model_adds_to_its_mask_is_looked_at_cell_by_cell(small_llama, first_seen, refused):
    def seen(row, head, query, column):
        return torch.stack([column, query]).min() >= first_seen  # of one cell: no broadcasting

    def columns():
        embeds = torch.zeros(1, 3, 16)
        return create_causal_mask(small_llama.config, embeds, None, None, and_mask_function=seen)

    if refused:
        with pytest.raises(
            ValueError, match="the token in column 0 of row 0 may not attend that in column 0"
        ):
            columns()
    else:
        assert columns().real.all()


def test_capped_scores_are_refused():
    model = build(Gemma2ForCausalLM, Gemma2Config, {"num_key_value_heads": 2, "head_dim": 4})
    with pytest.raises(
        ValueError, match="softcap was given to the attention; it must be None: scores are not"
    ):
        model(IDS, use_cache=False)


def test_attention_sinks_are_refused():
    model = build(GptOssForCausalLM, GptOssConfig, {"num_key_value_heads": 2, "num_local_experts": 2})
    with pytest.raises(
        ValueError, match="s_aux was given to the attention; it must be None: there are no"
    ):
        model(IDS, use_cache=False)


def test_cross_attention_is_refused():
    model = build(GPT2LMHeadModel, GPT2Config, {"add_cross_attention": True})
    source = torch.zeros(len(LENGTHS), T, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match="cross attention"):
        model(IDS, encoder_hidden_states=source, use_cache=False)
    with pytest.raises(ValueError, match="cross attention"):
        model(IDS, encoder_hidden_states=source[:, :5], use_cache=False)


def test_dropout_is_refused():
    model = build(LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 2, "attention_dropout": 0.25})
    model(IDS, use_cache=False)
    with pytest.raises(ValueError, match="dropout was 0.25; it must be 0"):
        model.train()(IDS, use_cache=False)


@pytest.mark.parametrize(
    "make", [lambda config: DynamicCache(config=config), lambda config: StaticCache(config, CAPACITY)]
)
def test_a_cache_of_transformers_itself_is_refused(small_llama, make):
    cache = make(small_llama.config)
    with torch.no_grad(), pytest.raises(ValueError, match="RaggedCache"):
        small_llama(IDS[:, :4], cache=cache)
        small_llama(IDS[:, 4:], cache=cache)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", KINDS)
def test_another_attention_on_this_cache_is_refused(kind, implementation):
    model = stock(build(*KINDS[kind]), implementation)
    with (
        torch.no_grad(),
        pytest.raises(AttributeError, match=r"call model.set_attn_implementation\('kvlib'\)"),
    ):
        model(IDS, cache=RaggedCache(model.config, CAPACITY))


def test_a_mask_that_forgets_the_padding_of_the_past_is_refused(small_llama, cache):
    with torch.no_grad():
        small_llama(IDS, attention_mask=LEFT_PADDED, cache=cache)
        with pytest.raises(
            ValueError, match=r"attention_mask showed \[9, 9, 9\] tokens .* the \[5, 9, 2\] that"
        ):
            small_llama(IDS[:, :1], cache=cache)
        moved = torch.cat([RIGHT_PADDED, torch.ones(len(LENGTHS), 1, dtype=torch.int64)], dim=1)
        with pytest.raises(ValueError, match="it must show the .* in their columns"):
            small_llama(IDS[:, :1], attention_mask=moved, cache=cache)


def test_a_mask_that_does_not_reach_the_new_tokens_is_refused(small_llama, cache):
    with torch.no_grad():
        small_llama(IDS, attention_mask=LEFT_PADDED, cache=cache)
        with pytest.raises(
            ValueError, match="attention_mask had 9 columns; it must have 10, 9 of the past and 1"
        ):
            small_llama(IDS[:, :1], attention_mask=LEFT_PADDED, cache=cache)


def test_a_mask_of_pairs_is_refused(small_llama):
    mask = torch.ones(len(LENGTHS), 1, T, T, dtype=torch.bool)
    with pytest.raises(
        TypeError, match=r"mask was of shape \(3, 1, 9, 9\); attention_mask must be of shape \(B, T\)"
    ):
        small_llama(IDS, attention_mask=mask, use_cache=False)


def test_a_batch_of_another_size_than_that_in_the_cache_is_refused(small_llama, cache):
    with torch.no_grad():
        small_llama(IDS, cache=cache)
        with pytest.raises(
            ValueError, match="the batch had 2 rows; it must have 3, those that the cache holds"
        ):
            small_llama(IDS[:2], cache=cache)


def test_without_the_libraries_the_error_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, transformers_attention.__name__)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs transformers.*pip install 'kvlib\[transformers\]'"):
        __import__(transformers_attention.__name__)


# A real model


RECORDED = json.loads(
    Path(__file__).parents[1].joinpath("data", "smollm2.json").read_text(encoding="utf-8")
)


def as_transformers_llama(ours):
    """Return a model of `kvlib.llama` as one of transformers, on this kernel."""
    config = ours.config
    weights = {"model.embed_tokens.weight": ours.embedding, "model.norm.weight": ours.output_norm}
    for index, layer in enumerate(ours.layers):
        weights |= {
            f"model.layers.{index}.{name}.weight": weight
            for name, weight in {
                "input_layernorm": layer.attn_norm,
                "self_attn.q_proj": halves(layer.attn_q, config.n_heads),
                "self_attn.k_proj": halves(layer.attn_k, config.n_kv_heads),
                "self_attn.v_proj": layer.attn_v,
                "self_attn.o_proj": layer.attn_output,
                "post_attention_layernorm": layer.ffn_norm,
                "mlp.gate_proj": layer.ffn_gate,
                "mlp.up_proj": layer.ffn_up,
                "mlp.down_proj": layer.ffn_down,
            }.items()
        }
    return LlamaForCausalLM.from_pretrained(
        None,
        config=LlamaConfig(
            vocab_size=config.n_vocab,
            hidden_size=config.width,
            intermediate_size=config.hidden_width,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_positions,
            rms_norm_eps=config.norm_epsilon,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_base},
            tie_word_embeddings=True,
            bos_token_id=None,
            pad_token_id=0,
            eos_token_id=list(ours.stop_tokens),
        ),
        state_dict=weights,
        attn_implementation="kvlib",
    )


def halves(weight, n_heads):
    """Put the rows of each head that make pairs half a head apart: transformers rotates those."""
    return weight.unflatten(0, (n_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def test_a_real_model_generates_what_was_recorded_of_it():
    model = as_transformers_llama(llama.load(progress=False))
    cases = RECORDED["prompts"][:3]  # of 5, 35 and 43 tokens; the last ends at a stop token
    prompts = [torch.tensor(case["ids"]) for case in cases]
    ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_side="left")
    ones = [torch.ones_like(prompt) for prompt in prompts]
    mask = torch.nn.utils.rnn.pad_sequence(ones, batch_first=True, padding_side="left")
    n_new = RECORDED["max_new_tokens"]
    found = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=n_new,
        do_sample=False,
        prefill_chunk_size=32,
        cache=RaggedCache(model.config, ids.shape[1] + n_new),
    )
    for tokens, case in zip(found[:, ids.shape[1] :].tolist(), cases, strict=True):
        assert tokens[: len(case["tokens"])] == case["tokens"], case["name"]
