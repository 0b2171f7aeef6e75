"""Costs are facts: each formula is held against a count, and each count against bytes that exist."""

from itertools import product

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kvlib import costs, kv_cache_attention_step, kv_cache_step, visibility
from kvlib.costs import Work


def test_four_tokens_cost_ten_scores_with_a_cache_and_thirty_without():
    recomputed, cached = costs.recomputing(1, 4), costs.caching(1, 4)
    assert (recomputed.scores, recomputed.visible_scores, cached.scores) == (30, 20, 10)


@pytest.mark.parametrize("n_prompt, n_new", [(1, 1), (1, 7), (5, 1), (4, 6)])
def test_the_formulas_equal_sums_over_the_steps(n_prompt, n_new):
    steps = range(n_prompt, n_prompt + n_new)
    row_nbytes, n_layers = (16 + 16) * 4, 3
    assert costs.recomputing(n_prompt, n_new, n_layers=3, head_dim=16, itemsize=4) == Work(
        rows_projected=n_layers * sum(3 * t for t in steps),
        scores=n_layers * sum(t * t for t in steps),
        visible_scores=n_layers * sum(sum(range(1, t + 1)) for t in steps),
        bytes_moved=n_layers * sum(2 * t for t in steps) * row_nbytes,
    )
    cached_steps = range(1, n_prompt + n_new)
    assert costs.caching(n_prompt, n_new, n_layers=3, head_dim=16, itemsize=4) == Work(
        rows_projected=n_layers * sum(3 for _ in cached_steps),
        scores=n_layers * sum(cached_steps),
        visible_scores=n_layers * sum(cached_steps),
        bytes_moved=n_layers * sum(1 + t for t in cached_steps) * row_nbytes,
    )


def test_caching_leaves_the_total_number_of_scores_quadratic():
    scores = [costs.caching(1, n).scores for n in (100, 200, 400)]
    assert scores[1] / scores[0] == pytest.approx(4, rel=0.02)
    assert scores[2] / scores[1] == pytest.approx(4, rel=0.01)


def test_cache_nbytes_of_the_worked_case_is_960():
    # Two layers, three rows of five tokens, two key/value heads of size 4, float16.
    assert costs.cache_nbytes(n_layers=2, n_kv_heads=2, head_dim=4, n_tokens=3 * 5, itemsize=2) == 960


def test_cache_nbytes_equals_the_bytes_of_real_tensors():
    B, H_k, M, D, D_v = 2, 3, 5, 4, 7
    keys, values = torch.zeros(B, H_k, M, D).half(), torch.zeros(B, H_k, M, D_v).half()
    assert costs.cache_nbytes(1, H_k, D, B * M, 2, head_dim_v=D_v) == keys.nbytes + values.nbytes


def test_cache_nbytes_of_nothing_is_nothing():
    assert costs.cache_nbytes(2, 2, 4, 0, 2) == 0


@pytest.mark.parametrize("name", ["n_layers", "n_kv_heads", "head_dim", "n_tokens", "itemsize", "head_dim_v"])
def test_cache_nbytes_names_the_argument_that_is_wrong(name):
    sizes = dict(n_layers=1, n_kv_heads=1, head_dim=1, n_tokens=1, itemsize=1, head_dim_v=1)
    with pytest.raises(ValueError, match=rf"^{name} was -1; it must be 0 or more"):
        costs.cache_nbytes(**sizes | {name: -1})
    with pytest.raises(TypeError, match=rf"^{name} was 1\.5; it must be a whole number"):
        costs.cache_nbytes(**sizes | {name: 1.5})


@pytest.mark.parametrize("name", ["n_prompt", "n_new", "n_layers", "head_dim", "itemsize"])
@pytest.mark.parametrize("formula", [costs.recomputing, costs.caching])
def test_the_formulas_name_the_argument_that_is_wrong(formula, name):
    arguments = dict(n_prompt=1, n_new=1, n_layers=1, head_dim=1, itemsize=1)
    with pytest.raises(ValueError, match=rf"^{name} was 0; it must be 1 or more"):
        formula(**arguments | {name: 0})
    with pytest.raises(TypeError, match=rf"^{name} was None; it must be a whole number"):
        formula(**arguments | {name: None})


def rows_recopied(append, n_tokens):
    """Count the cached rows that each append puts into memory where they were not before."""
    recopied, cache = 0, None
    for _ in range(n_tokens):
        longer = append(cache)
        if cache is not None and longer.data_ptr() != cache.data_ptr():
            recopied += cache.shape[1]
        cache = longer
    return recopied


