"""The attention heatmap's arguments, its weights, and what it shows without JavaScript."""

import json
import re

import numpy as np
import pytest
import torch

from kvlib import KVCache, decode_step, kv_cache_attention_step, kv_cache_step, visibility
from kvlib.widgets import AttentionHeatmap

GOOD = {"scores": np.zeros((2, 3, 8)), "lengths": [3], "counts": [3]}


def json_in(html):
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', html)[1])


@pytest.mark.parametrize(
    "wrong, error, message",
    [
        (
            {"scores": np.zeros(3)},
            ValueError,
            r"scores has shape \(3,\); it must be \(L, B, H_q, Q, M\), or end so",
        ),
        ({"scores": np.zeros((0, 3, 8))}, ValueError, "only Q, the next to last size, may be 0"),
        (
            {"scores": np.zeros((2, 2, 3, 8))},
            ValueError,
            "lengths has 1 rows; it must have as many as scores, 2",
        ),
        (
            {"scores": np.full((3, 8), np.nan)},
            ValueError,
            "scores holds nan where a query attends; it must be finite",
        ),
        ({"scores": np.full((3, 8), 2e38)}, ValueError, r"scores holds 2e\+38 where a query attends"),
        ({"lengths": [6]}, ValueError, r"lengths \+ counts was \[9\]; no row can hold more"),
        ({"counts": [4]}, ValueError, r"counts was \[4\]; no row can append more"),
        ({"n_kv_heads": 3}, ValueError, "n_kv_heads was 3; it must divide the 2 query heads"),
        ({"n_kv_heads": 0}, ValueError, "n_kv_heads was 0; it must divide"),
        ({"n_kv_heads": 1.0}, TypeError, "n_kv_heads was 1.0; it must be a whole number"),
        (
            {"tokens": [["a"] * 5]},
            ValueError,
            r"tokens\[0\] has 5 labels; it must have 6 for the live slots",
        ),
        ({"tokens": [["a"] * 9]}, ValueError, r"tokens\[0\] has 9 labels; .* at most 8"),
        (
            {"tokens": [["a"] * 6, []]},
            ValueError,
            "tokens has 2 rows; it must have as many as lengths, 1",
        ),
        ({"tokens": [["a"] * 5 + [7]]}, TypeError, r"tokens\[0\]\[5\] was 7; it must be a string"),
        ({"layer": 1}, ValueError, "layer was 1; it must be less than 1"),
        ({"row": -1}, ValueError, "row was -1; it must be 0 or more"),
        ({"head": 2}, ValueError, "head was 2; it must be less than 2"),
        ({"selected": (3, 0)}, ValueError, "selected query was 3; it must be less than 3"),
        ({"selected": (0, 8)}, ValueError, "selected slot was 8; it must be less than 8"),
        ({"selected": 1}, TypeError, r"selected was 1; it must be \(query, slot\)"),
        ({"title": None}, TypeError, "title was None; it must be a string"),
    ],
)
def test_a_wrong_argument_is_named_with_what_it_was_and_must_be(wrong, error, message):
    with pytest.raises(error, match=message):
        AttentionHeatmap(**{**GOOD, **wrong})


def test_what_masked_cells_hold_is_never_shipped():
    random = np.random.default_rng(0)
    scores = random.normal(size=(2, 2, 2, 3, 6))
    masked = ~visibility.mask([1, 4], [3, 1], 3, 6)[None, :, None]
    clean = AttentionHeatmap(scores, [1, 4], [3, 1])
    for junk in (np.nan, np.inf, 1e300):
        assert AttentionHeatmap(np.where(masked, junk, scores), [1, 4], [3, 1]).state() == clean.state()


def test_weights_are_a_softmax_over_what_a_query_attends_however_large_the_scores():
    heatmap = AttentionHeatmap([[5000.0, 5001.0, 0.0], [1e37, -1e37, 1e37]], [1], [2])
    odds = np.exp(1)
    np.testing.assert_allclose(
        heatmap.weights(), [[1 / (1 + odds), odds / (1 + odds), 0], [0.5, 0, 0.5]], atol=1e-7
    )


def test_it_shows_what_the_numpy_cache_computes():
    random = np.random.default_rng(0)
    cache, rows = KVCache(6, 3, 2), []
    queries = random.normal(size=(4, 3))
    for q in queries:
        cache.append(random.normal(size=3), random.normal(size=2))
        rows.append(np.pad(decode_step(q, cache)[1], (0, 6 - len(cache))))
        newest = AttentionHeatmap.from_decode_step(q, cache)
        np.testing.assert_allclose(newest.weights(), rows[-1:], atol=1e-7)
        assert newest.data["lengths"] == [len(cache) - 1] and newest.data["counts"] == [1]
    np.testing.assert_allclose(
        AttentionHeatmap.from_decode_step(queries[1:], cache).weights(), rows[1:], atol=1e-7
    )


