"""torch's flex_attention, given the rule itself as its mask, computes what the step does.

`flex_attention` knows grouped heads and any rule of visibility, but no cache, so the rows are appended
here one by one.  The rule is `kvlib.visibility.may_attend`: this file proves that the kernel keeps to it,
in float64 and for every batch that hypothesis draws, and not that the rule is right; the other files
of this folder do that.
"""

import cases
import pytest
import torch
from hypothesis import given, settings
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from kvlib.visibility import may_attend

#: Sums of a few numbers of order 1 in float64, in another order.
TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}


def appended(cache, new, lengths, counts):
    cache = cache.clone()
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        cache[row, :, length : length + count] = new[row, :, :count]
    return cache


# Compiled, it is fast; as it is, it says so once, and is what its compiled form is tested against.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@settings(cases.PROPERTY, max_examples=25)  # each takes a tenth of a second
@given(args=cases.batches().filter(lambda args: args["query"].shape[2]))
def test_the_step_agrees_with_flex_attention_under_the_rule(step, args):
    (B, _, Q, _), M = args["query"].shape, args["key_cache"].shape[2]
    lengths, counts = args["lengths"], args["append_mask"].sum(dim=1)
    rows = lengths.tolist(), counts.tolist()
    keys = appended(args["key_cache"], args["new_key"], *rows)
    values = appended(args["value_cache"], args["new_value"], *rows)

    def rule(row, _head, query, slot):
        return may_attend(slot, query, lengths[row], counts[row])

    block_mask = create_block_mask(rule, B, None, Q, M, device="cpu")
    context = flex_attention(
        args["query"], keys, values, block_mask=block_mask, enable_gqa=True, **args["options"]
    )

    result = step(**args)
    torch.testing.assert_close(result["context"], context, **TOLERANCE)
    assert torch.equal(result["key_cache"], keys)
    assert torch.equal(result["value_cache"], values)
