"""The batched step as a citizen of torch: compilers, transforms, tensors without data, and every dtype."""

from itertools import product

import pytest
import torch
from cases import (
    FLOATS,
    PROPERTY,
    RAGGED,
    assert_same_bits,
    assert_unchanged,
    batch,
    batches,
    poisoned,
    snapshot,
    with_gradients,
)
from hypothesis import given, settings
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from kvlib import kv_cache_attention_step, kv_cache_attention_step_

# torch's own forward derivatives use it.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

NAMES = (*FLOATS, "lengths", "append_mask")
FLOATING_OUTPUTS = ("key_cache", "value_cache", "attention", "context")
SMALL = RAGGED | {"H_q": 2, "H_k": 1, "D": 2, "D_v": 1}

#: Both steps, the one in place in all its ways.
STEPS = {"functional": (kv_cache_attention_step, {})} | {
    f"in place, {'with' if need_weights else 'without'} weights, {'' if check_data else 'un'}checked": (
        kv_cache_attention_step_,
        {"need_weights": need_weights, "check_data": check_data},
    )
    for need_weights, check_data in product((True, False), (True, False))
}
each_step = pytest.mark.parametrize("step", STEPS)


def call(step, args, run=None):
    """Call a step, or what `run` made of it, with caches of its own to write into."""
    function, switches = STEPS[step]
    caches = {name: args[name].clone() for name in ("key_cache", "value_cache")}
    return (run or function)(**args | caches, **switches)


def assert_as_expected(result, args):
    """Compare a result with that of an ordinary call of the functional step."""
    expected = kv_cache_attention_step(**args)
    assert result.keys() in (expected.keys(), expected.keys() - {"attention"})
    for name, value in result.items():
        torch.testing.assert_close(
            value.detach(), expected[name], rtol=1e-12, atol=1e-13, equal_nan=True, msg=name
        )


def dirty(args):
    return poisoned(args, key=float("nan"), value=float("inf"), query=float("nan"))


def in_order(args):
    """Return the tensors of a batch in the order of the parameters."""
    return tuple(args[name] for name in NAMES)


class Step(torch.nn.Module):
    def forward(self, *tensors):
        return kv_cache_attention_step(*tensors, {"scale": 0.3})


class TestCompilers:
    """The step is one graph, without a break, whatever the tensors hold."""

    @pytest.fixture(autouse=True)
    def fresh(self):
        torch.compiler.reset()

    @each_step
    def test_it_compiles_into_one_graph(self, step):
        compiled = torch.compile(STEPS[step][0], fullgraph=True, backend="aot_eager")
        for args in (batch(**RAGGED), batch(**RAGGED | {"lengths": (1, 3, 0, 4, 2)}, seed=1)):
            assert_as_expected(call(step, dirty(args), compiled), dirty(args))

    @pytest.mark.parametrize("step", ["functional", "in place, without weights, unchecked"])
    def test_one_graph_serves_every_size(self, step):
        graphs = []

        def count(graph, inputs):
            graphs.append(graph)
            return graph.forward

        compiled = torch.compile(STEPS[step][0], fullgraph=True, dynamic=True, backend=count)
        for B, Q, M in ((6, 7, 11), (8, 9, 13), (9, 3, 8)):  # sizes that are equal share a symbol
            lengths, counts = [b % 4 for b in range(B)], [b % (Q + 1) for b in range(B)]
            args = dirty(batch(lengths, counts, Q, M, H_q=4, H_k=2, D=3, D_v=5))
            assert_as_expected(call(step, args, compiled), args)
        assert len(graphs) == 1

    def test_what_is_compiled_can_be_differentiated(self):
        compiled = torch.compile(kv_cache_attention_step, fullgraph=True, backend="aot_eager")
        found = []
        for step in (compiled, kv_cache_attention_step):
            args = with_gradients(dirty(batch(**RAGGED)))
            step(**args)["context"].square().sum().backward()
            found.append([args[name].grad for name in FLOATS])
        for actual, expected in zip(*found):
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)

    @pytest.mark.parametrize("strict", [True, False])
    def test_it_can_be_exported(self, strict):
        args = batch(**RAGGED, scale=0.3)
        program = torch.export.export(Step(), in_order(args), strict=strict).module()
        for other in (args, batch(**RAGGED | {"lengths": (1, 3, 0, 4, 2)}, seed=1, scale=0.3)):
            assert_as_expected(program(*in_order(dirty(other))), dirty(other))

    @pytest.mark.parametrize("tracing_mode", ["fake", "symbolic"])
    def test_make_fx_traces_it_for_all_lengths(self, tracing_mode):
        args = batch(**RAGGED, scale=0.3)
        graph = make_fx(Step(), tracing_mode=tracing_mode)(*in_order(args))
        for other in (args, batch(**RAGGED | {"lengths": (1, 3, 0, 4, 2)}, seed=1, scale=0.3)):
            assert_as_expected(graph(*in_order(dirty(other))), dirty(other))

    def test_make_fx_traces_it_for_the_numbers_at_hand(self):
        args = dirty(batch(**RAGGED, scale=0.3))
        assert_as_expected(make_fx(Step())(*in_order(args))(*in_order(args)), args)


