"""kv_cache_attention_step_: the same step, written into the caches it is given."""

import math
from itertools import product

import pytest
import torch
from cases import (
    FLOATS,
    PROPERTY,
    RAGGED,
    appended_slots,
    assert_same_bits,
    assert_unchanged,
    batch,
    batches,
    bits,
    per_slot,
    poisoned,
    rounding,
    snapshot,
    with_gradients,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from kvlib import kv_cache_attention_step, kv_cache_attention_step_

# torch's own forward derivatives use it.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

CACHES = ("key_cache", "value_cache")
DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
#: Every way to call the step.
SWITCHES = [
    {"need_weights": need_weights, "check_data": check_data}
    for need_weights, check_data in product((True, False), (True, False))
]
any_batch = st.sampled_from(DTYPES).flatmap(batches)
MANY = settings(PROPERTY, max_examples=400)


def with_copies(args):
    """Return the same batch with caches of its own."""
    return args | {name: args[name].clone() for name in CACHES}


def dirty(args):
    """Fill with NaN and infinity whatever no query may read."""
    return poisoned(args, key=math.nan, value=math.inf, query=math.nan)


def assert_close(actual, expected, args):
    """Compare two contexts, or two tensors of weights, that were computed in different ways."""
    atol = rounding(args)
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=atol)


class TestSameResults:
    """Whatever the switches say, the results are those of kv_cache_attention_step."""

    @MANY
    @given(any_batch)
    def test_every_bit_is_that_of_the_functional_step(self, args):
        args = dirty(args)
        expected = kv_cache_attention_step(**args)
        result = kv_cache_attention_step_(**with_copies(args))
        assert result.keys() == expected.keys()
        assert torch.equal(result.pop("lengths"), expected["lengths"])
        for name, value in result.items():
            assert_same_bits(value, expected[name])

    @MANY
    @given(any_batch)
    def test_without_weights_the_context_is_the_same_up_to_rounding(self, args):
        args = dirty(args)
        expected = kv_cache_attention_step(**args)
        result = kv_cache_attention_step_(**with_copies(args), need_weights=False)
        assert result.keys() == expected.keys() - {"attention"}
        assert torch.equal(result["lengths"], expected["lengths"])
        for name in CACHES:
            assert_same_bits(result[name], expected[name])
        assert result["context"].dtype == expected["context"].dtype
        assert_close(result["context"], expected["context"], args)

    @MANY
    @given(any_batch)
    def test_without_checks_the_results_are_the_same_up_to_rounding(self, args):
        args = dirty(args)
        expected = kv_cache_attention_step(**args)
        result = kv_cache_attention_step_(**with_copies(args), check_data=False)
        assert result.keys() == expected.keys()
        assert torch.equal(result["lengths"], expected["lengths"])
        for name in CACHES:
            assert_same_bits(result[name], expected[name])
        for name in ("attention", "context"):
            assert result[name].dtype == expected[name].dtype
            assert_close(result[name], expected[name], args)

    @pytest.mark.parametrize("check_data", [True, False])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_idle_queries_give_zeros_with_and_without_weights(self, dtype, check_data):
        args = dirty(batch(**RAGGED, dtype=dtype))
        idle = ~args["append_mask"]
        for need_weights in (True, False):
            result = kv_cache_attention_step_(
                **with_copies(args), need_weights=need_weights, check_data=check_data
            )
            for name in result.keys() & {"attention", "context"}:
                of_idle = bits(result[name]).transpose(1, 2)[idle]
                assert torch.equal(of_idle, torch.zeros_like(of_idle))

    @pytest.mark.parametrize("switches", SWITCHES)
    def test_decoding_in_place_equals_decoding_with_copies(self, switches):
        args = batch([1, 0, 2], [4, 4, 4], 4, 6)
        whole = kv_cache_attention_step(**args)
        state, contexts = with_copies(args), []
        for start, end in ((0, 1), (1, 1), (1, 3), (3, 4)):
            chunk = {name: args[name][:, :, start:end] for name in FLOATS[:3]}
            chunk["append_mask"] = args["append_mask"][:, start:end]
            result = kv_cache_attention_step_(**state | chunk, **switches)
            state["lengths"] = result["lengths"]
            contexts.append(result["context"])
        for name in CACHES:
            assert_same_bits(state[name], whole[name])
        assert torch.equal(state["lengths"], whole["lengths"])
        assert_close(torch.cat(contexts, dim=2), whole["context"], args)

    @pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.uint64])
    @pytest.mark.parametrize("switches", SWITCHES)
    def test_lengths_keep_their_dtype(self, dtype, switches):
        args = batch(**RAGGED)
        expected = kv_cache_attention_step(**args)["lengths"].to(dtype)
        args["lengths"] = args["lengths"].to(dtype)
        lengths = kv_cache_attention_step_(**args, **switches)["lengths"]
        assert lengths.dtype == dtype
        assert lengths.tolist() == expected.tolist()


