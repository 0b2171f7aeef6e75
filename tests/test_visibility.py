"""The visibility rule: who may attend what, the name of the reason, and the sentence for it."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
from cases import PROPERTY, batches
from hypothesis import given

from kvlib import kv_cache_attention_step, visibility
from kvlib.visibility import STATES

#: length, count, Q and M of every row that fits, up to small sizes.
ROWS = [
    (length, count, n_queries, capacity)
    for capacity, n_queries in itertools.product(range(1, 6), range(0, 4))
    for length in range(capacity + 1)
    for count in range(min(n_queries, capacity - length) + 1)
]


def cells(length, count, n_queries, capacity):
    return itertools.product(range(n_queries), range(capacity))


class TestWhoMayAttend:
    """Query t attends slot j exactly when it was appended and j is not later than its own slot."""

    def test_two_queries_of_one_call_see_different_prefixes(self):
        mask = visibility.mask(lengths=[2], counts=[2], n_queries=2, capacity=5)
        assert mask.tolist() == [[[True, True, True, False, False], [True, True, True, True, False]]]

    def test_the_mask_is_the_rule_for_every_small_row(self):
        for length, count, n_queries, capacity in ROWS:
            mask = visibility.mask([length], [count], n_queries, capacity)
            assert mask.shape == (1, n_queries, capacity)
            assert mask.dtype == np.bool_
            for t, j in cells(length, count, n_queries, capacity):
                assert mask[0, t, j] == (t < count and j <= length + t)

    def test_rows_of_a_batch_do_not_mix(self):
        lengths, counts = [0, 3, 5, 1], [2, 0, 0, 3]
        together = visibility.mask(lengths, counts, 3, 5)
        alone = [visibility.mask([length], [count], 3, 5)[0] for length, count in zip(lengths, counts)]
        assert np.array_equal(together, np.stack(alone))

    def test_true_means_may_attend(self):
        assert visibility.may_attend(slot=0, query=0, length=0, count=1) is True
        assert visibility.may_attend(slot=1, query=0, length=0, count=1) is False

    def test_it_works_on_integers_numpy_arrays_and_torch_tensors_alike(self):
        slots, queries, length, count = range(6), range(3), 2, 2
        expected = [[visibility.may_attend(j, t, length, count) for j in slots] for t in queries]
        in_numpy = visibility.may_attend(np.arange(6), np.arange(3)[:, None], length, count)
        in_torch = visibility.may_attend(torch.arange(6), torch.arange(3)[:, None], length, count)
        assert in_numpy.tolist() == in_torch.tolist() == expected

    def test_batches_without_rows_queries_or_slots_give_empty_masks(self):
        assert visibility.mask([], [], 2, 3).shape == (0, 2, 3)
        assert visibility.mask([1], [0], 0, 3).shape == (1, 0, 3)
        assert visibility.mask([0], [0], 2, 0).shape == (1, 2, 0)

    @PROPERTY
    @given(batches())
    def test_the_kernel_gives_weight_to_exactly_the_slots_of_the_mask(self, args):
        args["query"] = args["query"] * 0  # equal scores: no weight is too small to see
        attention = kv_cache_attention_step(**args)["attention"]
        counts = args["append_mask"].sum(dim=1)
        mask = visibility.mask(args["lengths"], counts, *attention.shape[2:])
        for head in range(attention.shape[1]):
            assert np.array_equal(attention[:, head].numpy() > 0, mask)


class TestStates:
    """A query and a slot are always in one state, and its name says why the query may attend or not."""

    def test_the_states_have_these_names_in_this_order(self):
        assert STATES == ("past", "chunk", "self", "future", "unused", "idle")

    def test_one_row_shows_every_state(self):
        states = visibility.states(lengths=[2], counts=[3], n_queries=4, capacity=6)
        names = [[STATES[i] for i in query] for query in states[0]]
        assert names == [
            ["past", "past", "self", "future", "future", "unused"],
            ["past", "past", "chunk", "self", "future", "unused"],
            ["past", "past", "chunk", "chunk", "self", "unused"],
            ["idle", "idle", "idle", "idle", "idle", "idle"],
        ]

    def test_every_state_is_its_line_of_the_table(self):
        for length, count, n_queries, capacity in ROWS:
            states = visibility.states([length], [count], n_queries, capacity)
            assert states.shape == (1, n_queries, capacity)
            assert states.dtype == np.int8
            for t, j in cells(length, count, n_queries, capacity):
                holds = {
                    "past": t < count and j < length,
                    "chunk": t < count and length <= j < length + t,
                    "self": t < count and j == length + t,
                    "future": t < count and length + t < j < length + count,
                    "unused": t < count and j >= length + count,
                    "idle": t >= count,
                }
                assert sum(holds.values()) == 1
                name = next(name for name in holds if holds[name])
                assert STATES[states[0, t, j]] == name
                assert visibility.state(j, t, length, count) == name

    def test_a_query_may_attend_exactly_its_past_its_chunk_and_itself(self):
        for row in ROWS:
            length, count, n_queries, capacity = row
            states = visibility.states([length], [count], n_queries, capacity)
            attended = np.isin(states, [STATES.index(name) for name in ("past", "chunk", "self")])
            assert np.array_equal(attended, visibility.mask([length], [count], n_queries, capacity))

    def test_rows_of_a_batch_do_not_mix(self):
        lengths, counts = [0, 3, 5, 1], [2, 0, 0, 3]
        together = visibility.states(lengths, counts, 3, 5)
        alone = [visibility.states([length], [count], 3, 5)[0] for length, count in zip(lengths, counts)]
        assert np.array_equal(together, np.stack(alone))


class TestSentences:
    """Every cell has a plain sentence that names the slot, the query, and the reason."""

    def test_every_state_has_one_sentence_form(self):
        assert set(visibility.SENTENCES) == set(STATES)

    @pytest.mark.parametrize(
        ("slot", "query", "words"),
        [
            (1, 1, "Slot 1 was filled before this call: it is the past of query 1."),
            (3, 2, "Slot 3 holds a token appended before query 2 in this call."),
            (4, 2, "Slot 4 holds the token of query 2 itself."),
            (4, 1, "Slot 4 holds a token appended after query 1 in this call: it is the future."),
            (6, 0, "Slot 6 is unused: after this call the length of the row is 5."),
            (0, 3, "Query 3 is idle: nothing was appended for it, so it attends no slot."),
        ],
    )
    def test_the_sentence_of_each_state(self, slot, query, words):
        assert visibility.sentence(slot, query, length=2, count=3) == words

    def test_the_sentence_is_that_of_the_state(self):
        for length, count, n_queries, capacity in ROWS:
            for query, slot in cells(length, count, n_queries, capacity):
                name = visibility.state(slot, query, length, count)
                words = visibility.sentence(slot, query, length, count)
                assert name in ("chunk", "self") or name in words
                assert f"uery {query}" in words or name == "unused"
                assert f"Slot {slot} " in words or name == "idle"

    def test_the_sentence_of_a_query_says_which_slots_it_attends(self):
        assert visibility.query_sentence(query=1, length=3, count=2) == "Query 1 attends slots 0 to 4."
        assert visibility.query_sentence(query=0, length=0, count=2) == "Query 0 attends slot 0 only."
        assert (
            visibility.query_sentence(query=2, length=3, count=2)
            == "Query 2 is idle and attends no slot."
        )
        assert (
            visibility.query_sentence(query=0, length=0, count=0)
            == "Query 0 is idle and attends no slot."
        )

    def test_the_sentence_of_a_query_agrees_with_the_mask(self):
        for length, count, n_queries, capacity in ROWS:
            mask = visibility.mask([length], [count], n_queries, capacity)[0]
            for query in range(n_queries):
                attended = np.flatnonzero(mask[query]).tolist()
                assert attended == list(range(len(attended)))
                ending = {0: "is idle and attends no slot.", 1: "attends slot 0 only."}.get(
                    len(attended), f"attends slots 0 to {len(attended) - 1}."
                )
                assert visibility.query_sentence(query, length, count) == f"Query {query} {ending}"


class TestBadInput:
    """An error names the argument, what it was, and what it must be."""

    @pytest.mark.parametrize("function", [visibility.mask, visibility.states])
    @pytest.mark.parametrize(
        ("args", "error", "words"),
        [
            (([0, -1], [1, 1], 1, 4), ValueError, r"lengths\[1\] was -1; it must be 0 or more"),
            (([0, 1.5], [1, 1], 1, 4), TypeError, r"lengths\[1\] was 1\.5; it must be a whole number"),
            (([0], [-2], 1, 4), ValueError, r"counts\[0\] was -2; it must be 0 or more"),
            (([0], ["1"], 1, 4), TypeError, r"counts\[0\] was '1'; it must be a whole number"),
            (([0, 1], [1], 1, 4), ValueError, r"counts has 1 rows; it must have as many as lengths, 2"),
            (([0], [2], 1, 4), ValueError, r"counts was \[2\]; no row can append more than the 1 slots"),
            (([3], [2], 2, 4), ValueError, r"lengths \+ counts was \[5\]; .* capacity of 4 slots"),
            (([5], [0], 2, 4), ValueError, r"lengths \+ counts was \[5\]; .* capacity of 4 slots"),
            (([0], [0], -1, 4), ValueError, r"n_queries was -1; it must be 0 or more"),
            (([0], [True], 1, 4), TypeError, r"counts\[0\] was True; it must be a whole number"),
            (([2**70], [0], 1, 4), ValueError, rf"lengths\[0\] was {2**70}; it must be {2**60} or less"),
            (([0], [0], None, 4), TypeError, r"n_queries was None; it must be a whole number"),
            (([0], [0], 1, -4), ValueError, r"capacity was -4; it must be 0 or more"),
            (([0], [0], 1, 4.0), TypeError, r"capacity was 4\.0; it must be a whole number"),
            ((None, [0], 1, 4), TypeError, "lengths was None; it must be a sequence of whole numbers"),
            (([0], 3, 1, 4), TypeError, "counts was 3; it must be a sequence of whole numbers"),
        ],
    )
    def test_a_batch_that_cannot_be_is_refused(self, function, args, error, words):
        with pytest.raises(error, match=words):
            function(*args)

    @pytest.mark.parametrize("function", [visibility.state, visibility.sentence])
    @pytest.mark.parametrize("name", ["slot", "query", "length", "count"])
    def test_a_cell_that_cannot_be_is_refused(self, function, name):
        cell = {"slot": 1, "query": 0, "length": 2, "count": 1}
        with pytest.raises(ValueError, match=f"{name} was -1; it must be 0 or more"):
            function(**cell | {name: -1})
        with pytest.raises(TypeError, match=f"{name} was 0.5; it must be a whole number"):
            function(**cell | {name: 0.5})
        with pytest.raises(TypeError, match=f"{name} was True; it must be a whole number"):
            function(**cell | {name: True})

    @pytest.mark.parametrize("name", ["query", "length", "count"])
    def test_a_query_that_cannot_be_is_refused(self, name):
        query = {"query": 0, "length": 2, "count": 1}
        with pytest.raises(ValueError, match=f"{name} was -1; it must be 0 or more"):
            visibility.query_sentence(**query | {name: -1})
        with pytest.raises(TypeError, match=f"{name} was 0.5; it must be a whole number"):
            visibility.query_sentence(**query | {name: 0.5})
        with pytest.raises(TypeError, match=f"{name} was True; it must be a whole number"):
            visibility.query_sentence(**query | {name: True})


def test_visibility_is_importable_where_torch_is_not_installed():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from kvlib import visibility\n"
        "visibility.mask([1], [1], 1, 2)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
