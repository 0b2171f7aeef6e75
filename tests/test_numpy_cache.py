"""KVCache and decode_step: a cache of fixed capacity, in numpy alone."""

import copy
import subprocess
import sys
import tracemalloc
import warnings

import numpy as np
import pytest
import reference
import torch
from cases import PROPERTY
from hypothesis import given
from hypothesis import strategies as st

from kvlib import KVCache, decode_step


def filled(n=3, max_len=5, d_k=2, d_v=3, seed=0):
    """Return a cache of n random steps, and the keys and values that it must hold."""
    rng = np.random.default_rng(seed)
    k, v = rng.normal(size=(n, d_k)), rng.normal(size=(n, d_v))
    cache = KVCache(max_len, d_k, d_v)
    cache.append(k, v)
    return cache, k, v


def assert_holds(cache, k, v):
    assert len(cache) == len(k)
    assert np.array_equal(cache.keys(), k)
    assert np.array_equal(cache.values(), v)


class TestWorkedExample:
    """The example of the contract, number by number."""

    @pytest.fixture
    def cache(self):
        cache = KVCache(4, 2, 2)
        cache.append(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[1.0, 2.0], [3.0, 4.0]]))
        assert len(cache) == 2
        cache.append(np.array([1.0, 1.0]), np.array([5.0, 6.0]))
        return cache

    def test_two_steps_and_one_step_make_three(self, cache):
        assert len(cache) == 3
        assert np.array_equal(cache.values(), [[1, 2], [3, 4], [5, 6]])

    def test_the_query_finds_output_and_weights(self, cache):
        output, weights = decode_step(np.array([1.0, 0.0]), cache)
        np.testing.assert_allclose(output, [3, 4], rtol=1e-15)
        np.testing.assert_allclose(weights, [0.40111209, 0.19777581, 0.40111209], atol=5e-9)

    def test_two_more_steps_do_not_fit(self, cache):
        with pytest.raises(ValueError):
            cache.append(np.zeros((2, 2)), np.zeros((2, 2)))
        assert len(cache) == 3


class TestConstruction:
    """A new cache is empty, and has room for max_len keys of size d_k and values of size d_v."""

    def test_a_new_cache_is_empty(self):
        cache = KVCache(4, 2, 3)
        assert len(cache) == 0
        assert cache.keys().shape == (0, 2)
        assert cache.values().shape == (0, 3)

    def test_it_says_how_large_it_is(self):
        cache, _, _ = filled(n=3, max_len=5, d_k=2, d_v=7)
        assert (cache.max_len, cache.d_k, cache.d_v) == (5, 2, 7)
        assert repr(cache) == "<KVCache: 3 of 5 steps, d_k=2, d_v=7>"

    @pytest.mark.parametrize(
        ("max_len", "d_k", "d_v"), [(1, 1, 1), (256, 64, 64), (1, 64, 1), (256, 1, 64)]
    )
    def test_the_smallest_and_the_largest_sizes_work(self, max_len, d_k, d_v):
        cache, k, v = filled(max_len, max_len, d_k, d_v)
        assert_holds(cache, k, v)
        output, weights = decode_step(np.ones(d_k), cache)
        assert output.shape == (d_v,)
        assert weights.shape == (max_len,)

    def test_sizes_may_be_numpy_integers(self):
        assert KVCache(np.int64(4), np.uint8(2), np.int32(3)).keys().shape == (0, 2)

    @pytest.mark.parametrize("name", ["max_len", "d_k", "d_v"])
    @pytest.mark.parametrize(
        ("size", "error", "words"),
        [
            (0, ValueError, "was 0; it must be 1 or more"),
            (-3, ValueError, "was -3; it must be 1 or more"),
            (2.0, TypeError, r"was 2\.0; it must be a whole number"),
            ("2", TypeError, "was '2'; it must be a whole number"),
            (None, TypeError, "was None; it must be a whole number"),
            (True, TypeError, "was True; it must be a whole number"),
        ],
    )
    def test_an_impossible_size_is_refused(self, name, size, error, words):
        with pytest.raises(error, match=f"^{name} {words}"):
            KVCache(**{"max_len": 4, "d_k": 2, "d_v": 3} | {name: size})


