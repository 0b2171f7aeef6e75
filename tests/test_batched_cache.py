"""kv_cache_attention_step: one append-and-attend step over a ragged batch with grouped heads."""

import fractions
import math
import re
from itertools import product

import numpy as np
import pytest
import reference
import torch
from cases import (
    FLOATS,
    INTEGERS,
    PROPERTY,
    RAGGED,
    appended_slots,
    as_lists,
    assert_same_bits,
    assert_unchanged,
    batch,
    batches,
    bits,
    live_slots,
    per_slot,
    poisoned,
    row,
    snapshot,
    with_gradients,
)
from hypothesis import given
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.functional import scaled_dot_product_attention

from kvlib import kv_cache_attention_step, visibility

HALVES = (torch.float16, torch.bfloat16)
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOAT8S = (torch.float8_e4m3fn, torch.float8_e5m2)
POISONS = (math.nan, math.inf, -math.inf)


def loss(result, seed=0):
    """Return a number that every output of every query, and every live cached number, has a part in."""
    generator = torch.Generator().manual_seed(seed)
    total = 0
    for name in ("attention", "context"):
        weight = torch.randn(result[name].shape, generator=generator, dtype=torch.float64)
        total = total + (result[name] * weight.to(result[name].dtype)).sum()
    return total


def gradients(args, seed=0):
    """Return the gradients of `loss` in all five floating arguments."""
    args = with_gradients(args)
    leaves = [args[name] for name in FLOATS]
    total = loss(kv_cache_attention_step(**args), seed)
    return dict(zip(FLOATS, torch.autograd.grad(total, leaves, materialize_grads=True)))


class TestShapesAndDtypes:
    """Any B, H_q, H_k, D, D_v and M from 1, any Q from 0; results keep shapes and dtypes."""

    @pytest.mark.parametrize(("B", "H_k", "group_size"), [*product((1, 3), (1, 2), (1, 3))])
    def test_every_output_has_the_shape_of_the_contract(self, B, H_k, group_size):
        H_q = H_k * group_size
        for Q, M, D, D_v in product((0, 1, 3), (1, 4), (1, 5), (1, 2)):
            counts = [min(Q, M)] * B
            result = kv_cache_attention_step(
                **batch([0] * B, counts, Q, M, H_q=H_q, H_k=H_k, D=D, D_v=D_v)
            )
            assert {name: tuple(value.shape) for name, value in result.items()} == {
                "key_cache": (B, H_k, M, D),
                "value_cache": (B, H_k, M, D_v),
                "lengths": (B,),
                "attention": (B, H_q, Q, M),
                "context": (B, H_q, Q, D_v),
            }

    @pytest.mark.parametrize("dtype", [*FLOAT_DTYPES, *FLOAT8S])
    def test_floating_outputs_have_the_dtype_of_the_inputs(self, dtype):
        result = kv_cache_attention_step(**batch(**RAGGED, dtype=dtype))
        for name in ("key_cache", "value_cache", "attention", "context"):
            assert result[name].dtype == dtype

    @pytest.mark.parametrize("dtype", INTEGERS)
    def test_lengths_keep_their_integer_dtype(self, dtype):
        args = batch(**RAGGED)
        expected = kv_cache_attention_step(**args)
        args["lengths"] = args["lengths"].to(dtype)
        result = kv_cache_attention_step(**args)
        assert result["lengths"].dtype == dtype
        assert result["lengths"].tolist() == expected["lengths"].tolist()
        assert_same_bits(result["context"], expected["context"])

    def test_one_slot_of_capacity_is_enough(self):
        args = batch([0, 1], [1, 0], 1, 1)
        result = kv_cache_attention_step(**args)
        assert result["attention"][0].eq(1).all()
        assert_same_bits(result["context"][0], args["new_value"][0].repeat_interleave(2, dim=0))
        assert result["attention"][1].eq(0).all()


def valid(**changes):
    """Return arguments with B = 2, H_q = 4, H_k = 2, Q = 3, M = 5, D = 4 and D_v = 3, changed."""
    return batch([1, 2], [2, 3], 3, 5, H_q=4, H_k=2, D=4, D_v=3, dtype=torch.float32) | changes