class TestTensorsWithoutData:
    """Shapes and dtypes are checked and computed; there are no numbers to check."""

    @each_step
    def test_every_step_on_meta_tensors(self, step):
        self.check(step, lambda tensor: tensor.to("meta"))

    @each_step
    def test_every_step_on_fake_tensors(self, step):
        with FakeTensorMode() as mode:
            self.check(step, mode.from_tensor)

    @staticmethod
    def check(step, convert):
        args = batch(**RAGGED, dtype=torch.float32)
        expected = kv_cache_attention_step(**args)
        bare = {name: convert(args[name]) for name in NAMES} | {"options": {}}
        function, switches = STEPS[step]
        result = function(**bare, **switches)
        for name, value in result.items():
            assert value.shape == expected[name].shape
            assert value.dtype == expected[name].dtype
            assert value.device == bare["query"].device
        with pytest.raises(ValueError, match="key_cache had shape"):
            function(**bare | {"key_cache": bare["key_cache"][:, :1]}, **switches)

    def test_tensors_with_data_are_used_where_meta_is_the_default_device(self):
        args = batch(**RAGGED)
        with torch.device("meta"):
            results = [call(step, args) for step in STEPS]
        for result in results:
            assert_as_expected(result, args)


class TestTransforms:
    """vmap, grad, jvp and their compositions give what loops and autograd give."""

    several = [
        batch(**RAGGED, seed=1),
        batch(**RAGGED | {"lengths": (1, 3, 0, 4, 2)}, seed=2),
        batch((5, 4, 3, 2, 1), (0, 1, 2, 3, 3), 3, 5, seed=3),
    ]

    @each_step
    def test_vmap_over_whole_batches_equals_a_loop(self, step):
        function, switches = STEPS[step]
        stacked = {name: torch.stack([dirty(args)[name] for args in self.several]) for name in NAMES}
        results = torch.vmap(lambda args: function(**args, options={}, **switches))(stacked)
        for i, args in enumerate(self.several):
            assert_as_expected({name: value[i] for name, value in results.items()}, dirty(args))

    @pytest.mark.parametrize("name", NAMES)
    def test_vmap_over_one_argument_equals_a_loop(self, name):
        args = self.several[0] | {"append_mask": torch.zeros(5, 3, dtype=torch.bool)}
        if name != "lengths":  # rows that append nothing fit every length
            args["append_mask"] = self.several[0]["append_mask"]
        choices = [other[name] for other in self.several]
        if name == "append_mask":
            choices = [args[name], args[name] & False]
        results = torch.vmap(lambda value: kv_cache_attention_step(**args | {name: value}))(
            torch.stack(choices)
        )
        for i, choice in enumerate(choices):
            alone = args | {name: choice}
            assert_as_expected({key: value[i] for key, value in results.items()}, alone)

    @pytest.mark.parametrize("name", FLOATS)
    @pytest.mark.parametrize("output", FLOATING_OUTPUTS)
    def test_every_way_to_a_jacobian_gives_the_same_one(self, output, name):
        args = batch(**SMALL)

        def of(value):
            return kv_cache_attention_step(**args | {name: value})[output]

        expected = torch.autograd.functional.jacobian(of, args[name], strict=False)
        for jacobian in (torch.func.jacrev, torch.func.jacfwd):
            torch.testing.assert_close(jacobian(of)(args[name]), expected, rtol=1e-11, atol=1e-12)

    @pytest.mark.parametrize("name", FLOATS)
    def test_the_hessian_is_that_of_autograd(self, name):
        args = batch((1, 2), (2, 0), 2, 3, H_q=2, H_k=1, D=2, D_v=1)

        def of(value):
            return kv_cache_attention_step(**args | {name: value})["context"].square().sum()

        expected = torch.autograd.functional.hessian(of, args[name])
        torch.testing.assert_close(torch.func.hessian(of)(args[name]), expected, rtol=1e-9, atol=1e-10)

    @pytest.mark.parametrize("name", FLOATS)
    def test_forward_and_backward_derivatives_agree(self, name):
        args = dirty(batch(**RAGGED))
        ones = torch.ones_like(args[name])

        def of(value):
            result = kv_cache_attention_step(**args | {name: value})
            return result["context"], result["attention"]

        outputs, tangents = torch.func.jvp(of, (args[name],), (ones,))
        pulled_back = torch.func.vjp(of, args[name])[1](outputs)[0]
        with forward_ad.dual_level():
            duals = [forward_ad.unpack_dual(out) for out in of(forward_ad.make_dual(args[name], ones))]
        for tangent, dual in zip(tangents, duals):
            actual = torch.zeros_like(tangent) if dual.tangent is None else dual.tangent
            torch.testing.assert_close(actual, tangent, rtol=1e-12, atol=1e-13)
        inner = sum((out * tangent).sum() for out, tangent in zip(outputs, tangents))
        torch.testing.assert_close(pulled_back.sum(), inner, rtol=1e-10, atol=1e-11)

    def test_gradients_of_each_sample(self):
        args = self.several[0]
        queries = torch.stack([other["query"] for other in self.several])

        def of(query):
            return kv_cache_attention_step(**args | {"query": query})["context"].square().sum()

        together = torch.vmap(torch.func.grad(of))(queries)
        for gradient, query in zip(together, queries):
            torch.testing.assert_close(gradient, torch.func.grad(of)(query), rtol=1e-12, atol=1e-13)

    def test_numbers_that_can_be_read_are_checked_inside_transforms(self):
        args = batch(**RAGGED) | {"lengths": torch.tensor([0, 0, 2, 6, 3])}

        def context(query):
            return kv_cache_attention_step(**args | {"query": query})["context"].sum()

        words = r"lengths\[3\] was 6; it must be between 0 and M = 5"
        for transform in (torch.func.grad, torch.func.jacfwd, torch.vmap):
            with pytest.raises(ValueError, match=words):
                transform(context)(args["query"][None] if transform is torch.vmap else args["query"])

    def test_numbers_that_cannot_be_read_are_not_checked(self):
        args = batch(**RAGGED)
        lengths = torch.tensor([[0, 0, 2, 6, 3], RAGGED["lengths"]])
        result = torch.vmap(lambda lengths: kv_cache_attention_step(**args | {"lengths": lengths}))(
            lengths
        )
        assert_as_expected({name: value[1] for name, value in result.items()}, args)