class TestAppend:
    """Append adds one step, given as a row, or several, given as a matrix, behind those stored."""

    def test_a_row_is_one_step(self):
        cache = KVCache(4, 2, 3)
        cache.append(np.array([1.0, 2.0]), np.array([3.0, 4.0, 5.0]))
        assert_holds(cache, [[1, 2]], [[3, 4, 5]])

    def test_a_matrix_is_as_many_steps_as_it_has_rows(self):
        cache, k, v = filled(n=4)
        assert_holds(cache, k, v)

    def test_steps_stay_in_the_order_of_the_appends(self):
        cache, k, v = filled(n=2, max_len=6)
        more_k, more_v = np.full((3, 2), 7.0), np.full((3, 3), 9.0)
        cache.append(more_k, more_v)
        cache.append([8.0, 8.0], [1.0, 2.0, 3.0])
        assert_holds(cache, np.vstack([k, more_k, [[8, 8]]]), np.vstack([v, more_v, [[1, 2, 3]]]))

    @pytest.mark.parametrize("k", [[1.0, 2.0], [[1.0, 2.0]]])
    @pytest.mark.parametrize("v", [[3.0, 4.0, 5.0], [[3.0, 4.0, 5.0]]])
    def test_mixed_forms_of_one_step_count_as_one_step(self, k, v):
        cache = KVCache(4, 2, 3)
        cache.append(np.array(k), np.array(v))
        assert_holds(cache, [[1, 2]], [[3, 4, 5]])

    def test_a_row_of_size_one_is_one_step_not_several(self):
        cache = KVCache(4, 1, 1)
        cache.append(np.array([1.0]), np.array([[2.0]]))
        assert_holds(cache, [[1]], [[2]])
        with pytest.raises(ValueError, match=r"k had shape \(3,\)"):
            cache.append(np.zeros(3), np.zeros((3, 1)))

    def test_an_empty_append_changes_nothing_and_is_fine(self):
        cache, k, v = filled(n=5, max_len=5)
        cache.append(np.zeros((0, 2)), np.zeros((0, 3)))
        assert_holds(cache, k, v)
        empty = KVCache(1, 2, 3)
        empty.append(np.zeros((0, 2)), np.zeros((0, 3)))
        assert len(empty) == 0

    def test_the_last_free_slot_can_be_filled(self):
        cache, k, v = filled(n=4, max_len=5)
        cache.append([1.0, 2.0], [3.0, 4.0, 5.0])
        assert_holds(cache, np.vstack([k, [[1, 2]]]), np.vstack([v, [[3, 4, 5]]]))

    def test_append_returns_nothing(self):
        assert KVCache(4, 1, 1).append([1.0], [2.0]) is None

    @pytest.mark.parametrize(
        "dtype", [np.int8, np.uint16, np.int64, np.float16, np.float32, np.longdouble]
    )
    def test_real_numbers_of_every_kind_are_stored_as_float64(self, dtype):
        cache = KVCache(4, 2, 1)
        cache.append(np.array([[1, 2], [3, 4]], dtype=dtype), np.array([[5], [6]], dtype=dtype))
        assert_holds(cache, [[1, 2], [3, 4]], [[5], [6]])
        assert cache.keys().dtype == cache.values().dtype == np.float64

    def test_strided_reversed_and_broadcast_arrays_are_stored_as_they_read(self):
        cache = KVCache(9, 2, 3)
        k = np.arange(12.0).reshape(2, 6)[:, ::2].T[::-1]
        v = np.broadcast_to(np.arange(3.0), (3, 3))
        cache.append(k, v)
        assert_holds(cache, k, v)