class TestBadInput:
    """An error names the argument, what it was, and what it must be, before anything has changed."""

    @pytest.mark.parametrize(
        ("name", "shape", "words"),
        [
            (
                "query",
                (2, 4, 3),
                r"query had shape \(2, 4, 3\); it must have 4 dimensions, \(B, H_q, Q, D\)",
            ),
            (
                "new_key",
                (2, 2, 3, 4, 1),
                r"new_key had shape \(2, 2, 3, 4, 1\); it must have 4 dimensions",
            ),
            (
                "new_key",
                (1, 2, 3, 4),
                r"new_key had shape .* B = 1; it must be .* with B = 2, as in query",
            ),
            (
                "new_key",
                (2, 2, 2, 4),
                r"new_key had shape .* Q = 2; it must be .* with Q = 3, as in query",
            ),
            (
                "new_key",
                (2, 2, 3, 5),
                r"new_key had shape .* D = 5; it must be .* with D = 4, as in query",
            ),
            (
                "new_value",
                (2, 1, 3, 3),
                r"new_value had shape .* H_k = 1; .* with H_k = 2, as in new_key",
            ),
            ("new_value", (2, 2, 4, 3), r"new_value had shape .* Q = 4; .* with Q = 3, as in query"),
            (
                "key_cache",
                (2, 4, 5, 4),
                r"key_cache had shape .* H_k = 4; .* with H_k = 2, as in new_key",
            ),
            ("key_cache", (2, 2, 5, 3), r"key_cache had shape .* D = 3; .* with D = 4, as in query"),
            ("key_cache", (2, 2, 5), r"key_cache had shape \(2, 2, 5\); it must have 4 dimensions"),
            (
                "value_cache",
                (2, 2, 4, 3),
                r"value_cache had shape .* M = 4; .* with M = 5, as in key_cache",
            ),
            (
                "value_cache",
                (2, 2, 5, 4),
                r"value_cache had shape .* D_v = 4; .* with D_v = 3, as in new_value",
            ),
            ("value_cache", (3, 2, 5, 3), r"value_cache had shape .* B = 3; .* with B = 2, as in query"),
        ],
    )
    def test_a_tensor_of_the_wrong_shape_is_refused(self, name, shape, words):
        self.refuses(valid(**{name: torch.zeros(shape)}), ValueError, words)

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            (
                {"lengths": torch.tensor([[1, 2]])},
                r"lengths had shape \(1, 2\); it must have 1 dimensions, \(B\)",
            ),
            ({"lengths": torch.tensor(1)}, r"lengths had shape \(\); it must have 1 dimensions"),
            ({"lengths": torch.tensor([1, 2, 3])}, r"lengths had shape \(3,\), B = 3; .* with B = 2"),
            (
                {"append_mask": torch.ones(2, dtype=torch.bool)},
                r"append_mask had shape \(2,\); .* \(B, Q\)",
            ),
            (
                {"append_mask": torch.ones(3, 3, dtype=torch.bool)},
                r"append_mask had shape \(3, 3\), B = 3; .* B = 2",
            ),
            (
                {"append_mask": torch.ones(2, 2, dtype=torch.bool)},
                r"append_mask had shape \(2, 2\), Q = 2; .* Q = 3",
            ),
        ],
    )
    def test_lengths_and_append_mask_must_fit_the_batch(self, changes, words):
        self.refuses(valid(**changes), ValueError, words)

    @pytest.mark.parametrize("name", [*FLOATS, "lengths", "append_mask"])
    @pytest.mark.parametrize(
        ("what", "kind"), [(None, "NoneType"), ([1, 2], "list"), (np.zeros(2), "ndarray")]
    )
    def test_something_that_is_no_tensor_is_refused(self, name, what, kind):
        self.refuses(
            valid(**{name: what}), TypeError, f"^{name} was a {kind}; it must be a torch.Tensor"
        )

    @pytest.mark.parametrize("name", FLOATS)
    def test_numbers_that_are_not_floating_are_refused(self, name):
        for dtype in (torch.int64, torch.bool, torch.complex64):
            args = valid()
            args[name] = args[name].to(dtype)
            self.refuses(args, TypeError, f"^{name} had dtype {dtype}; it must be a floating dtype")

    @pytest.mark.parametrize("name", FLOATS[1:])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
    def test_mixed_dtypes_are_refused(self, name, dtype):
        args = valid()
        args[name] = args[name].to(dtype)
        self.refuses(
            args, ValueError, f"^{name} had dtype {dtype}; it must be torch.float32, as in query"
        )

    @pytest.mark.parametrize("name", [*FLOATS[1:], "lengths", "append_mask"])
    def test_mixed_devices_are_refused(self, name):
        args = valid()
        args[name] = args[name].to("meta")
        with pytest.raises(ValueError, match=f"^{name} had device meta; it must be cpu, as in query"):
            kv_cache_attention_step(**args)

    @pytest.mark.parametrize(
        ("letter", "name", "sizes"),
        [
            ("B", "query", {"lengths": [], "counts": []}),
            ("H_q", "query", {"H_q": 0}),
            ("D", "query", {"D": 0}),
            ("H_k", "new_key", {"H_k": 0}),
            ("D_v", "new_value", {"D_v": 0}),
            ("M", "key_cache", {"capacity": 0}),
        ],
    )
    def test_sizes_of_zero_are_refused(self, letter, name, sizes):
        args = batch(**{"lengths": [0], "counts": [0], "n_queries": 1, "capacity": 2} | sizes)
        shape = re.escape(str(tuple(args[name].shape)))
        words = rf"^{name} had shape {shape}, {letter} = 0; it must be .* with {letter} = 1 or more"
        self.refuses(args, ValueError, words)

    @pytest.mark.parametrize("name", [*FLOATS, "lengths", "append_mask"])
    def test_sparse_tensors_are_refused(self, name):
        args = valid()
        args[name] = args[name].to_sparse()
        with pytest.raises(TypeError, match=f"^{name} had layout torch.sparse_coo; it must be dense"):
            kv_cache_attention_step(**args)

    @pytest.mark.parametrize(("H_q", "H_k"), [(3, 2), (2, 3), (1, 2), (5, 4)])
    def test_head_counts_that_do_not_divide_are_refused(self, H_q, H_k):
        self.refuses(
            batch(**RAGGED, H_q=H_q, H_k=H_k),
            ValueError,
            f"query had H_q = {H_q} heads; it must have a multiple of the H_k = {H_k} heads",
        )

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.complex64])
    def test_lengths_that_are_no_integers_are_refused(self, dtype):
        args = valid(lengths=torch.tensor([1, 1]).to(dtype))
        self.refuses(args, TypeError, f"lengths had dtype {dtype}; it must be an integer dtype")

    @pytest.mark.parametrize("lengths", [[-1, 0], [6, 0], [2**40, 0], [-(2**63), 0]])
    def test_lengths_out_of_range_are_refused(self, lengths):
        args = valid(lengths=torch.tensor(lengths), append_mask=torch.zeros(2, 3, dtype=torch.bool))
        self.refuses(args, ValueError, rf"lengths\[0\] was {lengths[0]}; it must be between 0 and M = 5")

    def test_a_length_beyond_every_signed_integer_is_refused(self):
        args = valid(lengths=torch.tensor([0, 2**64 - 1], dtype=torch.uint64))
        self.refuses(args, ValueError, rf"lengths\[1\] was {2**64 - 1}; it must be between 0 and M = 5")

    @pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32])
    def test_an_append_mask_that_is_not_boolean_is_refused(self, dtype):
        args = valid()
        args["append_mask"] = args["append_mask"].to(dtype)
        self.refuses(args, TypeError, f"append_mask had dtype {dtype}; it must be torch.bool")

    @pytest.mark.parametrize("mask", [[0, 1, 0], [0, 0, 1], [1, 0, 1], [0, 1, 1]])
    def test_an_append_mask_that_is_no_prefix_is_refused(self, mask):
        shown = [bool(offered) for offered in mask]
        args = valid(append_mask=torch.tensor([[True, True, False], shown]))
        words = rf"append_mask\[1\] was {re.escape(str(shown))}; every True must come before every False"
        self.refuses(args, ValueError, words)

    @pytest.mark.parametrize(("length", "count"), [(3, 3), (4, 2), (5, 1), (5, 3)])
    def test_more_than_a_row_can_hold_is_refused(self, length, count):
        args = valid(lengths=torch.tensor([0, length]))
        args["append_mask"] = torch.arange(3) < torch.tensor([[1], [count]])
        words = rf"appends {count} slots to lengths\[1\] = {length}, {length + count} in all; .* M = 5"
        self.refuses(args, ValueError, words)

    @pytest.mark.parametrize(("dtype", "largest"), [(torch.int8, 127), (torch.uint8, 255)])
    def test_lengths_whose_dtype_cannot_hold_the_new_length_are_refused(self, dtype, largest):
        sizes = {"H_q": 1, "H_k": 1, "D": 1, "D_v": 1}
        args = batch([largest - 1, largest], [2, 1], 2, 300, **sizes)
        args["lengths"] = args["lengths"].to(dtype)
        words = f"lengths had dtype {dtype}; it must be able to hold {largest + 1}, the length of row 0"
        self.refuses(args, ValueError, words)
        args["append_mask"] = torch.tensor([[True, False], [False, False]])
        assert kv_cache_attention_step(**args)["lengths"].tolist() == [largest, largest]

    @pytest.mark.parametrize(
        ("options", "error", "words"),
        [
            (None, TypeError, "options was a NoneType; it must be a dict"),
            ([("scale", 1.0)], TypeError, "options was a list; it must be a dict"),
            ({"scal": 1.0}, ValueError, "options had the keys 'scal'; 'scale' is the only key there is"),
            (
                {"scale": 1.0, "dropout": 0.1, 3: 4},
                ValueError,
                "options had the keys 'dropout', 3; 'scale'",
            ),
            (
                {"scale": 0.0},
                ValueError,
                r"options\['scale'\] was 0\.0; it must be a positive finite number",
            ),
            (
                {"scale": -0.5},
                ValueError,
                r"options\['scale'\] was -0\.5; it must be a positive finite number",
            ),
            (
                {"scale": math.inf},
                ValueError,
                r"options\['scale'\] was inf; it must be a positive finite number",
            ),
            (
                {"scale": math.nan},
                ValueError,
                r"options\['scale'\] was nan; it must be a positive finite number",
            ),
            ({"scale": 1e39}, ValueError, r"options\['scale'\] was 1e\+39; .* torch.float32 can hold"),
            ({"scale": 1e-40}, ValueError, r"options\['scale'\] was 1e-40; .* torch.float32 can hold"),
            (
                {"scale": 10**400},
                ValueError,
                r"options\['scale'\] was 10+; it must be a positive finite number",
            ),
            (
                {"scale": "1"},
                TypeError,
                r"options\['scale'\] was '1'; it must be a positive finite number",
            ),
            (
                {"scale": None},
                TypeError,
                r"options\['scale'\] was None; it must be a positive finite number",
            ),
            (
                {"scale": True},
                TypeError,
                r"options\['scale'\] was True; it must be a positive finite number",
            ),
            ({"scale": 1 + 0j}, TypeError, r"options\['scale'\] was \(1\+0j\)"),
            ({"scale": torch.tensor(1.0)}, TypeError, r"options\['scale'\] was tensor\(1\.\)"),
        ],
    )
    def test_options_that_cannot_be_are_refused(self, options, error, words):
        self.refuses(valid(options=options), error, words)

    @staticmethod
    def refuses(args, error, words):
        tensors = {name: value for name, value in args.items() if isinstance(value, torch.Tensor)}
        before = snapshot(tensors | {"options": {}})
        with pytest.raises(error, match=words):
            kv_cache_attention_step(**args)
        assert_unchanged(tensors | {"options": {}}, before)


