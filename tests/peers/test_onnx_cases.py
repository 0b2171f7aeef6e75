"""The step reproduces the cases that the ONNX standard ships for its Attention and TensorScatter.

The cases are data: inputs, and the outputs that every backend must give for them.  Attention there
has a past of one length for all rows, or a static cache of ragged lengths, and either may be causal or
carry a mask.  Each case becomes two calls of the step on a buffer that holds the case's past and NaN
beyond it: the first appends what the case's queries find in place, the second asks them.

- Which slots a case lets its queries attend is read from its inputs.  Where all queries attend the
  same slots, they become heads of one decoding query.  Either way the step's own rule has to give the
  same slots for some lengths and append mask, and this is checked.
- A float mask is added to the scores.  The step knows no such bias, but a bias is a dot product with
  more features: the query says which one it is, the key holds its bias for every query.
- The raw scores that some cases give become weights by a softmax.
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from onnx import helper
from onnx.backend.test.case import node as onnx_cases
from onnx.backend.test.case.node import attention, tensorscatter  # noqa: F401  they register their cases

from kvlib import visibility

#: Numbers are of order 1. In half precision, the last place of such a number: the cases round every
#: intermediate result, the step only what it returns. In float32, a few of them, for long sums.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass
class Case:
    """A node's operator and attributes, and its inputs and outputs by their names in the standard."""

    operator: str
    attributes: dict
    inputs: dict
    outputs: dict


def shipped_cases():
    """Return the cases of both operators by name, without their expansions into other operators."""
    cases = {}
    for case in onnx_cases._NodeTestCases:
        node, *others = case.model.graph.node
        if others or node.op_type not in ("Attention", "TensorScatter"):
            continue
        ((inputs, outputs),) = case.data_sets
        cases[case.name] = Case(
            node.op_type,
            {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute},
            dict(zip(filter(None, node.input), map(as_tensor, inputs), strict=True)),
            dict(zip(filter(None, node.output), map(as_tensor, outputs), strict=True)),
        )
    return cases


def as_tensor(array):
    if array.dtype.name == "bfloat16":  # numpy has none of its own, so torch cannot read it
        return torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(array)


class Attention:
    """What a case of Attention asks, with its past and new keys and values in one row of N slots.

    Attributes
    ----------
    query, keys, values : torch.Tensor, shapes (B, H_q, Q, D), (B, H_k, N, D) and (B, H_k, N, D_v)
    n_past : int
        How many of the N slots are filled before the call.
    bias : torch.Tensor, shape (B, H_q, Q, N)
        What is added to the scores; minus infinity hides a slot.
    visible : torch.Tensor of bool, shape (B, Q, N)
        Which slots each query attends.
    """

    def __init__(self, case):
        attributes, inputs = case.attributes, case.inputs
        n_heads = {"Q": attributes.get("q_num_heads")} | dict.fromkeys("KV", attributes.get("kv_num_heads"))
        self.query, key, value = (split_heads(inputs[name], n_heads[name]) for name in "QKV")
        self.keys = torch.cat([inputs.get("past_key", key[:, :, :0]), key], dim=2)
        self.values = torch.cat([inputs.get("past_value", value[:, :, :0]), value], dim=2)
        self.n_past = self.keys.shape[2] - key.shape[2]
        self.bias = self._bias(inputs.get("attn_mask"))
        self.visible = self._visible(attributes.get("is_causal"), inputs.get("nonpad_kv_seqlen"))

    def _bias(self, mask):
        (B, H_q, Q, _), N = self.query.shape, self.keys.shape[2]
        if mask is None:
            return torch.zeros(B, H_q, Q, N)
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
        # Slots beyond the end of a short mask are hidden.
        mask = torch.nn.functional.pad(mask.float(), (0, N - mask.shape[-1]), value=-math.inf)
        return mask.expand(B, H_q, Q, N)

    def _visible(self, is_causal, n_live):
        (B, _, Q, _), N = self.query.shape, self.keys.shape[2]
        slot, query = torch.arange(N), torch.arange(Q)[:, None]
        live = torch.full([B, 1, 1], N) if n_live is None else n_live[:, None, None]
        visible = (slot < live).expand(B, Q, N)
        if is_causal:
            first_own = self.n_past if n_live is None else live - Q
            visible = visible & (slot <= first_own + query)
        shown = self.bias.isfinite()
        assert torch.equal(shown, shown[:, :1].expand_as(shown)), "heads see different slots"
        return visible & shown[:, 0]