class TestAppendRefusals:
    """Append stores everything, or raises and changes nothing."""

    @pytest.mark.parametrize(
        ("k", "v", "error", "words"),
        [
            # Too many steps for the room that is left.
            (
                np.ones((3, 2)),
                np.ones((3, 3)),
                ValueError,
                "add 3 steps to the 3 stored, 6 in all; .* max_len, 5",
            ),
            (np.ones((9, 2)), np.ones((9, 3)), ValueError, "add 9 steps to the 3 stored, 12 in all"),
            # k and v differ in their number of steps.
            (
                np.ones((2, 2)),
                np.ones((1, 3)),
                ValueError,
                "v has 1 steps; it must have as many as k, 2",
            ),
            (np.ones(2), np.ones((2, 3)), ValueError, "v has 2 steps; it must have as many as k, 1"),
            (np.ones((0, 2)), np.ones(3), ValueError, "v has 1 steps; it must have as many as k, 0"),
            (
                np.ones((1, 2)),
                np.ones((9, 3)),
                ValueError,
                "v has 9 steps; it must have as many as k, 1",
            ),
            # Shapes that are not steps of this cache.
            (
                np.ones((1, 3)),
                np.ones((1, 3)),
                ValueError,
                r"k had shape \(1, 3\); it must be \(2,\).*\(n, 2\)",
            ),
            (
                np.ones((1, 2)),
                np.ones((1, 2)),
                ValueError,
                r"v had shape \(1, 2\); it must be \(3,\).*\(n, 3\)",
            ),
            (np.ones((2, 1)), np.ones((2, 3)), ValueError, r"k had shape \(2, 1\)"),
            (np.ones(1), np.ones(3), ValueError, r"k had shape \(1,\)"),
            (np.ones((1, 1, 2)), np.ones((1, 3)), ValueError, r"k had shape \(1, 1, 2\)"),
            (1.0, np.ones(3), ValueError, r"k had shape \(\)"),
            ([], [], ValueError, r"k had shape \(0,\)"),
            (
                [[1.0, 2.0], [3.0]],
                np.ones((2, 3)),
                ValueError,
                "k was not an array.*rectangle of numbers",
            ),
            # Numbers that cannot be attended.
            (np.array([1.0, np.nan]), np.ones(3), ValueError, "k held NaN or infinity"),
            (np.ones(2), np.array([1.0, np.inf, 0.0]), ValueError, "v held NaN or infinity"),
            (np.ones(2), np.array([1.0, -np.inf, 0.0]), ValueError, "v held NaN or infinity"),
            (
                np.array([1, 2], dtype=np.longdouble) * np.longdouble("1e4000"),
                np.ones(3),
                ValueError,
                "k held NaN",
            ),
            (["a", "b"], np.ones(3), TypeError, "k had dtype <U1; it must hold real numbers"),
            (
                torch.ones(2, requires_grad=True),
                np.ones(3),
                ValueError,
                "k was not an array.*requires grad",
            ),
            (
                np.ones(2),
                np.ones(3) * 1j,
                TypeError,
                "v had dtype complex128; it must hold real numbers",
            ),
            (np.ones(2), np.ones(3, dtype=bool), TypeError, "v had dtype bool"),
            (None, np.ones(3), TypeError, "k had dtype object"),
        ],
    )
    def test_a_refused_append_says_why_and_changes_nothing(self, k, v, error, words):
        cache, stored_k, stored_v = filled(n=3, max_len=5)
        with pytest.raises(error, match=words):
            cache.append(k, v)
        assert_holds(cache, stored_k, stored_v)
        # Nor did anything reach the slots behind the stored steps.
        cache.append([1.0, 2.0], [3.0, 4.0, 5.0])
        assert_holds(cache, np.vstack([stored_k, [[1, 2]]]), np.vstack([stored_v, [[3, 4, 5]]]))

    def test_a_full_cache_refuses_one_more_step(self):
        cache, k, v = filled(n=5, max_len=5)
        with pytest.raises(ValueError, match="add 1 steps to the 5 stored, 6 in all; .* max_len, 5"):
            cache.append(np.ones(2), np.ones(3))
        assert_holds(cache, k, v)

    def test_a_value_that_fails_after_a_good_key_leaves_no_half_step(self):
        cache, k, v = filled(n=3, max_len=5)
        kept = cache.keys().copy()
        for bad in (np.ones((2, 4)), [[1, 2, np.nan]] * 2, np.ones((1, 3)), "no"):
            with pytest.raises((TypeError, ValueError), match="^v "):
                cache.append(np.full((2, 2), 99.0), bad)
        assert np.array_equal(cache.keys(), kept)
        assert_holds(cache, k, v)