class TestGroupedHeads:
    """Query head h reads key/value head h // (H_q / H_k): neighbours share a head."""

    def test_query_heads_next_to_each_other_share_a_head(self):
        args = batch([0], [1], 1, 1, H_q=4, H_k=2, D_v=1)
        args["new_value"] = torch.tensor([10.0, 20.0], dtype=torch.float64).reshape(1, 2, 1, 1)
        assert kv_cache_attention_step(**args)["context"].flatten().tolist() == [10, 10, 20, 20]

    @pytest.mark.parametrize(("H_q", "H_k"), [(3, 3), (4, 2), (6, 2), (6, 3), (4, 1)])
    def test_it_equals_every_head_alone(self, H_q, H_k):
        args = batch(**RAGGED, H_q=H_q, H_k=H_k)
        result = kv_cache_attention_step(**args)
        for h in range(H_q):
            shared = h // (H_q // H_k)
            alone = args | {"query": args["query"][:, h : h + 1]}
            alone |= {name: args[name][:, shared : shared + 1] for name in FLOATS[1:]}
            expected = kv_cache_attention_step(**alone)
            for name in ("attention", "context"):
                torch.testing.assert_close(
                    result[name][:, h], expected[name][:, 0], rtol=1e-13, atol=1e-14
                )

    def test_storing_repeated_heads_gives_the_same_result(self):
        args = batch(**RAGGED, H_q=6, H_k=2)
        repeated = args | {name: args[name].repeat_interleave(3, dim=1) for name in FLOATS[1:]}
        result, expected = kv_cache_attention_step(**args), kv_cache_attention_step(**repeated)
        for name in ("attention", "context"):
            torch.testing.assert_close(result[name], expected[name], rtol=1e-13, atol=1e-14)