class TestCachesThatAreWritten:
    """The caches get the appended slots, and keep every other bit; nothing else is written."""

    @pytest.mark.parametrize("switches", SWITCHES)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_unwritten_slots_keep_every_bit(self, dtype, switches):
        args = batch(**RAGGED, dtype=dtype)
        for name in CACHES:
            integer = bits(args[name]).dtype
            n_bytes = args[name].numel() * args[name].element_size()
            pattern = torch.arange(n_bytes).mul(37).to(torch.uint8).view(integer)  # NaNs of all kinds
            unread = per_slot(torch.arange(5) >= args["lengths"][:, None])
            held = torch.where(unread, pattern.reshape(args[name].shape), bits(args[name]))
            args[name] = held.view(dtype)
        before = {name: bits(args[name]).clone() for name in CACHES}
        kv_cache_attention_step_(**args, **switches)
        for name in CACHES:
            kept = (~per_slot(appended_slots(args))).expand_as(args[name])
            assert torch.equal(bits(args[name])[kept], before[name][kept])
            assert not torch.equal(bits(args[name]), before[name])

    @pytest.mark.parametrize("switches", SWITCHES)
    @pytest.mark.parametrize("shape", [RAGGED, RAGGED | {"n_queries": 0, "counts": (0,) * 5}])
    def test_the_very_caches_are_returned_and_nothing_else_is_written(self, shape, switches):
        args = batch(**shape)
        others = {name: value for name, value in args.items() if name not in CACHES}
        before = snapshot(others)
        result = kv_cache_attention_step_(**args, **switches)
        assert_unchanged(others, before)
        for name in CACHES:
            assert result[name] is args[name]
        inputs = {others[name].untyped_storage().data_ptr() for name in others.keys() - {"options"}}
        inputs |= {args[name].untyped_storage().data_ptr() for name in CACHES}
        fresh = [
            result[name].untyped_storage().data_ptr()
            for name in result.keys() - set(CACHES)
            if result[name].numel()
        ]
        assert len(set(fresh)) == len(fresh)
        assert not inputs & set(fresh)

    @pytest.mark.parametrize("switches", SWITCHES)
    def test_the_caches_may_be_the_first_slots_of_larger_buffers(self, switches):
        args = batch(**RAGGED)
        expected = kv_cache_attention_step(**args)
        buffers = {}
        for name in CACHES:
            buffers[name] = torch.full((8, 2, 9, args[name].shape[3]), math.nan, dtype=torch.float64)
            buffers[name][:5, :, :5] = args[name]
        before = {name: bits(buffer).clone() for name, buffer in buffers.items()}
        views = {name: buffer[:5, :, :5] for name, buffer in buffers.items()}
        result = kv_cache_attention_step_(**args | views, **switches)
        for name, buffer in buffers.items():
            before[name][:5, :, :5] = bits(expected[name])
            assert torch.equal(bits(buffer), before[name])
        assert_close(result["context"], expected["context"], args)

    @pytest.mark.parametrize("switches", SWITCHES)
    @pytest.mark.parametrize("order", [(0, 2, 1, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
    def test_the_caches_may_lie_in_memory_in_any_order(self, order, switches):
        args = batch(**RAGGED)
        expected = kv_cache_attention_step(**args)
        back = [order.index(axis) for axis in range(4)]
        for name in CACHES:
            args[name] = args[name].permute(order).contiguous().permute(back)
            assert not args[name].is_contiguous()
        result = kv_cache_attention_step_(**args, **switches)
        for name in CACHES:
            assert result[name] is args[name]
            assert_same_bits(args[name], expected[name])
        assert_close(result["context"], expected["context"], args)

    @pytest.mark.parametrize("switches", SWITCHES)
    def test_keys_and_values_may_take_turns_in_one_buffer(self, switches):
        args = batch(**RAGGED, D=3, D_v=3)
        expected = kv_cache_attention_step(**args)
        both = torch.stack([args[name] for name in CACHES], dim=3)
        views = dict(zip(CACHES, both.unbind(3)))
        kv_cache_attention_step_(**args | views, **switches)
        for name in CACHES:
            assert_same_bits(views[name], expected[name])

    def test_parameters_can_be_written_where_no_gradient_is_recorded(self):
        args = batch(**RAGGED)
        expected = kv_cache_attention_step(**args)
        caches = {name: torch.nn.Parameter(args[name].clone()) for name in CACHES}
        with torch.no_grad():
            result = kv_cache_attention_step_(**args | caches)
        assert result["key_cache"] is caches["key_cache"]
        assert_same_bits(result["context"], expected["context"])


def refuses(args, error, words, **switches):
    """Assert that a call is refused, and that neither cache has changed."""
    before = {name: (args[name], bits(args[name]).clone()) for name in CACHES}
    versions = {name: args[name]._version for name in CACHES}
    with pytest.raises(error, match=words):
        kv_cache_attention_step_(**args, **switches)
    for name, (cache, as_it_was) in before.items():
        assert torch.equal(bits(cache), as_it_was)
        assert cache._version == versions[name], f"{name} was written"


class TestRefusals:
    """A refused call has written nothing."""

    bad = {
        "a shape": {"value_cache": torch.zeros(5, 2, 4, 2, dtype=torch.float64)},
        "a dtype": {"new_value": torch.zeros(5, 2, 3, 2)},
        "an option": {"options": {"scal": 1.0}},
        "a scale": {"options": {"scale": 0.0}},
        "a dtype of lengths": {"lengths": torch.zeros(5)},
        "a dtype of append_mask": {"append_mask": torch.ones(5, 3, dtype=torch.int64)},
        "head counts": {"query": torch.zeros(5, 3, 3, 3, dtype=torch.float64)},
        "no tensor": {"value_cache": None},
    }
    bad_data = {
        "a negative length": ({"lengths": torch.tensor([0, 0, 2, 5, -1])}, r"lengths\[4\] was -1"),
        "a length beyond M": ({"lengths": torch.tensor([0, 0, 2, 6, 3])}, r"lengths\[3\] was 6"),
        "an overflow": (
            {"lengths": torch.tensor([0, 0, 2, 5, 5])},
            r"appends 1 slots to lengths\[4\] = 5",
        ),
        "no prefix": (
            {"append_mask": torch.tensor([[False] * 3] * 4 + [[False, True, False]])},
            r"\[4\]",
        ),
    }

    @pytest.mark.parametrize("switches", SWITCHES)
    @pytest.mark.parametrize("what", bad)
    def test_arguments_that_the_functional_step_refuses(self, what, switches):
        args = batch(**RAGGED) | self.bad[what]
        with pytest.raises((TypeError, ValueError)) as expected:
            kv_cache_attention_step(**args)
        caches = {name: args[name] for name in CACHES if args[name] is not None}
        before = {name: bits(cache).clone() for name, cache in caches.items()}
        with pytest.raises(expected.type) as refused:
            kv_cache_attention_step_(**args, **switches)
        assert str(refused.value) == str(expected.value)
        for name, cache in caches.items():
            assert torch.equal(bits(cache), before[name])

    @pytest.mark.parametrize("need_weights", [True, False])
    @pytest.mark.parametrize("what", bad_data)
    def test_numbers_that_the_functional_step_refuses(self, what, need_weights):
        changes, words = self.bad_data[what]
        refuses(batch(**RAGGED) | changes, ValueError, words, need_weights=need_weights)

    @pytest.mark.parametrize("what", bad_data)
    def test_unchecked_numbers_are_not_refused(self, what):
        changes, _ = self.bad_data[what]
        args = batch(**RAGGED) | changes
        result = kv_cache_attention_step_(**args, check_data=False)
        assert result["key_cache"] is args["key_cache"]

    @pytest.mark.parametrize("switches", SWITCHES)
    @pytest.mark.parametrize("name", FLOATS)
    def test_recording_gradients_is_refused(self, name, switches):
        args = batch(**RAGGED)
        args[name] = args[name].requires_grad_()
        words = r"a gradient is being recorded.*use kv_cache_attention_step, or torch.no_grad\(\)"
        refuses(args, RuntimeError, words, **switches)
        for without_gradients in (torch.no_grad, torch.inference_mode):
            with without_gradients():
                result = kv_cache_attention_step_(**with_copies(args), **switches)
            assert not result["context"].requires_grad

    @pytest.mark.parametrize("switches", SWITCHES)
    @pytest.mark.parametrize("name", FLOATS)
    def test_forward_derivatives_are_refused(self, name, switches):
        args = batch(**RAGGED)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(args[name], torch.ones_like(args[name]))
            refuses(args | {name: dual}, RuntimeError, "use kv_cache_attention_step, or", **switches)

    @pytest.mark.parametrize("switches", SWITCHES)
    @pytest.mark.parametrize("name", FLOATS)
    def test_the_derivatives_of_torch_func_are_refused(self, name, switches):
        args = with_copies(batch(**RAGGED))
        before = {cache: bits(args[cache]).clone() for cache in CACHES}

        def context(tensor):
            return kv_cache_attention_step_(**args | {name: tensor}, **switches)["context"].sum()

        with pytest.raises(RuntimeError, match="use kv_cache_attention_step, or"):
            torch.func.grad(context)(args[name])
        with pytest.raises(RuntimeError, match="use kv_cache_attention_step, or"):
            torch.func.jvp(context, (args[name],), (args[name],))
        for cache in CACHES:
            assert torch.equal(bits(args[cache]), before[cache])

    @pytest.mark.parametrize("switches", SWITCHES)
    @pytest.mark.parametrize("name", CACHES)
    @pytest.mark.parametrize("axis", range(4))
    def test_a_cache_whose_slots_share_memory_is_refused(self, axis, name, switches):
        args = batch(**RAGGED)
        args[name] = args[name].narrow(axis, 0, 1).expand(args[name].shape)
        strides = str(args[name].stride()).replace("(", r"\(").replace(")", r"\)")
        words = f"^{name} had strides {strides}, so several slots share memory; .* pass a clone"
        refuses(args, ValueError, words, **switches)
        kv_cache_attention_step(**args)  # which writes into a copy

    @pytest.mark.parametrize("switches", SWITCHES)
    def test_an_axis_of_size_one_may_have_any_stride(self, switches):
        args = batch([1], [1], 1, 3, H_q=1, H_k=1)
        expected = kv_cache_attention_step(**args)
        for name in CACHES:
            _, _, M, size = args[name].shape
            args[name] = args[name].as_strided((1, 1, M, size), (0, 0, size, 1))
        result = kv_cache_attention_step_(**args, **switches)
        assert_same_bits(result["key_cache"], expected["key_cache"])

    @pytest.mark.parametrize("switches", SWITCHES)
    def test_one_tensor_for_keys_and_values_is_refused(self, switches):
        args = batch(**RAGGED, D=2, D_v=2)
        args["value_cache"] = args["key_cache"]
        refuses(args, ValueError, "value_cache was the same tensor as key_cache", **switches)


def allocations(step, args, **switches):
    """Return the bytes of every allocation of a call (of every release, negative), and its result."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = step(**args, **switches)
    events = profiler.profiler.kineto_results.events()
    return [event.nbytes() for event in events if event.name() == "[memory]"], result


def extra(step, args, own=(), **switches):
    """Return the bytes that a call takes beside its outputs: at most at one time, and at most in one piece.

    `own` names the outputs that are no new tensors.
    """
    sizes, result = allocations(step, args, **switches)
    outputs = [value.nbytes for name, value in result.items() if name not in own]
    peak = held = 0
    for size in sizes:
        held += size
        peak = max(peak, held)
    assert held == sum(outputs)  # so the count misses nothing that lasts
    temporary = [size for size in sizes if size > 0]
    for size in outputs:
        temporary.remove(size)
    return peak - sum(outputs), max(temporary, default=0)


def flops(step, args, **switches):
    """Return the floating-point operations of all products of a call."""

    def fused(query, key, value, *_, **__):
        return sdpa_flop_count(query, key, value)

    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with FlopCounterMode(display=False, custom_mapping={attention: fused}) as counter:
        step(**args, **switches)
    return counter.get_total_flops()


class TestMemory:
    """Nothing of the size of a cache is allocated, and nothing that follows the capacity but the weights."""

    long = {"lengths": (4000, 2500, 300), "H_q": 8, "H_k": 2, "D": 32, "D_v": 32, "dtype": torch.float32}
    decode = long | {"counts": (1, 0, 1), "n_queries": 1}
    chunk = long | {"counts": (4, 0, 3), "n_queries": 4}

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_a_decoding_step_with_weights_allocates_its_outputs_and_next_to_nothing(self, dtype):
        args = batch(**self.decode | {"dtype": dtype}, capacity=4096)
        peak, _ = extra(kv_cache_attention_step_, args, CACHES)
        assert peak < 100

    def test_a_chunk_with_weights_allocates_its_outputs_and_small_masks(self):
        args = batch(**self.chunk, capacity=4096)
        peak, _ = extra(kv_cache_attention_step_, args, CACHES)
        assert peak < 1000

    def test_without_weights_a_decoding_step_stores_no_scores(self):
        args = batch(**self.decode, capacity=4096)
        context = args["query"].nbytes
        peak, largest = extra(kv_cache_attention_step_, args, CACHES, need_weights=False)
        scores_of_a_row = 8 * 4001 * 4
        assert largest < scores_of_a_row / 4
        assert peak < scores_of_a_row / 4 + 2 * context

    def test_without_weights_a_chunk_stores_no_scores_of_several_heads(self):
        args = batch(**self.chunk, capacity=4096)
        peak, _ = extra(kv_cache_attention_step_, args, CACHES, need_weights=False)
        scores_of_a_row = 8 * 4 * 4004 * 4
        assert peak < scores_of_a_row / 2

    @pytest.mark.parametrize("need_weights", [True, False])
    def test_the_extra_memory_of_a_decoding_step_is_below_a_hundredth_of_the_caches(self, need_weights):
        args = batch(**self.decode, capacity=4096)
        peak, _ = extra(kv_cache_attention_step_, args, CACHES, need_weights=need_weights)
        assert peak < 0.01 * (args["key_cache"].nbytes + args["value_cache"].nbytes)

    @pytest.mark.parametrize("need_weights", [True, False])
    @pytest.mark.parametrize(
        "queries", [{"counts": (1, 1), "n_queries": 1}, {"counts": (2, 3), "n_queries": 3}]
    )
    def test_the_extra_memory_does_not_follow_the_capacity(self, queries, need_weights):
        def of(capacity):
            args = batch((60, 17), **queries, capacity=capacity, dtype=torch.float32)
            return extra(kv_cache_attention_step_, args, CACHES, need_weights=need_weights)

        assert of(4096) == of(64)

    def test_the_functional_step_allocates_its_outputs_and_next_to_nothing(self):
        args = batch(**self.decode, capacity=4096)
        peak, _ = extra(kv_cache_attention_step, args)
        assert peak < 100


class TestWork:
    """Products are computed with the live slots of each row, whatever the capacity."""

    @pytest.mark.parametrize(
        ("step", "switches"),
        [
            (kv_cache_attention_step, {}),
            (kv_cache_attention_step_, {"need_weights": True}),
            (kv_cache_attention_step_, {"need_weights": False}),
        ],
    )
    @pytest.mark.parametrize(
        ("lengths", "counts", "Q"), [((3, 60), (1, 1), 1), ((3, 60, 0), (2, 4, 0), 4)]
    )
    def test_it_follows_the_live_slots_of_each_row(self, step, switches, lengths, counts, Q):
        need_weights = switches.get("need_weights", True)
        queries = [Q] * len(counts) if need_weights else counts  # idle ones are computed and dropped
        H_q, D = 4, 8
        expected = sum(
            2 * 2 * H_q * n * D * (length + count) for n, length, count in zip(queries, lengths, counts)
        )
        for capacity in (64, 4096):
            args = batch(lengths, counts, Q, capacity, H_q=H_q, D=D, D_v=D, dtype=torch.float32)
            assert flops(step, args, **switches) == expected

    @pytest.mark.parametrize("capacity", [64, 4096])
    def test_with_gradients_it_follows_the_live_slots_too(self, capacity):
        lengths, counts, H_q, D = (3, 60, 0), (2, 4, 0), 4, 8
        args = with_gradients(batch(lengths, counts, 4, capacity, H_q=H_q, D=D, D_v=D))
        one_product = sum(2 * H_q * n * D * (length + n) for length, n in zip(lengths, counts))
        with FlopCounterMode(display=False) as counter:
            context = kv_cache_attention_step(**args)["context"]
            assert counter.get_total_flops() == 2 * one_product
            context.sum().backward()
        assert counter.get_total_flops() == 6 * one_product

    def test_without_checks_it_follows_the_capacity(self):
        def of(capacity):
            args = batch((3, 60), (1, 1), 1, capacity, dtype=torch.float32)
            return flops(kv_cache_attention_step_, args, check_data=False)

        assert of(4096) == 64 * of(64)


class Reads(TorchFunctionMode):
    """Note every call for which the host has to wait for the device, to read data or to hand some over."""

    reading = {
        *("tolist", "item", "numpy", "__array__", "cpu", "nonzero", "masked_select", "unique", "equal"),
        *("__bool__", "__int__", "__float__", "__index__", "__iter__", "__contains__", "is_nonzero"),
        *("allclose", "data_ptr", "repeat_interleave", "new_tensor"),
    }

    def __init__(self):
        super().__init__()
        self.read = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = function.__name__
        kwargs = kwargs or {}
        moved = name == "to" and isinstance(args[1], torch.device)
        if name in self.reading or moved and not kwargs.get("non_blocking"):
            self.read.append((name, args[0]))
        return function(*args, **kwargs)


class TestReadingData:
    """The host reads the lengths and the append mask once each, or nothing at all."""

    @pytest.mark.parametrize("need_weights", [True, False])
    @pytest.mark.parametrize("shape", [RAGGED, RAGGED | {"n_queries": 0, "counts": (0,) * 5}])
    def test_lengths_and_append_mask_are_read_once(self, shape, need_weights):
        args = batch(**shape)
        with Reads() as reads:
            kv_cache_attention_step_(**args, need_weights=need_weights)
        assert [name for name, _ in reads.read] == ["tolist", "tolist"]
        assert reads.read[0][1] is args["lengths"]
        assert reads.read[1][1] is args["append_mask"]

    @pytest.mark.parametrize("recorded", [True, False])
    def test_the_functional_step_reads_them_once_too(self, recorded):
        args = batch(**RAGGED)
        args = with_gradients(args) if recorded else args
        with Reads() as reads:
            kv_cache_attention_step(**args)
        assert [name for name, _ in reads.read] == ["tolist", "tolist"]

    @pytest.mark.parametrize("need_weights", [True, False])
    def test_without_checks_nothing_is_read(self, need_weights):
        args = batch(**RAGGED)
        with Reads() as reads:
            kv_cache_attention_step_(**args, need_weights=need_weights, check_data=False)
        assert reads.read == []

    @pytest.mark.parametrize("need_weights", [True, False])
    def test_without_checks_there_need_be_no_data(self, need_weights):
        with FakeTensorMode() as mode:
            args = {
                name: value if name == "options" else mode.from_tensor(value)
                for name, value in batch(**RAGGED).items()
            }
            result = kv_cache_attention_step_(**args, need_weights=need_weights, check_data=False)
        assert result["context"].shape == (5, 4, 3, 2)