class TestOwnership:
    """The cache owns its numbers: no array that went in or came out can change them."""

    def test_changing_the_arrays_that_were_appended_does_not_change_the_cache(self):
        k, v = np.ones((2, 2)), np.ones((2, 3))
        cache = KVCache(4, 2, 3)
        cache.append(k, v)
        k[:], v[:] = 99, 99
        assert_holds(cache, np.ones((2, 2)), np.ones((2, 3)))

    def test_changing_a_row_that_was_appended_does_not_change_the_cache(self):
        k, v = np.ones(2), np.ones(3)
        cache = KVCache(4, 2, 3)
        cache.append(k, v)
        k[:], v[:] = 99, 99
        assert_holds(cache, np.ones((1, 2)), np.ones((1, 3)))

    def test_append_and_decode_leave_their_inputs_alone(self):
        k, v, q = np.array([[3.0, -1.0]]), np.array([[2.0, 5.0, 7.0]]), np.array([4.0, 2.0])
        copies = k.copy(), v.copy(), q.copy()
        cache = KVCache(4, 2, 3)
        cache.append(k, v)
        decode_step(q, cache)
        assert all(np.array_equal(array, kept) for array, kept in zip((k, v, q), copies))

    def test_read_only_inputs_are_welcome(self):
        k, v, q = np.ones((1, 2)), np.ones((1, 3)), np.ones(2)
        for array in (k, v, q):
            array.flags.writeable = False
        cache = KVCache(4, 2, 3)
        cache.append(k, v)
        assert np.array_equal(decode_step(q, cache)[0], np.ones(3))

    @pytest.mark.parametrize("method", [KVCache.keys, KVCache.values])
    def test_what_is_handed_out_cannot_be_used_to_change_the_cache(self, method):
        cache, k, v = filled()
        for write in (
            write_directly,
            write_after_allowing_it,
            write_through_its_bases,
            write_through_torch,
        ):
            array = method(cache)
            try:
                write(array)
            except (ValueError, TypeError):
                pass  # refusing is as good as having handed out a copy
            assert_holds(cache, k, v)

    def test_what_is_handed_out_stays_what_it_was_after_later_appends(self):
        cache, k, v = filled(n=2, max_len=5)
        kept_keys, kept_values = cache.keys(), cache.values()
        cache.append(np.full((3, 2), 99.0), np.full((3, 3), 99.0))
        assert np.array_equal(kept_keys, k)
        assert np.array_equal(kept_values, v)

    def test_a_cache_can_be_fed_its_own_keys_and_values(self):
        cache, k, v = filled(n=2, max_len=6)
        cache.append(cache.keys(), cache.values())
        assert_holds(cache, np.vstack([k, k]), np.vstack([v, v]))

    def test_changing_an_output_does_not_change_the_cache(self):
        cache, k, v = filled(n=1)
        output, weights = decode_step(np.ones(2), cache)
        output[:], weights[:] = 99, 99
        assert_holds(cache, k, v)

    def test_two_caches_share_nothing_nor_does_a_deep_copy(self):
        first, second = KVCache(2, 1, 1), KVCache(2, 1, 1)
        first.append([1.0], [2.0])
        twin = copy.deepcopy(first)
        first.append([3.0], [4.0])
        assert len(second) == 0
        assert_holds(twin, [[1]], [[2]])
        twin.append([5.0], [6.0])
        assert_holds(first, [[1], [3]], [[2], [4]])