class TestPositions:
    """Keys come projected and rotated: a slot's place in the past changes nothing by itself."""

    def test_the_order_of_the_past_does_not_matter(self):
        args = batch([4], [2], 2, 6)
        order = torch.tensor([2, 0, 3, 1, 4, 5])
        shuffled = args | {name: args[name][:, :, order] for name in ("key_cache", "value_cache")}
        result, expected = kv_cache_attention_step(**shuffled), kv_cache_attention_step(**args)
        torch.testing.assert_close(result["context"], expected["context"], rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(
            result["attention"], expected["attention"][..., order], rtol=1e-13, atol=1e-14
        )


class TestAppend:
    """Offered slot t of row b, if appended, is written at lengths[b] + t; no other bit changes."""

    @PROPERTY
    @given(batches())
    def test_appended_slots_are_written_where_they_belong_and_nowhere_else(self, args):
        result = kv_cache_attention_step(**args)
        for new, cache in (("new_key", "key_cache"), ("new_value", "value_cache")):
            expected = args[cache].clone()
            for b, length in enumerate(args["lengths"].tolist()):
                for t in range(int(args["append_mask"][b].sum())):
                    expected[b, :, length + t] = args[new][b, :, t]
            assert_same_bits(result[cache], expected)

    @pytest.mark.parametrize("dtype", [*FLOAT_DTYPES, *FLOAT8S])
    def test_unwritten_entries_keep_every_bit(self, dtype):
        args = batch(**RAGGED, dtype=dtype)
        for name in ("key_cache", "value_cache"):
            size = args[name].element_size()
            integer = bits(args[name]).dtype
            pattern = torch.arange(args[name].numel() * size, dtype=torch.int64).mul(37).to(torch.uint8)
            args[name] = (
                pattern.view(integer).view(dtype).reshape(args[name].shape)
            )  # NaNs, -0, subnormals
            args[name][:, :, 0] = -0.0
        args["key_cache"][:, :, -1] = math.nan if dtype in FLOAT8S else -math.nan
        live = per_slot(live_slots(args) & ~appended_slots(args))
        for name in ("key_cache", "value_cache"):  # live slots hold finite numbers
            finite = args[name].float().nan_to_num(1, 1, 1).clamp(-9, 9).to(dtype)
            args[name] = torch.where(live, bits(finite), bits(args[name])).view(dtype)
        result = kv_cache_attention_step(**args)
        for name in ("key_cache", "value_cache"):
            kept = (~per_slot(appended_slots(args))).expand_as(args[name])
            assert torch.equal(bits(result[name])[kept], bits(args[name])[kept])

    def test_lengths_grow_by_what_was_appended(self):
        result = kv_cache_attention_step(**batch(**RAGGED))
        assert result["lengths"].tolist() == [0, 2, 5, 5, 4]

    def test_several_small_calls_equal_one_large_call(self):
        args = batch([1, 0, 2], [4, 4, 4], 4, 6)
        whole = kv_cache_attention_step(**args)
        for cuts in ((0, 1, 2, 3, 4), (0, 3, 4), (0, 2, 4)):
            state, contexts = dict(args), []
            for start, end in zip(cuts, cuts[1:]):
                chunk = {name: args[name][:, :, start:end] for name in FLOATS[:3]}
                chunk["append_mask"] = args["append_mask"][:, start:end]
                result = kv_cache_attention_step(**state | chunk)
                state |= {name: result[name] for name in ("key_cache", "value_cache", "lengths")}
                contexts.append(result["context"])
            assert_same_bits(state["key_cache"], whole["key_cache"])
            assert_same_bits(state["value_cache"], whole["value_cache"])
            assert torch.equal(state["lengths"], whole["lengths"])
            torch.testing.assert_close(
                torch.cat(contexts, dim=2), whole["context"], rtol=1e-13, atol=1e-14
            )


class TestVisibility:
    """Query t attends slots 0 to old length + t if it was appended, and none if it was not."""

    def test_two_queries_of_one_call_see_different_prefixes(self):
        args = batch([2], [2], 2, 5, H_q=1, H_k=1, D_v=1)
        args["query"].zero_()
        args["value_cache"] = torch.tensor([0.0, 1.0, 99.0, 99.0, 99.0]).double().reshape(1, 1, 5, 1)
        args["new_value"] = torch.tensor([2.0, 9.0]).double().reshape(1, 1, 2, 1)
        result = kv_cache_attention_step(**args)
        thirds, quarters = [1 / 3] * 3 + [0.0] * 2, [1 / 4] * 4 + [0.0]
        torch.testing.assert_close(
            result["attention"][0, 0].tolist(), [thirds, quarters], rtol=1e-14, atol=0
        )
        torch.testing.assert_close(result["context"].flatten().tolist(), [1.0, 3.0], rtol=1e-14, atol=0)

    def test_a_token_alone_in_its_cache_gets_its_own_value(self):
        args = batch([0], [1], 1, 4, H_q=2, H_k=2)
        assert_same_bits(kv_cache_attention_step(**args)["context"], args["new_value"])

    @PROPERTY
    @given(batches())
    def test_hidden_slots_get_a_weight_of_exactly_zero_and_weights_sum_to_one(self, args):
        result = kv_cache_attention_step(**args)
        Q, M = result["attention"].shape[2:]
        mask = torch.from_numpy(visibility.mask(args["lengths"], args["append_mask"].sum(dim=1), Q, M))
        assert result["attention"].masked_select(~mask[:, None]).eq(0).all()
        sums = args["append_mask"][:, None, :].to(torch.float64).expand(result["attention"].shape[:3])
        torch.testing.assert_close(result["attention"].sum(dim=-1), sums, rtol=1e-14, atol=0)

    def test_idle_queries_and_idle_rows_give_zeros(self):
        args = batch(**RAGGED)
        result = kv_cache_attention_step(**args)
        idle = ~args["append_mask"]
        for name in ("attention", "context"):
            of_idle = result[name].transpose(1, 2)[idle]
            assert torch.equal(bits(of_idle), torch.zeros_like(bits(of_idle)))

    def test_future_tokens_change_nothing_for_earlier_queries(self):
        args = batch([1, 0], [3, 2], 3, 5)
        largest = torch.finfo(torch.float64).max
        expected = kv_cache_attention_step(**args)
        for t in (1, 2):
            for fill in (0.0, 1e3, largest, -largest):
                changed = args | {name: args[name].clone() for name in ("new_key", "new_value")}
                changed["new_key"][:, :, t:], changed["new_value"][:, :, t:] = fill, fill
                result = kv_cache_attention_step(**changed)
                for name in ("attention", "context"):
                    assert_same_bits(result[name][:, :, :t], expected[name][:, :, :t])

    def test_the_gradients_of_earlier_queries_do_not_know_future_tokens(self):
        def first_query(args):
            args = with_gradients(args)
            (kv_cache_attention_step(**args)["context"][:, :, 0].sum() * 4).backward()
            return {name: args[name].grad for name in FLOATS}

        args = batch([1, 0], [3, 2], 3, 5, D_v=4)
        expected = first_query(args)
        for key, value in ((1e3, 1e3), (1e300, 1e3), (1e3, torch.finfo(torch.float64).max)):
            changed = args | {name: args[name].clone() for name in ("new_key", "new_value")}
            changed["new_key"][:, :, 1:], changed["new_value"][:, :, 1:] = key, value
            for name, gradient in first_query(changed).items():
                assert_same_bits(gradient, expected[name])


class TestAttention:
    """Weights are the stable softmax of scale * q.k over allowed slots; context is weights @ values."""

    @PROPERTY
    @given(batches())
    def test_it_equals_the_scalar_loop(self, args):
        result = kv_cache_attention_step(**args)
        expected = reference.batched_step(**as_lists(args))
        for name, actual in result.items():
            wanted = torch.tensor(expected[name], dtype=actual.dtype).reshape(actual.shape)
            torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-12)

    @PROPERTY
    @given(batches())
    def test_it_equals_the_attention_of_torch_on_the_valid_prefix_of_each_row(self, args):
        leaves = with_gradients(args)
        result = kv_cache_attention_step(**leaves)
        ours, theirs = 0, 0
        for b, (length, n) in enumerate(
            zip(args["lengths"].tolist(), args["append_mask"].sum(dim=1).tolist())
        ):
            query = leaves["query"][b : b + 1, :, :n]
            keys, values = (
                torch.cat([leaves[old][b : b + 1, :, :length], leaves[new][b : b + 1, :, :n]], dim=2)
                for old, new in (("key_cache", "new_key"), ("value_cache", "new_value"))
            )
            if n == 0:
                continue
            expected = scaled_dot_product_attention(
                query,
                keys,
                values,
                attn_mask=torch.ones(n, length + n, dtype=torch.bool).tril(diagonal=length),
                scale=args["options"].get("scale"),
                enable_gqa=True,
            )
            actual = result["context"][b : b + 1, :, :n]
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
            weight = torch.arange(1.0, 1 + actual.numel(), dtype=torch.float64).reshape(actual.shape)
            ours, theirs = ours + (weight * actual).sum(), theirs + (weight * expected).sum()
        if isinstance(ours, torch.Tensor):
            inputs = [leaves[name] for name in FLOATS]
            for actual, expected in zip(
                torch.autograd.grad(ours, inputs),
                torch.autograd.grad(theirs, inputs, materialize_grads=True),
            ):
                torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("D", [1, 4, 9])
    def test_scores_are_divided_by_the_square_root_of_the_key_size_by_default(self, D):
        args = batch(**RAGGED, D=D, D_v=2)
        default = kv_cache_attention_step(**args)
        given = kv_cache_attention_step(**args | {"options": {"scale": 1 / math.sqrt(D)}})
        assert_same_bits(default["attention"], given["attention"])
        wrong = kv_cache_attention_step(**args | {"options": {"scale": 1 / math.sqrt(2 * D)}})
        assert not torch.allclose(default["attention"], wrong["attention"])

    def test_the_scale_multiplies_the_scores(self):
        args = batch([1], [1], 1, 2, H_q=1, H_k=1, D=1)
        args["query"].fill_(1)
        args["key_cache"].fill_(2)
        args["new_key"].fill_(5)
        args["options"] = {"scale": 0.5}  # scores 1 and 2.5
        weights = torch.tensor([1, 2.5], dtype=torch.float64).softmax(0)
        torch.testing.assert_close(kv_cache_attention_step(**args)["attention"].flatten(), weights)

    @pytest.mark.parametrize(
        "scale", [2, 0.25, np.float32(0.25), np.int64(2), fractions.Fraction(1, 4), 1e30]
    )
    def test_the_scale_may_be_any_positive_real_number(self, scale):
        args = batch(**RAGGED)
        result = kv_cache_attention_step(**args | {"options": {"scale": scale}})
        expected = kv_cache_attention_step(**args | {"options": {"scale": float(scale)}})
        assert_same_bits(result["attention"], expected["attention"])
        assert result["context"].isfinite().all()

    @pytest.mark.parametrize("dtype", FLOAT_DTYPES)
    def test_the_scale_may_be_as_small_and_as_large_as_the_computation_can_hold(self, dtype):
        args = batch(**RAGGED, dtype=dtype)
        args["query"].zero_()
        limits = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
        expected = kv_cache_attention_step(**args)
        for scale in (limits.tiny, limits.max):
            result = kv_cache_attention_step(**args | {"options": {"scale": scale}})
            assert_same_bits(result["context"], expected["context"])

    @pytest.mark.parametrize("dtype", FLOAT_DTYPES)
    def test_large_scores_stay_finite(self, dtype):
        args = batch(**RAGGED, dtype=dtype)
        args |= {name: args[name] * 1e3 for name in ("query", "new_key", "key_cache")}
        for result in (kv_cache_attention_step(**args), gradients(args)):
            assert all(value.isfinite().all() for value in result.values())

    def test_scores_that_are_all_far_below_zero_do_not_vanish(self):
        args = batch([2], [1], 1, 4, H_q=1, H_k=1, D=1)
        args["query"].fill_(1)
        args["key_cache"].fill_(-5e12)
        args["new_key"].fill_(-5e12)
        weights = kv_cache_attention_step(**args)["attention"].flatten().tolist()
        torch.testing.assert_close(weights, [1 / 3, 1 / 3, 1 / 3, 0.0], rtol=1e-14, atol=0)

    def test_the_same_call_gives_the_same_bits(self):
        args = batch(**RAGGED)
        first, second = kv_cache_attention_step(**args), kv_cache_attention_step(**args)
        assert all(torch.equal(first[name], second[name]) for name in first)


