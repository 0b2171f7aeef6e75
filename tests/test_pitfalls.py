"""Faults that caches are known for, each as a case small enough to check by hand.

| id  | the fault                                                    | what must happen here           |
|-----|--------------------------------------------------------------|---------------------------------|
| A01 | the causal mask hides the cached past                        | past and chunk are both seen    |
| A02 | a prefill looks into its future and stores what it saw       | equals one token at a time      |
| A03 | a token is not yet counted when it attends                   | it sees itself                  |
| A04 | the first token counts, but slot 0 is never written          | slot 0 holds it                 |
| A05 | unused slots of zeros take part in the softmax               | weights over live slots only    |
| A06 | zero weight times NaN in an unused slot is NaN               | same bits as with zeros         |
| A07 | a row that sees nothing gives NaN, or the mean of the values | zeros                           |
| A08 | calls and prompts without tokens fail                        | empty results; decoding goes on |
| A09 | heads are tiled where they should be repeated                | neighbours share a head         |
| A10 | head counts that do not divide are broadcast                 | an error naming both counts     |
| A11 | a write past the end crashes, wraps or corrupts              | an error, nothing written       |
| A12 | what was handed out changes the cache, or changes with it    | neither                         |
| A13 | a reset keeps the old length                                 | no reset: take a new cache      |
| A14 | the length is guessed from numbers that are not zero         | zeros count                     |
| A15 | a rollback keeps too much or too little                      | none: lower the lengths         |
| A16 | the length before the call is taken for the length after it  | a count, before the call        |
| A17 | rows share positions, or positions advance twice             | lengths are the positions       |
| A18 | a write meant for some rows lands in others                  | the others keep every bit       |
| A19 | a row changes with its neighbour                             | it keeps every bit              |
| A20 | True and False of the mask are swapped                       | True means may attend           |
| A21 | a dot product overflows in half precision                    | computed in float32             |
| A22 | the dtype of the cache is silently another                   | an error naming both            |
| A23 | one finished row stops all, or goes on writing               | it idles, the others go on      |
| A24 | a chunk keeps its last query only, or its mask is ignored    | all queries, and a mask counts  |
| A25 | beams are not reordered, or share their storage              | index the tensors               |
"""

import math
import types

import numpy as np
import pytest
import torch
from cases import FLOATS, assert_same_bits, assert_unchanged, batch, snapshot

from kvlib import KVCache, decode_step, kv_cache_attention_step, kv_cache_step, visibility

CACHE = ("key_cache", "value_cache", "lengths")


def one_head(lengths, counts, n_queries, capacity, **changes):
    """Return a batch with one head, D = D_v = 1 and queries of zero, so that all weights are equal."""
    args = batch(lengths, counts, n_queries, capacity, H_q=1, H_k=1, D=1, D_v=1)
    args["query"].zero_()
    for name, numbers in changes.items():
        args[name] = torch.tensor(numbers, dtype=torch.float64).reshape(args[name].shape)
    return args


def step(args, **changes):
    return kv_cache_attention_step(**args | changes)


def fresh(capacity, B=1, H=2, D=3):
    """Return the arguments of an empty cache for `B` rows."""
    return {
        "key_cache": torch.zeros(B, H, capacity, D, dtype=torch.float64),
        "value_cache": torch.zeros(B, H, capacity, D, dtype=torch.float64),
        "lengths": torch.zeros(B, dtype=torch.int64),
        "options": {},
    }


def test_a01_two_new_queries_see_the_cached_past_and_their_own_chunk():
    args = one_head([3], [2], 2, 5, value_cache=[0, 1, 2, 0, 0], new_value=[3, 4])
    assert step(args)["context"].flatten().tolist() == pytest.approx([1.5, 2.0], rel=1e-15)


