"""onnxruntime computes what the step does: its own fused operator, and the standard's two.

`GroupQueryAttention` keeps the cache itself.  It takes ragged rows when each appends one slot, or when
all begin; of a chunk behind a past it takes one row.  `TensorScatter` and `Attention` of opset 24 are
separate, so they take every batch when the rule is passed as a mask; without a mask they derive it from
lengths, if all that is offered is appended.  Batches are drawn by hypothesis, the same on every run.
"""

from functools import cache

import cases
import onnxruntime
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper
from torch.nn.functional import pad

from kvlib import visibility

#: Numbers of order 1 and scores of up to a few hundred, summed in float32 in another order.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}

FLOAT, INT32, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL


def session(nodes, *more_outputs, **more_inputs):
    """Return a session for nodes that read the step's tensors, and more by name and type."""
    inputs = dict.fromkeys(cases.FLOATS, FLOAT) | more_inputs
    outputs = dict.fromkeys(("context", "key_cache_after", "value_cache_after", *more_outputs), FLOAT)
    infos = [
        [helper.make_tensor_value_info(name, dtype, None) for name, dtype in side.items()]
        for side in (inputs, outputs)
    ]
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "step", *infos)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3  # errors: it warns that caches which we hold are copied
    return onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def run(session, **inputs):
    feeds = {name: tensor.contiguous().numpy() for name, tensor in inputs.items()}
    return [torch.from_numpy(output) for output in session.run(None, feeds)]


SCATTERS = [
    helper.make_node("TensorScatter", [f"{name}_cache", f"new_{name}", "lengths"], [f"{name}_cache_after"])
    for name in ("key", "value")
]


@cache
def attention_with_mask(**attributes):
    reads, writes = ["query", "key_cache_after", "value_cache_after", "mask"], ["context", "", "", "weights"]
    attend = helper.make_node("Attention", reads, writes, qk_matmul_output_mode=3, **attributes)
    return session([*SCATTERS, attend], "weights", lengths=INT64, mask=BOOL)


@cache
def attention_with_lengths():
    reads = ["query", "key_cache_after", "value_cache_after", "", "", "", "new_lengths"]
    attend = helper.make_node("Attention", reads, ["context"], is_causal=1)
    return session([*SCATTERS, attend], lengths=INT64, new_lengths=INT64)


@cache
def grouped_query_attention(**attributes):
    reads = [*cases.FLOATS, "last_slots", "longest"]
    writes = ["context", "key_cache_after", "value_cache_after"]
    node = helper.make_node("GroupQueryAttention", reads, writes, domain="com.microsoft", **attributes)
    return session([node], last_slots=INT32, longest=INT32)


def floats(args):
    return {name: args[name] for name in cases.FLOATS}


def heads_last(x):
    """Return [B, H, Q, features] as [B, Q, H * features]."""
    return x.transpose(1, 2).flatten(2)


def assert_live_slots_equal(keys, values, result):
    """Compare the caches bit by bit, as far as the rows are filled after the call."""
    for row, length in enumerate(result["lengths"].tolist()):
        assert torch.equal(keys[row, :, :length], result["key_cache"][row, :, :length])
        assert torch.equal(values[row, :, :length], result["value_cache"][row, :, :length])


@st.composite
def appends_of_all(draw):
    """Draw a batch in which every row appends all that is offered."""
    size = st.integers(1, 4)
    B, Q, H_k, group_size, D, D_v = (draw(size) for _ in range(6))
    lengths = draw(st.lists(st.integers(0, 6), min_size=B, max_size=B))
    return cases.batch(
        lengths,
        [Q] * B,
        Q,
        max(lengths) + Q + draw(st.integers(0, 2)),
        H_q=H_k * group_size,
        H_k=H_k,
        D=D,
        D_v=D_v,
        dtype=torch.float32,
        seed=draw(st.integers(0, 2**32)),
    )


@st.composite
def grouped_query_calls(draw):
    """Draw a batch that `GroupQueryAttention` takes: one slot a row, one row, or empty caches."""
    few = st.integers(1, 4)
    kind = draw(st.sampled_from(["decode", "chunk", "prompts"]))
    B = 1 if kind == "chunk" else draw(few)
    counts = [1 if kind == "decode" else draw(few) for _ in range(B)]
    lengths = [0 if kind == "prompts" else draw(st.integers(0, 6)) for _ in range(B)]
    H_k, group_size, D = draw(few), draw(few), draw(st.sampled_from([8, 16]))
    scale = draw(st.sampled_from([None, 0.01, 1.0]))
    return cases.batch(
        lengths,
        counts,
        max(counts),
        max(map(sum, zip(lengths, counts, strict=True))) + draw(st.integers(0, 2)),
        H_q=H_k * group_size,
        H_k=H_k,
        D=D,
        D_v=D,
        dtype=torch.float32,
        seed=draw(st.integers(0, 2**32)),
        **({} if scale is None else {"scale": scale}),
    )


@cases.PROPERTY
@given(args=cases.batches(dtype=torch.float32).filter(lambda args: args["query"].shape[2]))
def test_the_step_agrees_with_attention_and_tensor_scatter_under_the_mask_of_the_rule(step, args):
    Q, M = args["query"].shape[2], args["key_cache"].shape[2]
    result = step(**args)
    counts = args["append_mask"].sum(dim=1)
    mask = torch.from_numpy(visibility.mask(args["lengths"].tolist(), counts.tolist(), Q, M))
    # TensorScatter writes what is not appended, too: behind the live slots, where it needs some room.
    room = {name: pad(args[name], (0, 0, 0, Q)) for name in ("key_cache", "value_cache")}
    context, keys, values, weights = run(
        attention_with_mask(**args["options"]),
        **floats(args) | room,
        lengths=args["lengths"],
        mask=pad(mask, (0, Q))[:, None],
    )
    torch.testing.assert_close(result["context"], context, **TOLERANCE)
    if "attention" in result:
        torch.testing.assert_close(result["attention"], weights[..., :M], **TOLERANCE)
    assert_live_slots_equal(keys, values, result)


@cases.PROPERTY
@given(args=appends_of_all())
def test_the_step_agrees_with_attention_and_tensor_scatter_by_lengths(step, args):
    result = step(**args)
    context, keys, values = run(
        attention_with_lengths(), **floats(args), lengths=args["lengths"], new_lengths=result["lengths"]
    )
    torch.testing.assert_close(result["context"], context, **TOLERANCE)
    assert torch.equal(keys, result["key_cache"])
    assert torch.equal(values, result["value_cache"])


@cases.PROPERTY
@given(args=grouped_query_calls())
def test_the_step_agrees_with_grouped_query_attention(step, args):
    H_q, H_k = args["query"].shape[1], args["new_key"].shape[1]
    result = step(**args)
    last_slots = (result["lengths"] - 1).int()
    context, keys, values = run(
        grouped_query_attention(num_heads=H_q, kv_num_heads=H_k, **args["options"]),
        **floats(args) | {name: heads_last(args[name]) for name in ("query", "new_key", "new_value")},
        last_slots=last_slots,
        longest=last_slots.max()[None] + 1,
    )
    context = context.unflatten(2, (H_q, -1)).transpose(1, 2)
    # What it gives for a query beyond the end of its prompt means nothing.
    context = context.where(args["append_mask"][:, None, :, None], 0)
    torch.testing.assert_close(result["context"], context, **TOLERANCE)
    assert_live_slots_equal(keys, values, result)