class TestEmptyCalls:
    """A call without offered slots, and a row that appends nothing, keep cache and lengths."""

    def test_a_call_without_queries_returns_everything_as_it_was(self):
        args = batch([0, 2, 4], [0, 0, 0], 0, 4)
        result = kv_cache_attention_step(**args)
        assert result["attention"].shape == (3, 4, 0, 4)
        assert result["context"].shape == (3, 4, 0, 2)
        assert_same_bits(result["key_cache"], args["key_cache"])
        assert_same_bits(result["value_cache"], args["value_cache"])
        assert result["lengths"].tolist() == [0, 2, 4]

    def test_a_call_without_queries_still_passes_gradients_through_the_caches(self):
        args = with_gradients(batch([0, 2], [0, 0], 0, 4))
        result = kv_cache_attention_step(**args)
        (
            result["key_cache"].sum() + result["value_cache"].sum() * 2 + result["context"].sum()
        ).backward()
        assert args["key_cache"].grad.eq(1).all()
        assert args["value_cache"].grad.eq(2).all()

    def test_a_call_in_which_no_row_appends_returns_everything_as_it_was(self):
        args = batch([0, 2, 4], [0, 0, 0], 3, 4)
        result = kv_cache_attention_step(**args)
        assert result["attention"].eq(0).all()
        assert result["context"].eq(0).all()
        assert_same_bits(result["key_cache"], args["key_cache"])
        assert_same_bits(result["value_cache"], args["value_cache"])
        assert result["lengths"].tolist() == [0, 2, 4]
        for name, gradient in gradients(args).items():
            assert gradient.eq(0).all(), name

    def test_decoding_goes_on_after_an_empty_call(self):
        args = batch([2, 0], [1, 1], 1, 4)
        nothing = {name: args[name][:, :, :0] for name in FLOATS[:3]} | {
            "append_mask": args["append_mask"][:, :0]
        }
        result = kv_cache_attention_step(**args | nothing)
        continued = args | {name: result[name] for name in ("key_cache", "value_cache", "lengths")}
        after, expected = kv_cache_attention_step(**continued), kv_cache_attention_step(**args)
        assert all(torch.equal(after[name], expected[name]) for name in expected)