class TestModes:
    """no_grad, inference mode and autocast change no bit."""

    @each_step
    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_modes_without_gradients(self, mode, step):
        args = batch(**RAGGED)
        expected = call(step, args)
        with mode():
            result = call(step, args)
        for name, value in expected.items():
            assert torch.equal(result[name], value)

    @each_step
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    def test_autocast(self, dtype, step):
        args = batch(**RAGGED, dtype=dtype)
        expected = call(step, args)
        for cast_to in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype=cast_to):
                result = call(step, args)
                assert torch.is_autocast_enabled("cpu")
            for name, value in expected.items():
                assert torch.equal(result[name], value)
                assert result[name].dtype == value.dtype

    def test_autocast_where_gradients_are_recorded(self):
        found = []
        for enabled in (True, False):
            args = with_gradients(batch(**RAGGED, dtype=torch.float32))
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                context = kv_cache_attention_step(**args)["context"]
            context.sum().backward()
            found.append([context, *(args[name].grad for name in FLOATS)])
        for under_autocast, without in zip(*found):
            assert_same_bits(under_autocast, without)


def tensor_or_none(dtype):
    """Return numbers in a dtype, or None if torch cannot store any in it on the CPU."""
    try:
        numbers = torch.tensor([1, 2]).to(dtype)
        return numbers if numbers.tolist() == [1, 2] else None
    except (RuntimeError, NotImplementedError, TypeError):
        return None