def test_a02_a_prefill_in_one_call_equals_one_token_at_a_time_through_two_layers():
    x = torch.randn(1, 2, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def run(chunks):
        layers, outputs = [fresh(4), fresh(4)], []
        for start, end in chunks:
            hidden = x[:, :, start:end]
            appended = torch.ones(1, end - start, dtype=torch.bool)
            for layer in layers:
                inputs = {"query": hidden, "new_key": hidden.roll(1, -1), "new_value": hidden.flip(-1)}
                result = kv_cache_attention_step(**inputs, append_mask=appended, **layer)
                layer |= {name: result[name] for name in CACHE}
                hidden = result["context"]
                outputs.append(hidden)
        return layers, outputs

    whole_layers, whole = run([(0, 4)])
    steps_layers, steps = run([(0, 1), (1, 2), (2, 3), (3, 4)])
    for layer in (0, 1):
        torch.testing.assert_close(torch.cat(steps[layer::2], dim=2), whole[layer])
        torch.testing.assert_close(steps_layers[layer]["key_cache"], whole_layers[layer]["key_cache"])
    assert_same_bits(whole[0][:, :, 0], x.flip(-1)[:, :, 0])


def test_a03_a_token_sees_itself_in_all_three_caches():
    cache = KVCache(4, 1, 1)
    cache.append([7.0], [9.0])
    assert decode_step([1.0], cache)[0].tolist() == [9.0]
    one = torch.ones(1, 1, 1)
    assert kv_cache_step(one, one * 7, one * 9, None)[0].item() == 9
    args = one_head([0], [1], 1, 4, new_key=[7], new_value=[9])
    result = step(args)
    assert result["context"].item() == 9
    assert result["attention"].flatten().tolist() == [1, 0, 0, 0]


def test_a04_the_first_token_is_written_to_slot_0():
    cache = KVCache(4, 1, 1)
    cache.append([7.0], [9.0])
    assert (cache.keys()[0, 0], cache.values()[0, 0], len(cache)) == (7, 9, 1)
    keys, values = kv_cache_step(*(torch.full((1, 1, 1), number) for number in (1.0, 7.0, 9.0)), None)[1]
    assert (keys[0, 0].item(), values[0, 0].item(), keys.shape[1]) == (7, 9, 1)
    result = step(one_head([0], [1], 1, 4, new_key=[7], new_value=[9]))
    assert result["key_cache"][0, 0, 0].item() == 7
    assert result["value_cache"][0, 0, 0].item() == 9
    assert result["lengths"].item() == 1


def test_a05_unused_slots_take_no_part_in_the_softmax():
    cache = KVCache(8, 1, 1)
    cache.append([[0.0], [0.0]], [[1.0], [3.0]])
    assert decode_step([0.0], cache)[1].tolist() == [0.5, 0.5]
    args = one_head(
        [1], [1], 1, 8, key_cache=[0] * 8, value_cache=[1] + [0] * 7, new_key=[0], new_value=[3]
    )
    result = step(args)
    assert result["attention"].flatten().tolist() == [0.5, 0.5] + [0] * 6
    assert result["context"].item() == 2


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["key_cache", "value_cache"])
def test_a06_unused_slots_that_hold_nan_or_infinity_change_no_bit(name, poison):
    args = one_head([2], [1], 1, 5, value_cache=[1, 2, 0, 0, 0], key_cache=[1, 2, 0, 0, 0])
    spoiled = args[name].clone()
    spoiled[:, :, 3:] = poison
    result, expected = step(args, **{name: spoiled}), step(args)
    assert_same_bits(result["attention"], expected["attention"])
    assert_same_bits(result["context"], expected["context"])
    assert_same_bits(result[name][:, :, 3:], spoiled[:, :, 3:])


def test_a07_a_row_that_sees_nothing_gives_zeros():
    values = [[1, 3, 0], [1, 3, 0]]
    result = step(one_head([0, 2], [0, 1], 1, 3, value_cache=values, new_value=[[9], [5]]))
    assert result["context"].flatten().tolist() == pytest.approx([0, 3], rel=1e-15)
    assert result["attention"][0].eq(0).all()