def test_it_shows_what_the_tuple_cache_computes():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 5)
    cache, outputs = None, []
    for step in range(4):
        now = slice(step, step + 1)
        output, cache = kv_cache_step(q[:, now], k[:, now], v[:, now], cache)
        outputs.append(output)
    heatmap = AttentionHeatmap.from_tuple_step(q, cache)
    for row in range(2):
        shown = heatmap.weights(row=row) @ cache[1][row].numpy()
        np.testing.assert_allclose(shown, torch.cat(outputs, 1)[row], atol=1e-5)
    last = AttentionHeatmap.from_tuple_step(q[:, 3:], cache)
    np.testing.assert_allclose(last.weights(row=1), heatmap.weights(row=1)[3:], atol=1e-7)


def call(dtype=torch.float32, **options):
    """Return the arguments and the result of a ragged, grouped call; its tail is junk."""
    torch.manual_seed(0)
    query, new_key, new_value = torch.randn(2, 4, 3, 5), torch.randn(2, 2, 3, 5), torch.randn(2, 2, 3, 5)
    caches = torch.randn(2, 2, 2, 8, 5)
    lengths, append_mask = torch.tensor([3, 5]), torch.tensor([[True] * 3, [True, False, False]])
    caches[:, 0, :, 6:], caches[:, 1, :, 6:] = torch.nan, torch.inf
    query[1, :, 1:] = torch.inf
    tensors = [tensor.to(dtype) for tensor in (query, new_key, new_value, *caches)]
    result = kv_cache_attention_step(*tensors, lengths, append_mask, options)
    return tensors[0], result, lengths, append_mask, options


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_it_shows_what_the_batched_cache_computes(dtype):
    arguments = call(dtype, scale=0.7)
    heatmap = AttentionHeatmap.from_batched_step(*arguments)
    shown = [[heatmap.weights(0, row, head) for head in range(4)] for row in range(2)]
    tolerance = max(1e-6, float(torch.finfo(dtype).eps))
    np.testing.assert_allclose(shown, arguments[1]["attention"].double(), atol=tolerance)
    assert heatmap.data["n_kv_heads"] == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_picture_that_differs_from_the_result_is_refused(dtype):
    query, result, lengths, append_mask, _ = call(dtype)
    refused = "the weights of layer 0 differ from the attention that the call returned"
    with pytest.raises(ValueError, match=refused):
        AttentionHeatmap.from_batched_step(query, result, lengths, append_mask, {"scale": 0.9})
    with pytest.raises(ValueError, match=refused):
        AttentionHeatmap.from_batched_step(query.flip(1), result, lengths, append_mask)
    wrong = {**result, "attention": result["attention"] * torch.nan}
    with pytest.raises(ValueError, match=refused):
        AttentionHeatmap.from_batched_step(query, wrong, lengths, append_mask)


def test_lengths_after_the_call_are_refused_where_those_before_are_due():
    query, result, _, append_mask, _ = call()
    with pytest.raises(
        ValueError,
        match=r"give \[9, 7\] live slots .* the result has \[6, 6\]; lengths must be those before",
    ):
        AttentionHeatmap.from_batched_step(query, result, result["lengths"], append_mask)


def test_lengths_that_are_not_whole_numbers_are_refused():
    query, result, _, append_mask, _ = call()
    with pytest.raises(TypeError, match=r"lengths\[0\] was 3.5; it must be a whole number"):
        AttentionHeatmap.from_layers([query], [result["key_cache"]], [3.5, 5], append_mask)


def test_an_append_mask_of_another_call_is_refused():
    query, result, lengths, append_mask, _ = call()
    with pytest.raises(ValueError, match=r"append_mask has shape \(2, 2\) and query \(2, 4, 3, 5\)"):
        AttentionHeatmap.from_batched_step(query, result, lengths, append_mask[:, :2])


def test_weights_of_a_picture_that_is_not_there_are_refused():
    with pytest.raises(ValueError, match="head was 1; it must be less than 1"):
        AttentionHeatmap([[0.0]], [0], [1]).weights(head=1)


def test_an_append_mask_with_a_hole_is_refused():
    query, result, lengths, _, _ = call()
    holes = torch.tensor([[True] * 3, [False, True, False]])
    with pytest.raises(ValueError, match="append_mask has a True after a False"):
        AttentionHeatmap.from_batched_step(query, result, lengths, holes)


