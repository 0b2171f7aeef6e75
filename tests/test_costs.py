"""Costs are facts: each formula is held against a count, and each count against bytes that exist."""

import numpy as np
import pytest
import torch

from kvlib import costs, kv_cache_attention_step, kv_cache_step
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