def split_heads(x, n_heads):
    """Return [B, H, S, features], from that or from [B, S, H * features]."""
    return x if x.dim() == 4 else x.unflatten(2, (n_heads, -1)).transpose(1, 2)


def caps_the_scores(case):
    return case.attributes.get("softcap", 0) > 0


def attends_a_window_and_not_a_prefix(case):
    return max(case.attributes.get(f"{side}_window_size", -1) for side in ("left", "right")) >= 0


def hides_a_slot_between_others(case):
    visible = Attention(case).visible
    return bool((visible[..., 1:] > visible[..., :-1]).any())


def begins_with_idle_queries_and_does_not_end_with_them(case):
    attends = Attention(case).visible.any(dim=2)
    return bool((attends[:, 1:] > attends[:, :-1]).any())


def writes_round_the_end_of_the_buffer(case):
    return case.attributes.get("mode") == b"circular"


#: Cases that the contract of the step rules out, by the reason.
NOT_MAPPED = {
    caps_the_scores: [
        "test_attention_3d_diff_heads_sizes_softcap",
        "test_attention_3d_gqa_softcap",
        "test_attention_3d_softcap",
        "test_attention_3d_with_past_and_present_qk_matmul_softcap",
        "test_attention_4d_diff_heads_sizes_softcap",
        "test_attention_4d_gqa_softcap",
        "test_attention_4d_softcap",
        "test_attention_4d_softcap_neginf_mask",
        "test_attention_4d_softcap_neginf_mask_poison",
        "test_attention_4d_with_qk_matmul_softcap",
    ],
    attends_a_window_and_not_a_prefix: [
        "test_attention_3d_local_window",
        "test_attention_bidirectional_window",
        "test_attention_local_window",
        "test_attention_local_window_ext_cache_float16_mask",
        "test_attention_local_window_ext_cache_rank2_mask",
        "test_attention_local_window_ext_cache_rank3_head_mask",
        "test_attention_local_window_ext_cache_rank4_batch_mask",
        "test_attention_local_window_gqa_rank4_mask",
        "test_attention_local_window_rank1_boolean_mask",
        "test_attention_local_window_with_past",
    ],
    hides_a_slot_between_others: [
        "test_attention_4d_causal_nonpad_attn_mask_composition",
    ],
    begins_with_idle_queries_and_does_not_end_with_them: [
        "test_attention_23_boolmask_fullymasked_row_nan_robustness",
        "test_attention_23_fullymasked_qk_matmul_output_mode3_zero",
        "test_attention_24_fullymasked_qk_matmul_output_mode3_zero",
        "test_attention_24_qk_matmul_output_mode3_softmax_precision",
        "test_attention_4d_causal_nonpad_negative_offset_structural_empty",
        "test_attention_4d_causal_padded_kv_bf16",
    ],
    writes_round_the_end_of_the_buffer: [
        "test_tensorscatter_circular",
    ],
}

