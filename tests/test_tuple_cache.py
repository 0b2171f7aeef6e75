"""kv_cache_step: a cache that is a tuple, one token at a time."""

import itertools

import pytest
import reference
import torch
from cases import PROPERTY, assert_same_bits
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.functional import scaled_dot_product_attention

from kvlib import kv_cache_step


def sequence(B=2, T=5, D=4, D_v=3, dtype=torch.float64, seed=0):
    """Return queries, keys and values of T tokens a row."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(B, T, size, generator=generator, dtype=torch.float64).to(dtype)
        for size in (D, D, D_v)
    )


def decode(q, k, v, cache=None):
    """Run the step token by token; return all outputs as one tensor, and the last cache."""
    outputs = []
    for t in range(q.shape[1]):
        output, cache = kv_cache_step(q[:, t : t + 1], k[:, t : t + 1], v[:, t : t + 1], cache)
        outputs.append(output)
    return torch.cat(outputs, dim=1), cache


def token(**changes):
    """Return the arguments of a step on a cache of two tokens."""
    q, k, v = sequence(T=3)
    args = {"q_new": q[:, 2:], "k_new": k[:, 2:], "v_new": v[:, 2:], "cache": (k[:, :2], v[:, :2])}
    return args | changes


def tensors_of(args):
    return [args["q_new"], args["k_new"], args["v_new"], *(args["cache"] or ())]


class TestFirstToken:
    """Without a cache, the token's own key and value become the cache, and it attends itself alone."""

    def test_the_cache_holds_the_key_and_the_value_of_the_token(self):
        q, k, v = sequence(T=1)
        _, cache = kv_cache_step(q, k, v, cache=None)
        assert isinstance(cache, tuple)
        assert_same_bits(cache[0], k)
        assert_same_bits(cache[1], v)

    def test_the_output_is_the_value_of_the_token(self):
        q, k, v = sequence(T=1)
        assert torch.equal(kv_cache_step(q * 100, k, v, None)[0], v)

    def test_shapes_are_those_of_the_example(self):
        q, k, v = sequence(B=1, T=2, D=4, D_v=4, dtype=torch.float32)
        output, cache = kv_cache_step(q[:, :1], k[:, :1], v[:, :1], cache=None)
        assert output.shape == cache[0].shape == cache[1].shape == (1, 1, 4)
        output, cache = kv_cache_step(q[:, 1:], k[:, 1:], v[:, 1:], cache=cache)
        assert output.shape == (1, 1, 4)
        assert cache[0].shape == cache[1].shape == (1, 2, 4)

    def test_an_empty_cache_is_as_good_as_none(self):
        q, k, v = sequence(T=1)
        output, cache = kv_cache_step(q, k, v, (k[:, :0], v[:, :0]))
        expected, expected_cache = kv_cache_step(q, k, v, None)
        assert_same_bits(output, expected)
        for actual, wanted in zip(cache, expected_cache):
            assert_same_bits(actual, wanted)


class TestLaterTokens:
    """Key and value go behind those in the cache; the query attends them all, and needs no mask."""

    def test_the_new_key_and_value_come_last_and_the_old_ones_stay_as_they_were(self):
        args = token()
        _, (keys, values) = kv_cache_step(**args)
        assert_same_bits(keys, torch.cat([args["cache"][0], args["k_new"]], dim=1))
        assert_same_bits(values, torch.cat([args["cache"][1], args["v_new"]], dim=1))
        assert_same_bits(keys[:, -1:], args["k_new"])
        assert_same_bits(values[:, -1:], args["v_new"])

    def test_scores_are_divided_by_the_square_root_of_the_key_size(self):
        q = torch.full((1, 1, 16), 0.25, dtype=torch.float64)
        k_old, k_new = torch.ones(1, 1, 16).double(), torch.zeros(1, 1, 16).double()
        v_old, v_new = torch.ones(1, 1, 1).double(), torch.zeros(1, 1, 1).double()
        output, _ = kv_cache_step(q, k_new, v_new, (k_old, v_old))  # q.k = 4, 0; scores 1, 0
        torch.testing.assert_close(output.item(), torch.tensor([1.0, 0]).double().softmax(0)[0].item())

    def test_rows_of_the_batch_do_not_mix(self):
        q, k, v = sequence(B=3)
        together, cache = decode(q, k, v)
        for b in range(3):
            alone, alone_cache = decode(q[b : b + 1], k[b : b + 1], v[b : b + 1])
            torch.testing.assert_close(together[b : b + 1], alone, rtol=1e-14, atol=1e-15)
            assert all(torch.equal(a[b : b + 1], c) for a, c in zip(cache, alone_cache))
            changed = q.clone(), k.clone(), v.clone()
            for tensor in changed:
                tensor[b] = torch.nan
            others = [row for row in range(3) if row != b]
            assert_same_bits(decode(*changed)[0][others], together[others])

    def test_large_scores_stay_finite(self):
        q, k, v = sequence(T=4)
        output, _ = decode(q * 1e4, k * 1e4, v)
        assert output.isfinite().all()