def write_directly(array):
    array[...] = 99


def write_after_allowing_it(array):
    array.flags.writeable = True
    array[...] = 99


def write_through_its_bases(array):
    owner = array
    while owner is not None:
        owner = owner.obj if isinstance(owner, memoryview) else getattr(owner, "base", None)
        if isinstance(owner, np.ndarray) and owner.flags.writeable:
            owner[...] = 99


def write_through_torch(array):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns when it ignores that an array is read-only
        torch.from_numpy(array)[...] = 99


class TestDecodeStep:
    """One query attends every stored step: softmax of K q / sqrt(d_k), times V."""

    def test_a_token_alone_in_the_cache_gets_its_own_value(self):
        cache = KVCache(4, 2, 3)
        cache.append([5.0, -3.0], [0.1, 0.2, 0.3])
        output, weights = decode_step([2.0, 7.0], cache)
        assert output.tolist() == [0.1, 0.2, 0.3]
        assert weights.tolist() == [1.0]

    def test_scores_are_divided_by_the_square_root_of_the_key_size(self):
        cache = KVCache(2, 16, 1)
        cache.append(np.vstack([np.ones(16), np.zeros(16)]), [[1.0], [0.0]])
        _, weights = decode_step(np.full(16, 0.25), cache)  # K q = 4, 0; scores 1, 0
        np.testing.assert_allclose(weights, np.exp([1, 0]) / np.exp([1, 0]).sum(), rtol=1e-14)

    def test_the_key_size_scales_the_scores_and_not_the_value_size(self):
        cache = KVCache(2, 1, 16)
        cache.append([[1.0], [0.0]], np.zeros((2, 16)))
        _, weights = decode_step([2.0], cache)
        np.testing.assert_allclose(weights, np.exp([2, 0]) / np.exp([2, 0]).sum(), rtol=1e-14)

    def test_shapes_and_dtypes_are_those_of_the_contract(self):
        cache, _, _ = filled(n=3, d_k=2, d_v=7)
        result = decode_step(np.ones(2, dtype=np.float32), cache)
        assert isinstance(result, tuple)
        output, weights = result
        assert (output.shape, output.dtype) == ((7,), np.float64)
        assert (weights.shape, weights.dtype) == ((3,), np.float64)

    def test_equal_scores_give_equal_weights_over_the_stored_steps_only(self):
        cache, _, v = filled(n=3, max_len=8)
        output, weights = decode_step(np.zeros(2), cache)
        np.testing.assert_allclose(weights, [1 / 3] * 3, rtol=1e-15)
        np.testing.assert_allclose(output, v.mean(axis=0), rtol=1e-14)

    def test_decoding_changes_neither_the_cache_nor_the_next_result(self):
        cache, k, v = filled()
        first, second = decode_step([1.0, 2.0], cache), decode_step([1.0, 2.0], cache)
        assert_holds(cache, k, v)
        assert all(np.array_equal(a, b) for a, b in zip(first, second))

    @PROPERTY
    @given(data=st.data())
    def test_it_equals_the_scalar_loop_however_the_steps_were_appended(self, data):
        d_k, d_v, max_len = (data.draw(st.integers(1, 8)) for _ in range(3))
        chunks = data.draw(
            st.lists(st.integers(0, 3), max_size=4).filter(lambda n: 1 <= sum(n) <= max_len)
        )
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
        size = data.draw(st.sampled_from([0.1, 1.0, 10.0]))
        cache, k, v = KVCache(max_len, d_k, d_v), np.zeros((0, d_k)), np.zeros((0, d_v))
        for n in chunks:
            new_k, new_v = rng.normal(size=(n, d_k)) * size, rng.normal(size=(n, d_v))
            cache.append(new_k, new_v) if n != 1 else cache.append(new_k[0], new_v[0])
            k, v = np.vstack([k, new_k]), np.vstack([v, new_v])
        assert_holds(cache, k, v)
        q = rng.normal(size=d_k)
        output, weights = decode_step(q, cache)
        expected_output, expected_weights = reference.decode_step(q.tolist(), k.tolist(), v.tolist())
        np.testing.assert_allclose(output, expected_output, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(weights, expected_weights, rtol=1e-10, atol=1e-15)

    def test_it_equals_the_attention_of_torch(self):
        cache, k, v = filled(n=20, max_len=32, d_k=8, d_v=8)
        q = np.linspace(-1, 1, 8)
        query, keys, values = (torch.from_numpy(a.copy())[None] for a in (q[None], k, v))
        expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values)
        np.testing.assert_allclose(decode_step(q, cache)[0], expected[0, 0].numpy(), rtol=1e-12)