class TestPoison:
    """What unused tails, slots not appended and idle queries hold, NaN included, stays there."""

    @pytest.mark.parametrize("dtype", FLOAT_DTYPES)
    @pytest.mark.parametrize("poison", POISONS)
    @pytest.mark.parametrize("where", ["key", "value", "query"])
    def test_outputs_and_gradients_have_the_bits_they_have_with_zeros(self, where, poison, dtype):
        args = batch(**RAGGED, dtype=dtype)
        clean, dirty = poisoned(args), poisoned(args, **{where: poison})
        expected, result = kv_cache_attention_step(**clean), kv_cache_attention_step(**dirty)
        for name in ("attention", "context"):
            assert_same_bits(result[name], expected[name])
        assert torch.equal(result["lengths"], expected["lengths"])
        expected, actual = gradients(clean), gradients(dirty)
        for name in FLOATS:
            assert_same_bits(actual[name], expected[name])

    @pytest.mark.parametrize("dtype", [*FLOAT_DTYPES, *FLOAT8S])
    def test_it_is_carried_over_bit_for_bit(self, dtype):
        poison = math.nan
        args = poisoned(batch(**RAGGED, dtype=dtype), key=poison, value=poison, query=poison)
        result = kv_cache_attention_step(**args)
        appended = per_slot(appended_slots(args))
        for name in ("key_cache", "value_cache"):
            kept = (~appended).expand_as(args[name])
            assert torch.equal(bits(result[name])[kept], bits(args[name])[kept])
            assert result[name].float().masked_select(appended).isfinite().all()
        assert result["attention"].float().isfinite().all()
        assert result["context"].float().isfinite().all()

    @pytest.mark.parametrize("poison", POISONS)
    def test_second_derivatives_have_the_bits_they_have_with_zeros(self, poison):
        def second_gradients(args):
            args = with_gradients(args)
            leaves = [args[name] for name in FLOATS]
            first = torch.autograd.grad(loss(kv_cache_attention_step(**args)), leaves, create_graph=True)
            return torch.autograd.grad(sum((g * g).sum() for g in first), leaves)

        args = batch(**RAGGED)
        clean, dirty = poisoned(args), poisoned(args, key=poison, value=poison, query=poison)
        for actual, expected in zip(second_gradients(dirty), second_gradients(clean)):
            assert_same_bits(actual, expected)

    def test_a_slot_appended_over_poison_is_as_good_as_new(self):
        args = batch([1], [2], 2, 4)
        dirty = args | {name: args[name].clone() for name in ("key_cache", "value_cache")}
        for name in ("key_cache", "value_cache"):
            dirty[name][:, :, 1:] = math.nan
        expected, actual = gradients(args), gradients(dirty)
        assert_same_bits(
            kv_cache_attention_step(**dirty)["context"], kv_cache_attention_step(**args)["context"]
        )
        for name in FLOATS:
            assert_same_bits(actual[name], expected[name])