class TestFullAttention:
    """Token by token equals causal attention over the whole sequence in one shot: it only saves work."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_it_equals_the_causal_attention_of_torch(self, dtype):
        q, k, v = sequence(B=3, T=12, D=8, D_v=8, dtype=dtype)
        output, (keys, values) = decode(q, k, v)
        torch.testing.assert_close(output, scaled_dot_product_attention(q, k, v, is_causal=True))
        assert_same_bits(keys, k)
        assert_same_bits(values, v)

    @PROPERTY
    @given(*(st.integers(1, 5) for _ in range(4)), st.integers(0, 2**32))
    def test_it_equals_the_scalar_loop(self, B, T, D, D_v, seed):
        q, k, v = sequence(B, T, D, D_v, seed=seed)
        output, _ = decode(q, k, v)
        expected = [reference.causal_attention(*(x[b].tolist() for x in (q, k, v))) for b in range(B)]
        expected = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(output, expected, rtol=1e-11, atol=1e-13)

    def test_a_decode_can_be_cut_in_two_at_any_token(self):
        q, k, v = sequence()
        whole, _ = decode(q, k, v)
        for cut in range(1, q.shape[1]):
            _, cache = decode(q[:, :cut], k[:, :cut], v[:, :cut])
            rest, _ = decode(q[:, cut:], k[:, cut:], v[:, cut:], cache)
            assert_same_bits(rest, whole[:, cut:])

    def test_its_gradients_are_those_of_full_attention(self):
        inputs = [x.requires_grad_() for x in sequence()]
        weight = sequence(seed=1)[2]
        actual = torch.autograd.grad((decode(*inputs)[0] * weight).sum(), inputs)
        full = scaled_dot_product_attention(*inputs, is_causal=True)
        expected = torch.autograd.grad((full * weight).sum(), inputs)
        for a, e in zip(actual, expected):
            torch.testing.assert_close(a, e)

    def test_it_is_twice_differentiable_in_every_input(self):
        def step(q, k, v, keys, values):
            output, cache = kv_cache_step(q, k, v, (keys, values))
            return output, *cache

        inputs = [x.detach().clone().requires_grad_() for x in tensors_of(token())]
        assert gradcheck(step, inputs)
        assert gradgradcheck(step, inputs)


class TestOwnership:
    """The caller's tensors are left as they were, and nothing that comes back shares their memory."""

    @pytest.mark.parametrize("first", [True, False])
    def test_no_input_is_modified_and_no_output_shares_memory_with_one(self, first):
        args = token(**({"cache": None} if first else {}))
        before = [(x, x._version, x.clone()) for x in tensors_of(args)]
        output, cache = kv_cache_step(**args)
        for tensor, version, copy in before:
            assert tensor._version == version
            assert_same_bits(tensor, copy)
        storages = [x.untyped_storage().data_ptr() for x in (output, *cache)]
        assert len(set(storages)) == 3
        assert not {x.untyped_storage().data_ptr() for x in tensors_of(args)} & set(storages)

    def test_changing_the_new_key_and_value_later_does_not_change_the_cache(self):
        for args in (token(cache=None), token()):
            _, cache = kv_cache_step(**args)
            kept = [x.clone() for x in cache]
            args["k_new"].fill_(99)
            args["v_new"].fill_(99)
            assert all(torch.equal(a, b) for a, b in zip(cache, kept))

    def test_a_cache_can_be_continued_twice(self):
        q, k, v = sequence(T=4)
        _, cache = decode(q[:, :2], k[:, :2], v[:, :2])
        first = [decode(q[:, t : t + 1], k[:, t : t + 1], v[:, t : t + 1], cache)[1] for t in (2, 3)]
        assert cache[0].shape[1] == 2
        for t, (keys, values) in zip((2, 3), first):
            assert_same_bits(keys, torch.cat([k[:, :2], k[:, t : t + 1]], dim=1))
            assert_same_bits(values, torch.cat([v[:, :2], v[:, t : t + 1]], dim=1))

    def test_transposed_and_expanded_inputs_work(self):
        plain = token()
        strange = {
            name: value.mT.contiguous().mT if isinstance(value, torch.Tensor) else value
            for name, value in plain.items()
        }
        torch.testing.assert_close(kv_cache_step(**strange)[0], kv_cache_step(**plain)[0])
        shared = tuple(x[:1].expand(2, -1, -1) for x in plain["cache"])
        copied = tuple(x.contiguous() for x in shared)
        torch.testing.assert_close(
            kv_cache_step(**plain | {"cache": shared})[0], kv_cache_step(**plain | {"cache": copied})[0]
        )