def test_a08_a_call_without_tokens_and_an_empty_prompt_work():
    args = batch([0, 2], [0, 0], 0, 4)
    result = step(args)
    assert result["context"].shape == (2, 4, 0, 2)
    assert result["lengths"].tolist() == [0, 2]

    args = batch([0, 0], [0, 2], 2, 4)  # row 0 has an empty prompt
    prompt = step(args)
    assert prompt["lengths"].tolist() == [0, 2]
    token = {name: args[name][:, :, :1] for name in FLOATS[:3]} | {
        "append_mask": torch.ones(2, 1).bool()
    }
    after = step(args | token, **{name: prompt[name] for name in CACHE})
    assert after["lengths"].tolist() == [1, 3]
    assert_same_bits(after["context"][0, :, 0], args["new_value"][0, [0, 0, 1, 1], 0])
    cache = KVCache(4, 1, 1)
    cache.append(np.zeros((0, 1)), np.zeros((0, 1)))
    cache.append([1.0], [2.0])
    assert decode_step([1.0], cache)[0].tolist() == [2.0]


def test_a09_neighbouring_query_heads_share_a_head():
    args = batch([0], [1], 1, 1, H_q=4, H_k=2, D=1, D_v=1)
    args["new_value"] = torch.tensor([10.0, 20.0], dtype=torch.float64).view(1, 2, 1, 1)
    assert step(args)["context"].flatten().tolist() == [10, 10, 20, 20]