ALL_DTYPES = sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str)
FLOATING = [dtype for dtype in ALL_DTYPES if dtype.is_floating_point]
#: Scale factors that know neither zero nor sign, and pairs packed into one element.
NO_NUMBERS = [dtype for dtype in FLOATING if "e8m0" in str(dtype) or "_x2" in str(dtype)]
INTEGER = [
    dtype
    for dtype in ALL_DTYPES
    if not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool or "qu" in str(dtype))
    and "qint" not in str(dtype)
    and tensor_or_none(dtype) is not None
]


class TestEveryDtype:
    """All floating and integer dtypes that torch has, whichever those are."""

    def test_torch_has_the_dtypes_that_are_known_today(self):
        assert {torch.float16, torch.bfloat16, torch.float32, torch.float64} < set(FLOATING)
        assert {torch.float8_e4m3fn, torch.float8_e5m2} < set(FLOATING)
        assert {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8} < set(INTEGER)

    @each_step
    @pytest.mark.parametrize("dtype", [dtype for dtype in FLOATING if dtype not in NO_NUMBERS])
    def test_floating_numbers(self, dtype, step):
        args = batch(**RAGGED, dtype=dtype)
        exact = kv_cache_attention_step(**args | {name: args[name].double() for name in FLOATS})
        result = call(step, args)
        for name in result.keys() & set(FLOATING_OUTPUTS):
            assert result[name].dtype == dtype
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(result[name].double(), exact[name], rtol=2 * eps, atol=4 * eps)
        assert torch.equal(result["lengths"], exact["lengths"])

    @pytest.mark.parametrize("dtype", [dtype for dtype in FLOATING if dtype not in NO_NUMBERS])
    def test_floating_numbers_with_gradients(self, dtype):
        args = with_gradients(batch(**RAGGED, dtype=dtype))
        context = kv_cache_attention_step(**args)["context"]
        context.backward(torch.ones_like(context.detach().float()).to(dtype))
        assert all(args[name].grad.dtype == dtype for name in FLOATS)

    @each_step
    @pytest.mark.parametrize("dtype", NO_NUMBERS)
    def test_floating_dtypes_that_are_no_numbers_are_refused(self, dtype, step):
        args = batch(**RAGGED)
        args |= {name: torch.empty(args[name].shape, dtype=torch.uint8).view(dtype) for name in FLOATS}
        function, switches = STEPS[step]
        with pytest.raises(TypeError, match=f"query had dtype {dtype}; it must be a floating dtype"):
            function(**args, **switches)

    @each_step
    @pytest.mark.parametrize("dtype", INTEGER)
    def test_lengths(self, dtype, step):
        args = batch(**RAGGED)
        args["lengths"] = args["lengths"].to(dtype)
        result = call(step, args)
        assert result["lengths"].dtype == dtype
        assert_as_expected(result, args)


class TestLayouts:
    """Transposed, strided and expanded inputs are as good as copies, in every step."""

    layouts = {
        "transposed heads": lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2),
        "transposed features": lambda tensor: tensor.mT.contiguous().mT,
        "every second slot": lambda tensor: tensor.repeat_interleave(2, dim=2)[:, :, ::2],
        "reversed axes": lambda tensor: tensor.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    }

    @each_step
    @pytest.mark.parametrize("layout", layouts)
    @pytest.mark.parametrize("recorded", [False, True])
    def test_non_contiguous_inputs(self, recorded, layout, step):
        function, switches = STEPS[step]
        args = dirty(batch(**RAGGED))
        expected = kv_cache_attention_step(**args)
        changed = args | {name: self.layouts[layout](args[name]) for name in FLOATS}
        changed["lengths"] = args["lengths"].repeat_interleave(2)[::2]
        changed["append_mask"] = args["append_mask"].T.contiguous().T
        if recorded and step == "functional":
            changed |= {name: changed[name].requires_grad_() for name in FLOATS}
        result = function(**changed, **switches)
        for name, value in result.items():
            torch.testing.assert_close(
                value.detach(), expected[name], rtol=1e-12, atol=1e-13, equal_nan=True
            )

    @each_step
    def test_expanded_inputs(self, step):
        function, switches = STEPS[step]
        one = batch([2], [2], 2, 5, H_q=2, H_k=1)
        args = {name: one[name].expand(3, *one[name].shape[1:]) for name in NAMES} | {"options": {}}
        args["append_mask"] = torch.tensor([[True, True], [True, False], [False, False]])
        own = {name: args[name].clone() for name in ("key_cache", "value_cache")}
        inputs = args if step == "functional" else args | own
        constant = {name: value for name, value in inputs.items() if value is not own.get(name)}
        before = snapshot(constant)
        result = function(**inputs, **switches)
        assert_unchanged(constant, before)
        assert_as_expected(result, args)
        assert result["lengths"].tolist() == [4, 3, 2]