class TestLargeScores:
    """However large the scores, the weights are those of the softmax, and finite."""

    @pytest.mark.parametrize("size", [1e3, 1e6, 1e100, 1e150])
    def test_scores_far_beyond_exp_give_finite_weights(self, size):
        cache = KVCache(3, 1, 1)
        cache.append([[size], [size], [-size]], [[1.0], [3.0], [100.0]])
        output, weights = decode_step([size], cache)
        assert weights.tolist() == [0.5, 0.5, 0.0]
        assert output.tolist() == [2.0]

    def test_scores_that_are_all_far_below_zero_do_not_vanish(self):
        cache = KVCache(2, 1, 1)
        cache.append([[-5000.0], [-5001.0]], [[1.0], [2.0]])
        _, weights = decode_step([1.0], cache)
        np.testing.assert_allclose(weights, np.exp([0, -1]) / np.exp([0, -1]).sum(), rtol=1e-12)

    def test_small_differences_between_large_scores_are_kept(self):
        cache = KVCache(2, 1, 1)
        cache.append([[1e6], [1e6 + 1]], [[1.0], [2.0]])
        _, weights = decode_step([1.0], cache)
        np.testing.assert_allclose(weights, np.exp([0, 1]) / np.exp([0, 1]).sum(), rtol=1e-9)

    def test_scores_that_overflow_float64_itself_still_rank(self):
        largest = np.finfo(np.float64).max
        cache = KVCache(4, 2, 1)
        cache.append(
            np.array([[1, 1], [1, 1], [1, 0], [-1, -1]]) * largest, [[1.0], [3.0], [50.0], [90.0]]
        )
        output, weights = decode_step(np.ones(2) * largest, cache)
        assert weights.tolist() == [0.5, 0.5, 0.0, 0.0]
        assert output.tolist() == [2.0]

    def test_a_score_that_overflows_leaves_the_others_their_differences(self):
        cache = KVCache(3, 1, 1)
        cache.append([[-1e308], [1e-16], [2e-16]], [[1.0], [2.0], [3.0]])
        _, weights = decode_step([1e16], cache)  # scores -inf, 1, 2
        np.testing.assert_allclose(weights, [0, *np.exp([1, 2]) / np.exp([1, 2]).sum()], rtol=1e-9)

    def test_a_caller_who_lets_numpy_raise_on_underflow_and_overflow_gets_the_same_weights(self):
        cache = KVCache(3, 1, 1)
        cache.append([[1e200], [0.0], [-1e200]], [[1.0], [3.0], [100.0]])
        for q in ([1e200], [5e-198]):
            expected = decode_step(q, cache)
            with np.errstate(all="raise"):
                output, weights = decode_step(q, cache)
            assert np.array_equal(output, expected[0])
            assert np.array_equal(weights, expected[1])

    def test_large_values_are_averaged_without_overflow(self):
        cache = KVCache(2, 1, 1)
        cache.append([[0.0], [0.0]], [[1e308], [1.2e308]])
        np.testing.assert_allclose(decode_step([1.0], cache)[0], [1.1e308], rtol=1e-14)