@pytest.mark.parametrize("n_tokens", [0, 1, 2, 3, 30])
def test_the_tuple_cache_recopies_as_many_rows_as_the_formula_says(n_tokens):
    row = torch.ones(1, 1, 4)

    def append(keys):
        return kv_cache_step(row, row, row, None if keys is None else (keys, keys))[1][0]

    assert rows_recopied(append, n_tokens) == costs.rows_recopied_by_concatenation(n_tokens)


def test_writing_into_a_preallocated_buffer_recopies_nothing():
    buffer, row = torch.zeros(1, 30, 4), torch.ones(1, 4)

    def append(keys):
        end = 0 if keys is None else keys.shape[1]
        buffer[:, end] = row
        return buffer[:, : end + 1]

    assert rows_recopied(append, 30) == 0


def test_a_batched_step_copies_the_whole_buffer():
    # Purity has this price; the pages say so.
    one = torch.ones(1, 1, 1, 4)
    keys = torch.zeros(1, 1, 30, 4)
    result = kv_cache_attention_step(
        one, one, one, keys, keys, torch.tensor([3]), torch.tensor([[True]]), {}
    )
    assert result["key_cache"].data_ptr() != keys.data_ptr()
    assert result["key_cache"].nbytes == keys.nbytes


STEPS = {
    "one token a row": dict(lengths=[3, 1], counts=[1, 1], Q=1, M=5),
    "ragged, with an idle row": dict(lengths=[2, 4, 1], counts=[3, 0, 1], Q=3, M=6),
    "a chunk that fills the buffer": dict(lengths=[1], counts=[3], Q=3, M=4),
    "nothing": dict(lengths=[2], counts=[0], Q=1, M=3),
}
SIZES = dict(n_heads=4, n_kv_heads=2, head_dim=3, head_dim_v=2, itemsize=8)


def step_arguments(lengths, counts, Q, M):
    """The arguments of a batched step with the sizes above, in float64."""
    torch.manual_seed(0)
    B, H_q, H_k, D, D_v = len(lengths), *list(SIZES.values())[:4]
    shapes = {
        "query": (B, H_q, Q, D),
        "new_key": (B, H_k, Q, D),
        "new_value": (B, H_k, Q, D_v),
        "key_cache": (B, H_k, M, D),
        "value_cache": (B, H_k, M, D_v),
    }
    numbers = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    append_mask = torch.arange(Q) < torch.tensor(counts)[:, None]
    return numbers | {"lengths": torch.tensor(lengths), "append_mask": append_mask, "options": {}}


def step_cost(lengths, counts, Q, M, **ways):
    return costs.attention_step(lengths, counts, Q, M, **SIZES, **ways)


def made_by_a_step(arguments):
    """The floating numbers that a step makes, by (in_place, need_weights).

    In place, a cache counts by its appended slots only: the rest stays where it was.
    """
    result = kv_cache_attention_step(**arguments)
    lengths, slot = arguments["lengths"][:, None], torch.arange(arguments["key_cache"].shape[2])
    appended = (slot >= lengths) & (slot < result["lengths"][:, None])  # [B, M]
    caches = [result[name].movedim(1, 2) for name in ("key_cache", "value_cache")]
    made = {}
    for in_place, need_weights in product((True, False), repeat=2):
        written = [cache[appended] if in_place else cache for cache in caches]
        weights = [result["attention"]] if need_weights else []
        outputs = [result["context"], *written, *weights]
        made[in_place, need_weights] = torch.cat([output.flatten() for output in outputs])
    return made


@pytest.mark.parametrize("step", STEPS)
def test_a_step_reads_each_number_that_its_result_depends_on_and_writes_the_result(step):
    arguments = step_arguments(**STEPS[step])
    made = made_by_a_step(arguments)
    read = dict.fromkeys(made, 0)
    for tensor in (t for t in arguments.values() if torch.is_tensor(t) and t.is_floating_point()):
        for place in product(*map(range, tensor.shape)):
            kept = tensor[place].item()
            tensor[place] = kept + 1
            for way, numbers in made_by_a_step(arguments).items():
                read[way] += not torch.equal(numbers, made[way])
            tensor[place] = kept
    for (in_place, need_weights), numbers in made.items():
        cost = step_cost(**STEPS[step], in_place=in_place, need_weights=need_weights)
        n_read = read[in_place, need_weights]
        assert (cost.bytes_read, cost.bytes_written) == (n_read * 8, numbers.nbytes)
        assert cost.bytes_moved == n_read * 8 + numbers.nbytes