class TestPrecision:
    """Scores and softmax are computed in float32 or wider; results have the dtype of the inputs."""

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_is_as_good_as_rounding_the_exact_result(self, dtype):
        q, k, v = sequence(B=4, T=16, D=32, D_v=8, dtype=dtype)
        output, cache = decode(q, k, v)
        exact, _ = decode(q.double(), k.double(), v.double())
        assert output.dtype == cache[0].dtype == cache[1].dtype == dtype
        half_a_step = torch.finfo(dtype).eps / 2
        torch.testing.assert_close(output.double(), exact, rtol=half_a_step * 1.01, atol=1e-6)

    def test_autocast_changes_nothing(self):
        q, k, v = sequence(B=4, T=16, D=32, D_v=8, dtype=torch.float32)
        expected, _ = decode(q, k, v)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output, _ = decode(q, k, v)
        assert torch.equal(output, expected)

    @pytest.mark.parametrize(
        "dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
    )
    def test_narrow_dtypes_keep_the_cache_bit_for_bit(self, dtype):
        q, k, v = sequence(T=3, dtype=dtype)
        output, (keys, values) = decode(q, k, v)
        assert output.dtype == dtype
        assert_same_bits(keys, k)
        assert_same_bits(values, v)

    def test_a_dot_product_beyond_float16_does_not_overflow(self):
        q = torch.full((1, 1, 64), 64.0, dtype=torch.float16)
        v = torch.tensor([[[1.0]]], dtype=torch.float16)
        output, _ = kv_cache_step(q, q, v * 2, (q, v))
        assert output.item() == 1.5

    def test_float64_is_computed_in_float64(self):
        q, k, v = sequence()
        exact = scaled_dot_product_attention(q, k, v, is_causal=True)
        assert (decode(q, k, v)[0] - exact).abs().max() < 1e-14


