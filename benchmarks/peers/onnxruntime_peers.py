"""onnxruntime: its GroupQueryAttention, and the standard's Attention with TensorScatter.

GroupQueryAttention refuses several new slots for several rows of different length: there, the
rows are run one by one.  With copied buffers it leaves unused slots behind that are not the old ones.
"""

import onnxruntime
import torch
from onnx import TensorProto, helper

from peers import COPIED, IN_PLACE, Peer

_FLOAT, _INT32, _INT64 = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64


def _session(nodes, inputs, outputs, domain=""):
    """Return a session for a graph; inputs and outputs give a type and a shape by name."""
    infos = [
        [helper.make_tensor_value_info(name, *spec) for name, spec in side.items()]
        for side in (inputs, outputs)
    ]
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(
        helper.make_graph(nodes, "step", *infos), opset_imports=opsets, ir_version=11
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def _value(tensor):
    """Return an OrtValue over the memory of a contiguous tensor."""
    return onnxruntime.OrtValue.ortvalue_from_numpy(tensor.numpy())


def _tensor(value):
    return torch.from_numpy(value.numpy())


def _flat(x):
    """Return x, [B, H, Q, D], as [B, Q, H * D]."""
    return x.transpose(1, 2).flatten(2).contiguous()


def _parts(args):
    """Return the arguments in pieces that GroupQueryAttention takes: all rows at once, or one by one."""
    B, _, Q, _ = args["query"].shape
    rows = [slice(None)] if Q == 1 else [slice(row, row + 1) for row in range(B)]
    return [{name: tensor[row] for name, tensor in args.items()} for row in rows]


def _grouped_query(args):
    """Return a session, and what to feed it with."""
    (B, H_q, Q, D), (_, H_k, M, _) = args["query"].shape, args["key_cache"].shape
    cache = _FLOAT, [B, H_k, M, D]
    inputs = {
        "query": (_FLOAT, [B, Q, H_q * D]),
        "new_key": (_FLOAT, [B, Q, H_k * D]),
        "new_value": (_FLOAT, [B, Q, H_k * D]),
        "key_cache": cache,
        "value_cache": cache,
        "last": (_INT32, [B]),
        "longest": (_INT32, [1]),
    }
    outputs = {"context": (_FLOAT, [B, Q, H_q * D]), "keys": cache, "values": cache}
    node = helper.make_node(
        "GroupQueryAttention",
        list(inputs),
        list(outputs),
        domain="com.microsoft",
        num_heads=H_q,
        kv_num_heads=H_k,
    )
    new_lengths = args["lengths"] + Q
    feeds = {
        "query": _value(_flat(args["query"])),
        "new_key": _value(_flat(args["new_key"])),
        "new_value": _value(_flat(args["new_value"])),
        "key_cache": _value(args["key_cache"]),
        "value_cache": _value(args["value_cache"]),
        "last": _value((new_lengths - 1).int()),
        "longest": _value(new_lengths.max().int()[None]),
    }
    return _session([node], inputs, outputs), feeds


def _read_grouped_query(args):
    def read(result):
        context, keys, values = (torch.cat([_tensor(part) for part in parts]) for parts in zip(*result))
        return context.unflatten(2, (args["query"].shape[1], -1)).transpose(1, 2), keys, values

    return read


def _gqa_copied(args):
    parts = [_grouped_query(part) for part in _parts(args)]

    def step():
        return [session.run_with_ort_values(None, feeds) for session, feeds in parts]

    return step, _read_grouped_query(args)


def _gqa_shared(args):
    bindings = []
    for part in _parts(args):
        session, feeds = _grouped_query(part)
        binding = session.io_binding()
        for name, value in feeds.items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_output("context", "cpu")
        binding.bind_ortvalue_output("keys", feeds["key_cache"])
        binding.bind_ortvalue_output("values", feeds["value_cache"])
        bindings.append((session, binding))

    def step():
        for session, binding in bindings:
            session.run_with_iobinding(binding)
        return [(binding.get_outputs()[0],) for _, binding in bindings]

    def read(result):
        context = torch.cat([_tensor(part) for (part,) in result])
        context = context.unflatten(2, (args["query"].shape[1], -1)).transpose(1, 2)
        return context, args["key_cache"], args["value_cache"]

    return step, read


def _attention(args):
    (B, H_q, Q, D), (_, H_k, M, _) = args["query"].shape, args["key_cache"].shape
    cache, new = (_FLOAT, [B, H_k, M, D]), (_FLOAT, [B, H_k, Q, D])
    inputs = {
        "query": (_FLOAT, [B, H_q, Q, D]),
        "new_key": new,
        "new_value": new,
        "key_cache": cache,
        "value_cache": cache,
        "lengths": (_INT64, [B]),
        "new_lengths": (_INT64, [B]),
    }
    outputs = {"context": (_FLOAT, [B, H_q, Q, D]), "keys": cache, "values": cache}
    nodes = [
        helper.make_node("TensorScatter", ["key_cache", "new_key", "lengths"], ["keys"], axis=2),
        helper.make_node("TensorScatter", ["value_cache", "new_value", "lengths"], ["values"], axis=2),
        helper.make_node(
            "Attention", ["query", "keys", "values", "", "", "", "new_lengths"], ["context"], is_causal=1
        ),
    ]
    session = _session(nodes, inputs, outputs)
    feeds = args | {"new_lengths": args["lengths"] + Q}
    feeds = {name: _value(feeds[name]) for name in inputs}

    def step():
        return session.run_with_ort_values(None, feeds)

    def read(result):
        return [_tensor(value) for value in result]

    return step, read


PEERS = [
    Peer("ort gqa", "onnxruntime's GroupQueryAttention", COPIED, False, _gqa_copied),
    Peer("ort attn", "onnxruntime's opset-24 Attention with TensorScatter", COPIED, False, _attention),
    Peer("ort gqa_", "onnxruntime's GroupQueryAttention, buffers shared", IN_PLACE, False, _gqa_shared),
]