def test_layers_are_shown_each_with_its_own_keys():
    (query, one, lengths, append_mask, _), (_, two, *_) = call(), call(scale=0.1)
    other = query * 0.1 * 5**0.5
    heatmap = AttentionHeatmap.from_layers(
        [query, other], [one["key_cache"], two["key_cache"]], lengths, append_mask,
        attention=[one["attention"], two["attention"]], tokens=[["t"] * 6, ["t"] * 6], layer=1,
    )  # fmt: skip
    for layer, result in enumerate((one, two)):
        np.testing.assert_allclose(heatmap.weights(layer, 1, 3), result["attention"][1, 3], atol=1e-6)
    with pytest.raises(ValueError, match="layer 1 differ"):
        AttentionHeatmap.from_layers(
            [query, query],
            [one["key_cache"]] * 2,
            lengths,
            append_mask,
            attention=[one["attention"], two["attention"]],
        )


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: AttentionHeatmap.from_decode_step(np.zeros(4), full(3)),
            r"q has shape \(4,\); it must be \(3,\)",
        ),
        (
            lambda: AttentionHeatmap.from_decode_step(np.zeros((5, 3)), full(3)),
            "q holds 5 queries for 2 steps",
        ),
        (
            lambda: AttentionHeatmap.from_decode_step(np.zeros(3), KVCache(4, 3, 3)),
            "q holds 1 queries for 0 steps",
        ),
        (
            lambda: AttentionHeatmap.from_tuple_step(np.zeros((1, 1, 3)), (np.zeros((2, 4, 3)),) * 2),
            r"q_new has shape \(1, 1, 3\) and the cached keys \(2, 4, 3\)",
        ),
        (
            lambda: AttentionHeatmap.from_layers(
                [np.zeros((1, 3, 1, 2))], [np.zeros((1, 2, 4, 2))], [0], [[True]]
            ),
            "query has 3 heads; it must have a multiple of the 2 heads of key_cache",
        ),
        (
            lambda: AttentionHeatmap.from_layers(
                [np.zeros((1, 2, 1, 2))], [np.zeros((2, 4, 2))], [0], [[True]]
            ),
            r"query has shape \(1, 2, 1, 2\) and key_cache \(2, 4, 2\)",
        ),
    ],
)
def test_arrays_that_do_not_fit_a_cache_are_named_with_their_shapes(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def full(size):
    cache = KVCache(4, size, size)
    cache.append(np.ones((2, size)), np.ones((2, size)))
    return cache


def test_a_real_model_takes_a_quarter_of_a_megabyte_at_most():
    scores = np.random.default_rng(0).normal(size=(30, 1, 9, 16, 16))
    assert len(AttentionHeatmap(scores, [0], [16], n_kv_heads=3).html()) < 250_000


def test_markup_in_tokens_and_title_is_text():
    tokens = [["</script>", "<i>a</i>", '"quoted"', "<!--"]]
    html = AttentionHeatmap(
        np.zeros((1, 4)), [3], [1], tokens=tokens, title="<b>t</b>", selected=(0, 1)
    ).html()
    state = json_in(html)
    assert state["data"]["tokens"] == tokens and state["title"] == "<b>t</b>"
    assert (
        html.count("</script>") == 1 and "<i>a" not in html and "<b>t" not in html and "<!--" not in html
    )


def test_the_fallback_shows_the_weights_and_the_sentence_of_the_selected_cell():
    scores = np.log([[[0.25, 0.75, 1.0]], [[1.0, 1.0, 1.0]]])
    html = AttentionHeatmap(scores, [1], [1], n_kv_heads=1, tokens=[["a", "b"]], selected=(0, 1)).html()
    assert re.findall(r'<td class="kv-cell kv-(\w+)"[^>]*>([^<]*)', html) == [
        ("weight", ".25"), ("weight", ".75"), ("unused", "·")
    ]  # fmt: skip
    assert (
        "<b>Head 0 of KV head 0, query 0 “b”, key in slot 1 “b”: weight 0.7500, score -0.288.</b>"
        in html
    )
    assert visibility.sentence(1, 0, 1, 1) in html and "The weights of a query sum to 1" in html


def test_the_fallback_of_a_call_without_queries_says_so():
    assert "This call offers no slots" in AttentionHeatmap(np.zeros((0, 3)), [2], [0]).html()


def test_tensors_that_need_gradients_are_welcome():
    scores = torch.zeros(2, 3, requires_grad=True)
    assert AttentionHeatmap(scores, [1], [2]).weights()[1, 2] == pytest.approx(1 / 3)


def test_its_repr_says_what_it_shows():
    assert repr(AttentionHeatmap(np.zeros((2, 3, 8)), [3], [3], n_kv_heads=1)) == (
        "<Attention heatmap: 1 layer, 1 row, 2 heads on 1 KV head, 3 queries, 8 slots>"
    )