MAPPED_ATTENTION = [
    "test_attention_3d",
    "test_attention_3d_attn_mask",
    "test_attention_3d_causal",
    "test_attention_3d_causal_bf16",
    "test_attention_3d_diff_heads_sizes",
    "test_attention_3d_diff_heads_sizes_attn_mask",
    "test_attention_3d_diff_heads_sizes_causal",
    "test_attention_3d_diff_heads_sizes_scaled",
    "test_attention_3d_diff_heads_with_past_and_present",
    "test_attention_3d_gqa",
    "test_attention_3d_gqa_attn_mask",
    "test_attention_3d_gqa_causal",
    "test_attention_3d_gqa_scaled",
    "test_attention_3d_gqa_with_past_and_present",
    "test_attention_3d_scaled",
    "test_attention_3d_transpose_verification",
    "test_attention_3d_with_past_and_present",
    "test_attention_3d_with_past_and_present_qk_matmul",
    "test_attention_3d_with_past_and_present_qk_matmul_bias",
    "test_attention_3d_with_past_and_present_qk_matmul_softmax",
    "test_attention_4d",
    "test_attention_4d_attn_mask",
    "test_attention_4d_attn_mask_3d",
    "test_attention_4d_attn_mask_3d_causal",
    "test_attention_4d_attn_mask_4d",
    "test_attention_4d_attn_mask_4d_causal",
    "test_attention_4d_attn_mask_bool",
    "test_attention_4d_attn_mask_bool_4d",
    "test_attention_4d_attn_mask_causal_bf16",
    "test_attention_4d_causal",
    "test_attention_4d_causal_bf16",
    "test_attention_4d_causal_fp16",
    "test_attention_4d_causal_nonpad_batch_prefill",
    "test_attention_4d_causal_nonpad_continued_prefill",
    "test_attention_4d_causal_with_past_and_present",
    "test_attention_4d_diff_heads_mask4d_padded_kv",
    "test_attention_4d_diff_heads_sizes",
    "test_attention_4d_diff_heads_sizes_attn_mask",
    "test_attention_4d_diff_heads_sizes_causal",
    "test_attention_4d_diff_heads_sizes_scaled",
    "test_attention_4d_diff_heads_with_past_and_present",
    "test_attention_4d_diff_heads_with_past_and_present_mask3d",
    "test_attention_4d_diff_heads_with_past_and_present_mask4d",
    "test_attention_4d_fp16",
    "test_attention_4d_gqa",
    "test_attention_4d_gqa_attn_mask",
    "test_attention_4d_gqa_causal",
    "test_attention_4d_gqa_causal_nonpad_decode",
    "test_attention_4d_gqa_causal_nonpad_decode_fp16",
    "test_attention_4d_gqa_scaled",
    "test_attention_4d_gqa_with_past_and_present",
    "test_attention_4d_gqa_with_past_and_present_fp16",
    "test_attention_4d_padded_kv_bf16",
    "test_attention_4d_scaled",
    "test_attention_4d_with_past_and_present",
    "test_attention_4d_with_past_and_present_qk_matmul",
    "test_attention_4d_with_past_and_present_qk_matmul_bias",
    "test_attention_4d_with_past_and_present_qk_matmul_bias_3d_mask",
    "test_attention_4d_with_past_and_present_qk_matmul_bias_3d_mask_causal",
    "test_attention_4d_with_past_and_present_qk_matmul_bias_4d_mask",
    "test_attention_4d_with_past_and_present_qk_matmul_bias_4d_mask_causal",
    "test_attention_4d_with_qk_matmul",
    "test_attention_4d_with_qk_matmul_bias",
    "test_attention_4d_with_qk_matmul_softmax",
    "test_attention_causal_boolmask_nan_robustness",
    "test_attention_local_window_default",
]

MAPPED_TENSOR_SCATTER = [
    "test_tensorscatter",
    "test_tensorscatter_3d",
]

CASES = shipped_cases()


def test_every_shipped_case_is_either_mapped_or_left_out_for_a_reason():
    left_out = [name for names in NOT_MAPPED.values() for name in names]
    assert sorted(CASES) == sorted(MAPPED_ATTENTION + MAPPED_TENSOR_SCATTER + left_out)
    assert len(MAPPED_ATTENTION) >= 66


@pytest.mark.parametrize(
    ("reason", "name"), [(reason, name) for reason, names in NOT_MAPPED.items() for name in names]
)
def test_the_reason_to_leave_out_a_case_is_true(reason, name):
    assert reason(CASES[name])