def test_a10_head_counts_that_do_not_divide_are_refused_and_the_others_work():
    with pytest.raises(ValueError, match="H_q = 3 heads.*H_k = 2 heads"):
        step(batch([0], [1], 1, 1, H_q=3, H_k=2))
    for H_k in (1, 3):
        args = batch([0], [1], 1, 1, H_q=3, H_k=H_k)
        assert_same_bits(step(args)["context"], args["new_value"].repeat_interleave(3 // H_k, dim=1))


def test_a11_writing_past_the_end_is_refused_before_any_write():
    args = batch([3], [2], 2, 4)
    before = snapshot(args)
    with pytest.raises(
        ValueError, match=r"2 slots to lengths\[0\] = 3, 5 in all; they must fit in M = 4"
    ):
        step(args)
    assert_unchanged(args, before)
    cache = KVCache(4, 1, 1)
    cache.append(np.ones((3, 1)), np.ones((3, 1)))
    with pytest.raises(
        ValueError, match="add 2 steps to the 3 stored, 5 in all; they must fit in max_len, 4"
    ):
        cache.append(np.full((2, 1), 9.0), np.full((2, 1), 9.0))
    assert cache.keys().tolist() == cache.values().tolist() == [[1], [1], [1]]


def test_a12_what_was_handed_out_neither_changes_the_cache_nor_changes_with_it():
    cache = KVCache(4, 1, 1)
    cache.append([[1.0], [2.0]], [[3.0], [4.0]])
    kept, edited = cache.keys(), cache.keys()
    try:
        edited[:] = 99
    except ValueError:
        pass  # refusing to be edited is as good as being a copy
    cache.append([5.0], [6.0])
    assert kept.tolist() == [[1], [2]]
    assert cache.keys().tolist() == [[1], [2], [5]]

    args = batch([1], [1], 1, 4)
    result = step(args)
    kept = result["key_cache"].clone()
    step(args, **{name: result[name] for name in CACHE})
    assert_same_bits(result["key_cache"], kept)


def test_a13_there_is_no_reset_and_a_new_cache_or_a_length_of_zero_starts_afresh():
    assert not hasattr(KVCache, "reset")
    args = batch([0], [1], 1, 4)
    used = step(args, key_cache=torch.full_like(args["key_cache"], 5), lengths=torch.tensor([3]))
    again = step(args, key_cache=used["key_cache"], value_cache=used["value_cache"])
    expected = step(args)
    assert again["lengths"].tolist() == [1]
    assert_same_bits(again["key_cache"][:, :, 0], args["new_key"][:, :, 0])
    assert_same_bits(again["context"], expected["context"])


def test_a14_a_key_of_zeros_counts_as_a_step():
    cache = KVCache(4, 1, 1)
    cache.append([0.0], [0.0])
    cache.append([1.0], [1.0])
    assert cache.keys().tolist() == [[0], [1]]
    args = one_head([0], [1], 1, 4, key_cache=[0] * 4, value_cache=[0] * 4, new_key=[0], new_value=[0])
    first = step(args)
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    second = step(args, new_key=one, new_value=one, **{name: first[name] for name in CACHE})
    assert second["lengths"].tolist() == [2]
    assert second["key_cache"].flatten().tolist() == [0, 1, 0, 0]


def test_a15_there_is_no_rollback_and_lower_lengths_forget_the_last_tokens():
    allowed = {"append", "keys", "values", "max_len", "d_k", "d_v"}
    assert {name for name in vars(KVCache) if not name.startswith("_")} == allowed
    args = batch([3], [1], 1, 4)
    for keep in (0, 1, 3):
        shortened = step(args, lengths=torch.tensor([keep]))
        never_there = {name: args[name].clone() for name in ("key_cache", "value_cache")}
        for tensor in never_there.values():
            tensor[:, :, keep:] = 0
        expected = step(args, lengths=torch.tensor([keep]), **never_there)
        assert shortened["lengths"].tolist() == [keep + 1]
        assert_same_bits(shortened["context"], expected["context"])
    with pytest.raises(ValueError, match=r"lengths\[0\] was -2; it must be between 0 and M = 4"):
        step(args, lengths=torch.tensor([3 - 5]))


def test_a16_lengths_count_the_slots_before_the_call():
    args = one_head([0], [4], 4, 6)
    prefill = step(args)
    assert (prefill["attention"] > 0).sum(dim=-1).flatten().tolist() == [1, 2, 3, 4]
    assert prefill["lengths"].tolist() == [4]
    token = one_head([4], [1], 1, 6) | {name: prefill[name] for name in CACHE}
    assert (step(token)["attention"] > 0).sum().item() == 5
    for words in (kv_cache_attention_step.__doc__, visibility.may_attend.__doc__):
        assert "a count, not a last index" in " ".join(words.split())


def test_a17_each_row_has_its_own_positions_and_they_advance_by_one():
    args = one_head([0, 0], [2, 4], 4, 6, key_cache=[[-1] * 6] * 2, new_key=[[0, 1, 2, 3]] * 2)
    state = {name: value for name, value in step(args).items() if name in CACHE}
    assert state["lengths"].tolist() == [2, 4]
    for _ in range(2):
        positions = state["lengths"]
        token = one_head([0, 0], [1, 1], 1, 6, new_key=positions.tolist()) | state
        state = {name: value for name, value in step(token).items() if name in CACHE}
    assert state["key_cache"].view(2, 6).tolist() == [[0, 1, 2, 3, -1, -1], [0, 1, 2, 3, 4, 5]]
    assert state["lengths"].tolist() == [4, 6]


def test_a18_a_write_meant_for_some_rows_leaves_every_bit_of_the_others():
    args = batch([0, 1, 2, 3], [0, 1, 0, 1], 1, 4)
    result = step(args)
    assert result["lengths"].tolist() == [0, 2, 2, 4]
    for name, new in (("key_cache", "new_key"), ("value_cache", "new_value")):
        assert_same_bits(result[name][[0, 2]], args[name][[0, 2]])
        assert_same_bits(result[name][1, :, 1], args[new][1, :, 0])
        assert_same_bits(result[name][3, :, 3], args[new][3, :, 0])


def test_a19_a_row_keeps_every_bit_when_its_neighbour_changes():
    args = batch([1, 2, 3], [1, 1, 1], 1, 4)
    expected = step(args)
    for length, fill in ((0, 1.0), (3, 1e30), (2, math.nan)):
        changed = args | {name: args[name].clone() for name in (*FLOATS, "lengths")}
        for name in FLOATS:
            changed[name][0] = fill
        changed["lengths"][0] = length
        result = step(changed)
        for name in expected:
            assert torch.equal(result[name][1:], expected[name][1:])


def test_a20_true_means_may_attend_everywhere():
    args = one_head([0], [3], 3, 3)
    attention = step(args)["attention"][0, 0]
    mask = visibility.mask([0], [3], 3, 3)[0]
    assert mask.tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    assert (attention > 0).tolist() == mask.tolist()
    assert step(args)["context"].flatten()[0] == args["new_value"].flatten()[0]


def test_a21_a_dot_product_beyond_float16_gives_even_weights():
    args = batch([1], [1], 1, 2, H_q=1, H_k=1, D=64, dtype=torch.float16)
    sixties = {name: torch.full_like(args[name], 64) for name in ("query", "new_key", "key_cache")}
    assert step(args, **sixties)["attention"].flatten().tolist() == [0.5, 0.5]


def test_a22_a_cache_of_another_dtype_is_refused():
    args = batch([1], [1], 1, 2, dtype=torch.float32)
    args["new_value"].fill_(70000)
    for name in ("key_cache", "value_cache"):
        with pytest.raises(
            ValueError, match=f"{name} had dtype torch.float16; it must be torch.float32"
        ):
            step(args, **{name: args[name].half()})
    new = torch.full((1, 1, 1), 70000.0)
    with pytest.raises(
        ValueError, match=r"cache\[0\] had dtype torch.float16; it must be torch.float32"
    ):
        kv_cache_step(new, new, new, (new.half(), new.half()))


def test_a23_a_finished_row_idles_while_the_others_go_on():
    ends = [1, 3]
    tokens = batch([0, 0], [3, 3], 3, 4)

    def decode(rows):
        state = {name: tokens[name][rows] for name in CACHE}
        lengths, contexts = [], []
        for t in range(max(ends)):
            args = {name: tokens[name][rows, :, t : t + 1] for name in FLOATS[:3]}
            mask = torch.tensor([[t < ends[row]] for row in rows])
            result = kv_cache_attention_step(**args, **state, append_mask=mask, options={})
            state = {name: result[name] for name in CACHE}
            lengths.append(result["lengths"].tolist())
            contexts.append(result["context"])
        return state, lengths, torch.cat(contexts, dim=2)

    state, lengths, contexts = decode([0, 1])
    assert lengths == [[1, 1], [1, 2], [1, 3]]
    assert_same_bits(state["key_cache"][0, :, 1:], tokens["key_cache"][0, :, 1:])
    assert contexts[0, :, 1:].eq(0).all()
    alone, _, alone_contexts = decode([1])
    assert_same_bits(state["key_cache"][1:], alone["key_cache"])
    torch.testing.assert_close(contexts[1:], alone_contexts, rtol=1e-13, atol=1e-14)


def test_a24_a_chunk_on_a_warm_cache_keeps_all_its_queries_and_its_mask_counts():
    args = batch([2], [3], 3, 6)
    result = step(args)
    assert result["lengths"].tolist() == [5]
    assert result["context"].ne(0).any(dim=-1).all()
    masked = step(args, append_mask=torch.tensor([[True, True, False]]))
    assert masked["lengths"].tolist() == [4]
    assert masked["context"][:, :, 2].eq(0).all()
    assert_same_bits(masked["key_cache"][:, :, 4], args["key_cache"][:, :, 4])
    with pytest.raises(ValueError, match="every True must come before every False"):
        step(args, append_mask=torch.tensor([[True, False, True]]))
    with pytest.raises(ValueError, match="'mask'"):
        step(args, options={"mask": torch.ones(3, 6)})


def test_a25_beams_are_reordered_by_indexing_and_share_no_storage():
    args = batch([1, 2, 1], [1, 1, 1], 1, 4)
    order = torch.tensor([0, 0, 2])
    result = step(args, **{name: args[name][order] for name in CACHE})
    assert result["lengths"].tolist() == [2, 2, 2]
    keys = result["key_cache"]
    assert_same_bits(keys[0, :, 0], keys[1, :, 0])
    assert_same_bits(keys[:2, :, 1], args["new_key"][:2, :, 0])
    assert not torch.equal(keys[0, :, 1], keys[1, :, 1])

    one = {
        name: args[name][:1].expand(3, *args[name].shape[1:]) for name in CACHE
    }  # all beams in one storage
    keys = step(args, **one)["key_cache"]
    assert_same_bits(keys[:, :, 1], args["new_key"][:, :, 0])
    assert_same_bits(keys[2, :, 0], args["key_cache"][0, :, 0])


def test_every_fault_of_the_table_has_its_test():
    listed = {line[2:5].lower() for line in __doc__.splitlines() if line.startswith("| A")}
    tested = [name[5:8] for name, value in globals().items() if isinstance(value, types.FunctionType)]
    assert listed == {f"a{number:02}" for number in range(1, 26)}
    assert listed <= set(tested)