@pytest.mark.parametrize("step", STEPS)
def test_a_step_multiplies_as_often_as_torch_counts_for_every_query_and_what_it_may_attend(step):
    arguments = step_arguments(**STEPS[step])
    result = kv_cache_attention_step(**arguments)
    lengths, counts, Q, M = STEPS[step].values()
    mask = torch.from_numpy(visibility.mask(lengths, counts, Q, M))
    with FlopCounterMode(display=False) as counter:
        for row, query, head in product(range(len(lengths)), range(Q), range(4)):
            attended = mask[row, query]
            scores = result["key_cache"][row, head // 2, attended] @ arguments["query"][row, head, query][:, None]
            scores.mT @ result["value_cache"][row, head // 2, attended]
    cost = step_cost(**STEPS[step], in_place=True, need_weights=False)
    assert 2 * cost.multiply_adds == counter.get_total_flops()


def test_the_intensity_is_multiply_adds_per_byte():
    cost = costs.StepCost(bytes_read=3, bytes_written=2, multiply_adds=10)
    assert (cost.bytes_moved, cost.intensity) == (5, 2)


def test_a_long_row_brings_each_number_to_the_queries_of_its_group_and_to_no_more():
    # Per number: Q * H_q / H_k multiply-adds.
    for Q, n_kv_heads in product((1, 4), (1, 2, 8)):
        cost = costs.attention_step(
            [10**6], [Q], Q, 2 * 10**6,
            n_heads=8, n_kv_heads=n_kv_heads, head_dim=64, itemsize=4, in_place=True, need_weights=False,
        )  # fmt: skip
        assert cost.intensity * 4 == pytest.approx(Q * 8 / n_kv_heads, rel=1e-3)


@pytest.mark.parametrize("name", SIZES)
def test_a_step_cost_names_the_size_that_is_wrong(name):
    arguments = dict(lengths=[1], counts=[1], n_queries=1, capacity=2, in_place=True, need_weights=True)
    with pytest.raises(ValueError, match=rf"^{name} was 0; it must be 1 or more"):
        costs.attention_step(**arguments, **SIZES | {name: 0})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(lengths=[-1]), r"^lengths\[0\] was -1; it must be 0 or more"),
        (dict(counts=[3]), r"^counts\[0\] was 3; it must be at most n_queries, 2"),
        (dict(lengths=[4]), r"^lengths\[0\] \+ counts\[0\] was 6; it must be at most the capacity, 5"),
        (dict(lengths=[1, 1]), r"^counts has 1 rows; it must have as many as lengths, 2"),
        (dict(n_queries=-1), r"^n_queries was -1; it must be 0 or more"),
        (dict(capacity=-1), r"^capacity was -1; it must be 0 or more"),
        (dict(n_heads=3), r"^n_heads was 3; it must be a multiple of n_kv_heads, 2"),
    ],
)
def test_a_step_cost_names_what_does_not_fit(wrong, message):
    arguments = dict(lengths=[1], counts=[2], n_queries=2, capacity=5, in_place=True, need_weights=True)
    with pytest.raises(ValueError, match=message):
        costs.attention_step(**arguments | SIZES | wrong)


def test_the_recopied_rows_name_a_wrong_count():
    with pytest.raises(ValueError, match="^n_tokens was -1; it must be 0 or more"):
        costs.rows_recopied_by_concatenation(-1)
    with pytest.raises(TypeError, match="^n_tokens was 2.0; it must be a whole number"):
        costs.rows_recopied_by_concatenation(2.0)


def test_numpy_integers_are_whole_numbers_too():
    assert costs.cache_nbytes(*np.array([1, 2, 3, 4, 5])) == 1 * 2 * 4 * 6 * 5


def test_compare_sets_the_tallies_side_by_side():
    lines = costs.compare(recompute=Work(1, 2000, 3, 4), cache=Work(5, 6, 7, 8)).splitlines()
    assert lines[0].split() == ["recompute", "cache"]
    assert [line.rsplit(maxsplit=2) for line in lines[1:]] == [
        ["rows projected", "1", "5"],
        ["scores", "2,000", "6"],
        ["visible scores", "3", "7"],
        ["bytes moved", "4", "8"],
    ]