class TestAllWaysAgree:
    """Row by row or all rows together: the way that is taken shows in no result but by rounding."""

    @staticmethod
    def ways(args):
        """Return the results of every way that returns weights."""
        stacked = {name: args[name][None] for name in NAMES}
        mapped = torch.vmap(lambda one: kv_cache_attention_step(**one, options=args["options"]))(stacked)
        return [
            kv_cache_attention_step(**args),
            kv_cache_attention_step(**with_gradients(args)),
            {name: value[0] for name, value in mapped.items()},
            call("in place, with weights, unchecked", args),
        ]

    @settings(PROPERTY, max_examples=200)
    @given(batches())
    def test_the_results_are_the_same(self, args):
        args = dirty(args)
        for result in self.ways(args):
            assert_as_expected(result, args)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_is_as_good_as_rounding_the_exact_result(self, dtype):
        args = batch([0, 30, 9, 31], [4, 2, 0, 1], 4, 32, D=64, D_v=8, dtype=dtype)
        exact = kv_cache_attention_step(**args | {name: args[name].double() for name in FLOATS})
        half_a_step = torch.finfo(dtype).eps / 2
        for result, name in product(self.ways(args), ("attention", "context")):
            torch.testing.assert_close(
                result[name].detach().double(), exact[name], rtol=half_a_step * 1.01, atol=1e-6
            )

    def test_scores_that_are_all_far_below_zero_do_not_vanish(self):
        args = batch([2], [1], 1, 4, H_q=1, H_k=1, D=1)
        args |= {name: torch.full_like(args[name], -5e12) for name in ("new_key", "key_cache")}
        args["query"].fill_(1)
        for result in self.ways(args):
            weights = result["attention"].flatten().tolist()
            torch.testing.assert_close(weights, [1 / 3, 1 / 3, 1 / 3, 0.0], rtol=1e-14, atol=0)

    def test_no_nan_arises_on_the_way_so_anomaly_detection_stays_quiet(self):
        args = with_gradients(dirty(batch(**RAGGED)))
        one = {name: args[name][None] for name in NAMES}
        with torch.autograd.set_detect_anomaly(True):
            row_by_row = kv_cache_attention_step(**args)
            together = torch.vmap(lambda one: kv_cache_attention_step(**one, options={}))(one)
            for result in (row_by_row, together):
                (result["context"].sum() + result["attention"].square().sum()).backward()

    @settings(PROPERTY, max_examples=100)
    @given(batches())
    def test_the_gradients_are_the_same(self, args):
        args = dirty(args)
        generator = torch.Generator().manual_seed(0)

        def loss(*floats):
            result = kv_cache_attention_step(**args | dict(zip(FLOATS, floats)))
            generator.manual_seed(0)
            return sum(
                (torch.randn(result[name].shape, generator=generator).double() * result[name]).sum()
                for name in ("attention", "context")
            )

        leaves = with_gradients(args)
        inputs = [leaves[name] for name in FLOATS]
        by_autograd = torch.autograd.grad(loss(*inputs), inputs, materialize_grads=True)
        by_transform = torch.func.grad(loss, argnums=tuple(range(5)))(*(args[name] for name in FLOATS))
        for actual, expected in zip(by_transform, by_autograd):
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("recorded", [False, True])
def test_a_huge_scale_is_fine_where_the_scores_are(recorded):
    args = batch((1,), (1,), 1, 3, H_q=1, H_k=1, D=2, D_v=2, dtype=torch.float32)
    args |= {"query": torch.full_like(args["query"], 100.0), "options": {"scale": 1e37}}
    for name in ("new_key", "key_cache"):
        args[name].fill_(1e-38)
    args["query"].requires_grad_(recorded)
    weights = kv_cache_attention_step(**args)["attention"]
    assert weights.tolist() == [[[[0.5, 0.5, 0.0]]]]