@pytest.mark.parametrize("name", MAPPED_ATTENTION)
def test_the_step_gives_what_the_standard_expects_of_attention(name, step):
    case = CASES[name]
    asked = Attention(case)
    query, keys, options = with_bias_as_features(asked, case.attributes.get("scale"))
    visible = asked.visible
    if (visible == visible[:, :1]).all():
        # What sees the same slots can share one decoding query, as more heads.
        query, visible = query.flatten(1, 2)[:, :, None], visible[:, :1]
    lengths, counts = lengths_and_counts(visible)

    unfilled = torch.arange(keys.shape[2])[:, None] >= asked.n_past
    caches = {
        "key_cache": keys.masked_fill(unfilled, math.nan),
        "value_cache": asked.values.masked_fill(unfilled, math.nan),
        "lengths": torch.full([len(query)], asked.n_past),
    }
    missing = lengths - asked.n_past
    nobody = torch.zeros_like(query[:, :, :1]).expand(-1, -1, int(missing.max()), -1)
    before = append(step, caches, nobody, keys, asked.values, missing, options)
    caches = {name: before[name] for name in caches}
    after = append(step, caches, query, keys, asked.values, counts, options)
    unused = torch.arange(keys.shape[2]) >= after["lengths"][:, None]
    for cache in (after["key_cache"], after["value_cache"]):
        assert cache.transpose(1, 2)[unused].isnan().all(), "what was not appended was written"

    B, H_q, Q, D = asked.query.shape
    context = after["context"].reshape(B, H_q, Q, -1)
    expected = case.outputs
    assert_near(context, split_heads(expected["Y"], H_q))
    if "present_key" in expected:
        filled = slice(int(after["lengths"][0]))  # a causal case may have keys after its last query
        assert torch.equal(after["key_cache"][:, :, filled, :D], expected["present_key"][:, :, filled])
        assert torch.equal(after["value_cache"][:, :, filled], expected["present_value"][:, :, filled])
    if "qk_matmul_output" in expected and "attention" in after:
        mode = case.attributes.get("qk_matmul_output_mode", 0)
        weights = weights_from(expected["qk_matmul_output"], mode, asked.bias)
        assert_near(after["attention"].reshape(B, H_q, Q, -1), weights)


def with_bias_as_features(asked, scale):
    """Return query, keys and options for scores that have the bias in them.

    As features of their own, the query names itself and the key holds its bias for every query of its
    group: their product is the bias.
    """
    query, keys = asked.query, asked.keys
    options = {} if scale is None else {"scale": scale}
    bias = asked.bias.masked_fill(asked.bias == -math.inf, 0)  # hidden slots are the rule's affair
    if not bias.any():
        return query, keys, options
    (B, H_q, Q, D), H_k = query.shape, keys.shape[1]
    scale = 1 / math.sqrt(D) if scale is None else scale
    n_names = H_q // H_k * Q
    names = torch.eye(n_names, dtype=query.dtype).reshape(-1, Q, n_names).repeat(H_k, 1, 1)
    held = (bias / scale).reshape(B, H_k, n_names, -1).mT.to(keys.dtype)
    query = torch.cat([query, names.expand(B, -1, -1, -1)], dim=3)
    return query, torch.cat([keys, held], dim=3), {"scale": scale}


def lengths_and_counts(visible):
    """Return the lengths and counts for which the step's own rule shows these slots, [B, Q, N]."""
    counts = visible.any(dim=2).sum(dim=1)
    lengths = visible[:, 0].sum(dim=1) - 1
    assert np.array_equal(visibility.mask(lengths.tolist(), counts.tolist(), *visible.shape[1:]), visible)
    return lengths, counts


def append(step, caches, query, keys, values, counts, options):
    """Run the step: each row appends the next of all keys and values that its cache lacks."""
    Q, N = query.shape[2], keys.shape[2]
    slots = caches["lengths"][:, None] + torch.arange(Q)
    offered = slots.clamp(max=N - 1)[:, None, :, None]
    return step(
        query=query,
        new_key=keys.take_along_dim(offered, dim=2),
        new_value=values.take_along_dim(offered, dim=2),
        append_mask=torch.arange(Q) < counts[:, None],
        options=options,
        **caches,
    )


@pytest.mark.parametrize("name", MAPPED_TENSOR_SCATTER)
def test_the_step_writes_what_the_standard_expects_of_tensor_scatter(name, step):
    inputs, (expected,) = CASES[name].inputs, CASES[name].outputs.values()
    cache, new = inputs["past_cache"], inputs["update"]
    if cache.dim() == 3:
        cache, new, expected = cache[:, None], new[:, None], expected[:, None]
    result = step(
        query=new,
        new_key=new,
        new_value=-new,
        key_cache=cache,
        value_cache=-cache,
        lengths=inputs["write_indices"],
        append_mask=torch.ones(new.shape[0], new.shape[2], dtype=torch.bool),
        options={},
    )
    assert torch.equal(result["key_cache"], expected)
    assert torch.equal(result["value_cache"], -expected)


def assert_near(actual, expected):
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def weights_from(given, mode, bias):
    """Return the weights for what a case gives: scores without or with the bias, or the weights."""
    if mode == 3:
        return given
    return torch.softmax(given + bias if mode == 0 else given, dim=-1)