class TestDecodeRefusals:
    """Decoding needs a cache with a step in it and a finite query of the right size."""

    def test_an_empty_cache_is_refused(self):
        with pytest.raises(ValueError, match="cache was empty; it must hold at least one step"):
            decode_step(np.zeros(2), KVCache(4, 2, 3))

    @pytest.mark.parametrize("cache", [None, {}, (np.ones((1, 2)), np.ones((1, 3)))])
    def test_something_that_is_no_cache_is_refused(self, cache):
        with pytest.raises(TypeError, match=f"cache was .*{type(cache).__name__}.*KVCache"):
            decode_step(np.zeros(2), cache)

    @pytest.mark.parametrize(
        ("q", "error", "words"),
        [
            (np.zeros(3), ValueError, r"q had shape \(3,\); it must be \(2,\)"),
            (np.zeros((1, 2)), ValueError, r"q had shape \(1, 2\); it must be \(2,\)"),
            (0.0, ValueError, r"q had shape \(\); it must be \(2,\)"),
            ([1.0, np.nan], ValueError, "q held NaN or infinity; every number must be finite"),
            ([1.0, -np.inf], ValueError, "q held NaN or infinity"),
            (["a", "b"], TypeError, "q had dtype <U1; it must hold real numbers"),
            ([1j, 1], TypeError, "q had dtype complex128"),
            (None, TypeError, "q had dtype object"),
        ],
    )
    def test_a_query_that_cannot_be_is_refused(self, q, error, words):
        cache, k, v = filled()
        with pytest.raises(error, match=words):
            decode_step(q, cache)
        assert_holds(cache, k, v)


class TestCost:
    """A step costs what the stored steps cost, not what the buffer holds."""

    def test_appending_reading_and_decoding_never_copy_the_whole_buffer(self):
        cache, _, _ = filled(n=8, max_len=20_000, d_k=8, d_v=8)
        buffer_bytes = 2 * 20_000 * 8 * 8
        tracemalloc.start()
        try:
            cache.append(np.ones(8), np.ones(8))
            decode_step(np.ones(8), cache)
            cache.keys(), cache.values()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < buffer_bytes / 20


class TestWithoutTorch:
    """numpy is all that the cache needs."""

    def run(self, program):
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def test_importing_kvlib_does_not_import_torch(self):
        assert self.run("import sys, kvlib; print('torch' in sys.modules)") == "False\n"

    def test_the_torch_functions_are_listed_before_torch_is_imported(self):
        program = "import sys, kvlib; print({*kvlib.__all__} <= {*dir(kvlib)}, 'torch' in sys.modules)"
        assert self.run(program) == "True False\n"

    def test_the_cache_works_where_torch_is_not_installed(self):
        program = (
            "import sys; sys.modules['torch'] = None\n"
            "from kvlib import KVCache, decode_step\n"
            "cache = KVCache(4, 1, 1); cache.append([1.0], [2.0]); print(decode_step([1.0], cache)[0])\n"
        )
        assert self.run(program) == "[2.]\n"

    @pytest.mark.parametrize("name", ["kv_cache_step", "kv_cache_attention_step"])
    def test_asking_for_a_torch_function_says_that_torch_is_missing(self, name):
        program = (
            "import sys; sys.modules['torch'] = None\n"
            f"try: from kvlib import {name}\n"
            "except ImportError as error: print(error)\n"
        )
        assert self.run(program).startswith(
            f"kvlib.{name} needs torch, which is not installed; pip install"
        )

    def test_a_name_that_does_not_exist_is_an_attribute_error(self):
        program = "import kvlib\ntry: kvlib.no_such_name\nexcept AttributeError as error: print(error)"
        assert self.run(program) == "module 'kvlib' has no attribute 'no_such_name'\n"