class TestGradients:
    """Every floating output can be differentiated, twice, in every floating input."""

    shapes = {
        "mixed rows": RAGGED | {"H_q": 2, "H_k": 1, "D": 2, "D_v": 1},
        "full rows": {
            "lengths": (3, 1, 0),
            "counts": (0, 2, 3),
            "n_queries": 3,
            "capacity": 3,
            "H_q": 1,
            "H_k": 1,
        },
        "every head of its own": {
            "lengths": (1, 0),
            "counts": (1, 0),
            "n_queries": 2,
            "capacity": 3,
            "D": 1,
        }
        | {"H_q": 2, "H_k": 2},
        "one slot": {"lengths": (0,), "counts": (1,), "n_queries": 1, "capacity": 1, "H_q": 2, "H_k": 2},
    }

    @staticmethod
    def step_of(args):
        def step(*floats):
            result = kv_cache_attention_step(**args | dict(zip(FLOATS, floats)))
            return tuple(result[name] for name in ("key_cache", "value_cache", "attention", "context"))

        return step

    @pytest.mark.parametrize("shape", shapes)
    @pytest.mark.parametrize("options", [{}, {"scale": 0.3}])
    def test_first_derivatives_are_those_of_finite_differences(self, shape, options):
        args = with_gradients(batch(**self.shapes[shape], **options))
        outputs = self.step_of(args)(*(args[name] for name in FLOATS))
        assert all(output.requires_grad for output in outputs)  # gradcheck skips those that do not
        assert gradcheck(self.step_of(args), [args[name] for name in FLOATS])

    @pytest.mark.parametrize("shape", shapes)
    def test_second_derivatives_are_those_of_finite_differences(self, shape):
        args = with_gradients(batch(**self.shapes[shape]))
        assert gradgradcheck(self.step_of(args), [args[name] for name in FLOATS])

    def test_what_no_query_may_read_gets_a_gradient_of_zero(self):
        args = batch(**RAGGED)
        actual = gradients(args)
        idle, tail = per_slot(~args["append_mask"]), per_slot(~live_slots(args))
        overwritten = per_slot(appended_slots(args))
        for name in FLOATS[:3]:
            assert actual[name].masked_select(idle).eq(0).all()
            assert actual[name].masked_select(~idle).ne(0).any()
        for name in FLOATS[3:]:
            assert actual[name].masked_select(tail | overwritten).eq(0).all()
            assert actual[name].masked_select(~(tail | overwritten)).ne(0).any()

    def test_the_returned_cache_passes_gradients_to_whoever_wrote_the_slot(self):
        args = with_gradients(batch(**RAGGED))
        result = kv_cache_attention_step(**args)
        (result["key_cache"].sum() + result["value_cache"].sum()).backward()
        written, appended = per_slot(appended_slots(args)), per_slot(args["append_mask"])
        for name in ("key_cache", "value_cache"):
            assert torch.equal(args[name].grad, (~written).double().expand_as(args[name]))
        for name in ("new_key", "new_value"):
            assert torch.equal(args[name].grad, appended.double().expand_as(args[name]))
        assert args["query"].grad is None or args["query"].grad.eq(0).all()

    def test_gradients_flow_through_several_steps(self):
        args = batch([1, 0], [3, 2], 3, 5)

        def one_call(leaves):
            return kv_cache_attention_step(**leaves)["context"]

        def a_call_for_each_token(leaves):
            state, contexts = dict(leaves), []
            for t in range(3):
                now = {name: leaves[name][:, :, t : t + 1] for name in FLOATS[:3]}
                now["append_mask"] = leaves["append_mask"][:, t : t + 1]
                result = kv_cache_attention_step(**state | now)
                state |= {name: result[name] for name in ("key_cache", "value_cache", "lengths")}
                contexts.append(result["context"])
            return torch.cat(contexts, dim=2)

        weight = torch.randn(2, 4, 3, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        found = []
        for decode in (one_call, a_call_for_each_token):
            leaves = with_gradients(args)
            (decode(leaves) * weight).sum().backward()
            found.append([leaves[name].grad for name in FLOATS])
        for whole, stepwise in zip(*found):
            torch.testing.assert_close(stepwise, whole, rtol=1e-12, atol=1e-13)

    def test_no_nan_arises_on_the_way_so_anomaly_detection_stays_quiet(self):
        args = with_gradients(poisoned(batch(**RAGGED), key=math.nan, value=math.nan, query=math.nan))
        with torch.autograd.set_detect_anomaly(True):
            loss(kv_cache_attention_step(**args)).backward()

    def test_it_works_without_recording_gradients(self):
        args = with_gradients(batch(**RAGGED))
        with torch.no_grad():
            result = kv_cache_attention_step(**args)
        with torch.inference_mode():
            inferred = kv_cache_attention_step(**args)
        assert not any(value.requires_grad for value in result.values())
        assert torch.equal(inferred["context"], result["context"])


class TestNeighbours:
    """A row's results do not depend on the other rows of the batch."""

    @PROPERTY
    @given(batches())
    def test_each_row_alone_equals_the_row_in_the_batch(self, args):
        together = kv_cache_attention_step(**args)
        for b in range(len(args["lengths"])):
            alone = kv_cache_attention_step(**row(args, b))
            for name in ("key_cache", "value_cache", "lengths"):
                assert torch.equal(alone[name], together[name][b : b + 1])
            for name in ("attention", "context"):
                torch.testing.assert_close(
                    alone[name], together[name][b : b + 1], rtol=1e-13, atol=1e-14
                )

    def test_the_gradients_of_a_row_alone_equal_those_in_the_batch(self):
        args = with_gradients(batch(**RAGGED))
        kv_cache_attention_step(**args)["context"].square().sum().backward()
        for b in range(len(RAGGED["lengths"])):
            alone = with_gradients(row(args, b))
            kv_cache_attention_step(**alone)["context"].square().sum().backward()
            for name in FLOATS:
                torch.testing.assert_close(
                    alone[name].grad, args[name].grad[b : b + 1], rtol=1e-12, atol=1e-14
                )

    @pytest.mark.parametrize("fill", [7.0, 1e300, *POISONS])
    @pytest.mark.parametrize("b", range(len(RAGGED["lengths"])))
    def test_whatever_a_row_holds_changes_no_bit_of_the_others(self, b, fill):
        args = batch(**RAGGED)
        changed = args | {name: args[name].clone() for name in FLOATS}
        for name in FLOATS:
            changed[name][b] = fill
        others = [other for other in range(len(RAGGED["lengths"])) if other != b]
        before, after = kv_cache_attention_step(**args), kv_cache_attention_step(**changed)
        before_gradients, after_gradients = gradients(args), gradients(changed)
        for name in ("key_cache", "value_cache", "attention", "context"):
            assert_same_bits(after[name][others], before[name][others])
        for name in FLOATS:
            assert_same_bits(after_gradients[name][others], before_gradients[name][others])

    def test_the_length_of_a_row_changes_no_bit_of_the_others(self):
        args = batch([0, 2, 1], [1, 2, 2], 2, 5)
        expected = kv_cache_attention_step(**args)
        for length, count in product(range(4), range(3)):
            changed = args | {
                "lengths": args["lengths"].clone(),
                "append_mask": args["append_mask"].clone(),
            }
            changed["lengths"][0], changed["append_mask"][0] = length, torch.arange(2) < count
            result = kv_cache_attention_step(**changed)
            for name in expected:
                assert torch.equal(result[name][1:], expected[name][1:])


class TestPrecision:
    """Half precision is computed in float32: nothing overflows, and small weights count."""

    @pytest.mark.parametrize("dtype", HALVES)
    def test_half_precision_is_as_good_as_rounding_the_exact_result(self, dtype):
        args = batch([0, 30, 9, 31], [4, 2, 0, 1], 4, 32, D=64, D_v=8, dtype=dtype)
        result = kv_cache_attention_step(**args)
        exact = kv_cache_attention_step(**args | {name: args[name].double() for name in FLOATS})
        half_a_step = torch.finfo(dtype).eps / 2
        for name in ("attention", "context"):
            torch.testing.assert_close(
                result[name].double(), exact[name], rtol=half_a_step * 1.01, atol=1e-6, msg=name
            )

    @pytest.mark.parametrize("dtype", HALVES)
    def test_half_precision_equals_the_scalar_loop(self, dtype):
        args = batch(**RAGGED, dtype=dtype)
        result, expected = kv_cache_attention_step(**args), reference.batched_step(**as_lists(args))
        half_a_step = torch.finfo(dtype).eps / 2
        for name in ("attention", "context"):
            wanted = torch.tensor(expected[name], dtype=torch.float64)
            torch.testing.assert_close(result[name].double(), wanted, rtol=half_a_step * 1.01, atol=1e-6)

    def test_a_dot_product_beyond_float16_does_not_overflow(self):
        args = batch([1], [1], 1, 2, H_q=1, H_k=1, D=64, dtype=torch.float16)
        args |= {name: torch.full_like(args[name], 64) for name in ("query", "new_key", "key_cache")}
        assert kv_cache_attention_step(**args)["attention"].flatten().tolist() == [0.5, 0.5]

    def test_many_weights_too_small_for_float16_still_add_up(self):
        args = batch([0], [1], 1, 1, H_q=1, H_k=1, D=1, D_v=1, dtype=torch.float16)
        M = 4001
        args["lengths"] = torch.tensor([M - 1])
        args["key_cache"] = torch.full((1, 1, M, 1), -17.5, dtype=torch.float16)
        args["value_cache"] = torch.full((1, 1, M, 1), 60000.0, dtype=torch.float16)
        args["query"].fill_(1)
        args["new_key"].fill_(0)
        args["new_value"].fill_(0)
        small = math.exp(-17.5)  # rounds to zero in float16
        expected = (M - 1) * small / (1 + (M - 1) * small) * 60000
        assert kv_cache_attention_step(**args)["context"].item() == pytest.approx(expected, rel=1e-3)

    def test_float32_is_computed_in_float32_and_float64_in_float64(self):
        args = batch(**RAGGED, dtype=torch.float32)
        wide = args | {name: args[name].double() for name in FLOATS}
        narrow, exact = (
            kv_cache_attention_step(**args)["context"],
            kv_cache_attention_step(**wide)["context"],
        )
        expected = torch.tensor(reference.batched_step(**as_lists(args))["context"], dtype=torch.float64)
        assert (narrow.double() - expected).abs().max() < 1e-6
        assert (exact - expected).abs().max() < 1e-15 * 10

    @pytest.mark.parametrize("dtype", FLOAT8S)
    def test_float8_equals_the_rounded_scalar_loop(self, dtype):
        args = batch(**RAGGED, dtype=dtype)
        result, expected = kv_cache_attention_step(**args), reference.batched_step(**as_lists(args))
        for name in ("attention", "context"):
            wanted = torch.tensor(expected[name], dtype=torch.float64)
            rounding = torch.finfo(dtype).eps / 2
            torch.testing.assert_close(
                result[name].double(),
                wanted,
                rtol=rounding * 1.01,
                atol=torch.finfo(dtype).smallest_normal,
            )


class TestOwnership:
    """No input is modified, and no output shares memory with an input or with another output."""

    @pytest.mark.parametrize(
        "shape",
        [
            RAGGED,
            {"lengths": (2, 0), "counts": (0, 0), "n_queries": 2, "capacity": 3},
            {"lengths": (2, 0), "counts": (0, 0), "n_queries": 0, "capacity": 3},
            {"lengths": (0,), "counts": (1,), "n_queries": 1, "capacity": 1, "H_q": 1, "H_k": 1, "D": 1},
        ],
    )
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
    def test_inputs_stay_as_they_were_and_outputs_have_memory_of_their_own(self, shape, dtype):
        args = batch(**shape, dtype=dtype)
        before = snapshot(args)
        result = kv_cache_attention_step(**args)
        assert_unchanged(args, before)
        inputs = {
            value.untyped_storage().data_ptr() for name, value in args.items() if name != "options"
        }
        outputs = [value.untyped_storage().data_ptr() for value in result.values() if value.numel()]
        assert len(set(outputs)) == len(outputs)
        assert not inputs & set(outputs)

    def test_inputs_stay_as_they_were_through_a_backward_pass(self):
        args = with_gradients(batch(**RAGGED))
        before = snapshot(args)
        loss(kv_cache_attention_step(**args)).backward()
        assert_unchanged(args, before)

    def test_the_old_cache_can_be_continued_after_the_call(self):
        args = batch([2, 1], [1, 1], 1, 4)
        first = kv_cache_attention_step(**args)
        other = args | {"new_key": args["new_key"] * 5, "new_value": args["new_value"] * 5}
        kv_cache_attention_step(**other)
        again = kv_cache_attention_step(**args)
        assert all(torch.equal(again[name], first[name]) for name in first)

    def test_parameters_of_a_module_are_welcome(self):
        args = batch(**RAGGED)
        wrapped = args | {name: torch.nn.Parameter(args[name]) for name in FLOATS}
        result = kv_cache_attention_step(**wrapped)["context"]
        # Recorded operations may add up in another order than those in place.
        torch.testing.assert_close(result, kv_cache_attention_step(**args)["context"], check_stride=False)