class TestBadInput:
    """An error names the argument, what it was, and what it must be, and leaves everything as it was."""

    x = torch.zeros(2, 1, 4, dtype=torch.float64)
    y = torch.zeros(2, 1, 3, dtype=torch.float64)

    @pytest.mark.parametrize("n", [0, 2, 3])
    def test_more_or_less_than_one_new_token_is_refused_since_it_would_see_its_future(self, n):
        q, k, v = sequence(T=n)
        for cache in (None, token()["cache"]):
            with pytest.raises(
                ValueError, match=f"held {n} new tokens; .* exactly 1: .* no mask.* own future"
            ):
                kv_cache_step(q, k, v, cache)

    @pytest.mark.parametrize(
        ("changes", "error", "words"),
        [
            (
                {"q_new": x[0]},
                ValueError,
                r"q_new had shape \(1, 4\); it must have 3 dimensions, \(B, Q, D\)",
            ),
            (
                {"k_new": x[None]},
                ValueError,
                r"k_new had shape \(1, 2, 1, 4\); it must have 3 dimensions",
            ),
            ({"v_new": y[0, 0]}, ValueError, r"v_new had shape \(3,\); it must have 3 dimensions"),
            ({"k_new": y}, ValueError, r"k_new had shape \(2, 1, 3\), D = 3; .* D = 4, as in q_new"),
            ({"k_new": x[:1]}, ValueError, r"k_new had shape \(1, 1, 4\), B = 1; .* B = 2, as in q_new"),
            ({"v_new": y[:1]}, ValueError, r"v_new had shape \(1, 1, 3\), B = 1; .* B = 2, as in q_new"),
            ({"v_new": y.expand(2, 2, 3)}, ValueError, r"v_new had shape \(2, 2, 3\), Q = 2; .* Q = 1"),
            (
                {"v_new": x},
                ValueError,
                r"cache\[1\] had shape \(2, 2, 3\), D_v = 3; .* D_v = 4, as in v_new",
            ),
            (
                {"cache": (y, y)},
                ValueError,
                r"cache\[0\] had shape \(2, 1, 3\), D = 3; .* D = 4, as in q_new",
            ),
            (
                {"cache": (x[:1], y[:1])},
                ValueError,
                r"cache\[0\] had shape \(1, 1, 4\), B = 1; .* B = 2",
            ),
            ({"cache": (x, y[:, :0])}, ValueError, r"cache\[1\] had shape \(2, 0, 3\), T = 0; .* T = 1"),
            (
                {"cache": (x[0], y)},
                ValueError,
                r"cache\[0\] had shape \(1, 4\); it must have 3 dimensions",
            ),
            (
                {"cache": [x, y]},
                TypeError,
                r"cache was a list; it must be a tuple \(keys, values\), or None",
            ),
            ({"cache": (x,)}, TypeError, r"cache was a tuple of 1; it must be a tuple \(keys, values\)"),
            ({"cache": (x, y, y)}, TypeError, "cache was a tuple of 3"),
            ({"cache": x}, TypeError, "cache was a Tensor"),
            ({"cache": (x, None)}, TypeError, r"cache\[1\] was a NoneType; it must be a torch.Tensor"),
            ({"q_new": [[[1.0]]]}, TypeError, "q_new was a list; it must be a torch.Tensor"),
            ({"v_new": y.numpy()}, TypeError, "v_new was a ndarray; it must be a torch.Tensor"),
            ({"q_new": x.long()}, TypeError, "q_new had dtype torch.int64; it must be a floating dtype"),
            ({"v_new": y.bool()}, TypeError, "v_new had dtype torch.bool; it must be a floating dtype"),
            ({"v_new": y.cfloat()}, TypeError, "v_new had dtype torch.complex64; it must be a floating"),
            (
                {"k_new": x.float()},
                ValueError,
                "k_new had dtype torch.float32; .* torch.float64, as in q_new",
            ),
            (
                {"cache": (x.half(), y)},
                ValueError,
                r"cache\[0\] had dtype torch.float16; .* torch.float64",
            ),
            (
                {"cache": (x, y.float())},
                ValueError,
                r"cache\[1\] had dtype torch.float32; .* torch.float64",
            ),
            (
                {"cache": (x.to("meta"), y)},
                ValueError,
                r"cache\[0\] had device meta; it must be cpu, as in q_new",
            ),
        ],
    )
    def test_a_step_that_cannot_be_is_refused(self, changes, error, words):
        args = token(**changes)
        given = [args["q_new"], args["k_new"], args["v_new"], *args["cache"]]
        before = [(x, x._version, x.shape) for x in given if isinstance(x, torch.Tensor)]
        with pytest.raises(error, match=words):
            kv_cache_step(**args)
        assert all(x._version == version and x.shape == shape for x, version, shape in before)

    @pytest.mark.parametrize(
        ("letter", "name", "shape"),
        [
            ("B", "q_new", (0, 1, 4, 3)),
            ("D", "q_new", (2, 1, 0, 3)),
            ("D_v", "v_new", (2, 1, 4, 0)),
        ],
    )
    def test_sizes_of_zero_are_refused(self, letter, name, shape):
        q, k, v = sequence(*shape)
        with pytest.raises(ValueError, match=f"^{name} had .* {letter} = 0; .* {letter} = 1 or more"):
            kv_cache_step(q, k, v, None)


def test_every_shape_of_the_contract_comes_back():
    for B, T, D, D_v in itertools.product((1, 3), (1, 2, 4), (1, 5), (1, 2)):
        output, (keys, values) = decode(*sequence(B, T, D, D_v))
        assert output.shape == (B, T, D_v)
        assert keys.shape == (B, T, D)
        assert values.shape == (B, T, D_v)
