"""The slot explorer's arguments, its state, and what it shows without JavaScript."""

import json
import re
from html import unescape

import numpy as np
import pytest

from kvlib import visibility
from kvlib.widgets import SlotExplorer
from kvlib.widgets._text import GLYPHS

GOOD = {"lengths": [3, 5], "counts": [3, 1], "n_queries": 3, "capacity": 8}


def json_in(html):
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', html)[1])


@pytest.mark.parametrize(
    "wrong, error, message",
    [
        ({"lengths": [3, -1]}, ValueError, r"lengths\[1\] was -1; it must be 0 or more"),
        ({"lengths": [3, 2.5]}, TypeError, r"lengths\[1\] was 2.5; it must be a whole number"),
        ({"lengths": [3]}, ValueError, "counts has 2 rows; it must have as many as lengths, 1"),
        ({"lengths": [], "counts": []}, ValueError, r"lengths was \[\]; it must hold at least one row"),
        (
            {"counts": [4, 1]},
            ValueError,
            r"counts was \[4, 1\]; no row can append more than the 3 slots offered",
        ),
        (
            {"capacity": 5},
            ValueError,
            r"lengths \+ counts was \[6, 6\]; no row can hold more than its capacity of 5",
        ),
        (
            {"lengths": [0], "counts": [0], "capacity": 0},
            ValueError,
            "capacity was 0; it must be 1 or more",
        ),
        ({"capacity": "8"}, TypeError, "capacity was '8'; it must be a whole number"),
        ({"n_queries": -1}, ValueError, "n_queries was -1; it must be 0 or more"),
        ({"selected": (2, 0, 0)}, ValueError, "selected row was 2; it must be less than 2"),
        ({"selected": (0, 3, 0)}, ValueError, "selected query was 3; it must be less than 3"),
        ({"selected": (0, 0, 8)}, ValueError, "selected slot was 8; it must be less than 8"),
        ({"selected": (0, 0)}, TypeError, r"selected was \(0, 0\); it must be \(row, query, slot\)"),
        ({"selected": 4}, TypeError, r"selected was 4; it must be \(row, query, slot\)"),
        ({"title": 3}, TypeError, "title was 3; it must be a string"),
    ],
)
def test_a_wrong_argument_is_named_with_what_it_was_and_must_be(wrong, error, message):
    with pytest.raises(error, match=message):
        SlotExplorer(**{**GOOD, **wrong})


def test_the_state_holds_plain_numbers_whatever_came_in():
    explorer = SlotExplorer(
        np.array([3, 5]), np.array([3, 1]), np.int64(3), np.int32(8), selected=np.array([0, 1, 5])
    )
    wanted = {**GOOD, "selected": [0, 1, 5], "title": ""}
    assert explorer.state() == wanted
    assert json_in(explorer.html()) == wanted


def test_markup_in_a_title_is_text_and_cannot_end_the_script():
    title = "</script><b>x</b> & <!--"
    html = SlotExplorer(**GOOD, title=title).html()
    assert json_in(html)["title"] == title
    assert html.count("</script>") == 1 and "<b>x</b>" not in html and "<!--" not in html
    assert title in unescape(html)


def test_the_fallback_shows_every_state_and_the_sentence_of_the_selected_cell():
    html = SlotExplorer(**GOOD, selected=(0, 1, 5)).html()
    states = visibility.states([3, 5], [3, 1], 3, 8).ravel()
    assert re.findall(r'<td class="kv-cell kv-(\w+)">', html) == [
        visibility.STATES[code] for code in states
    ]
    assert re.findall(r'<td class="kv-cell kv-\w+">(.)</td>', html) == [
        GLYPHS[visibility.STATES[code]] for code in states
    ]
    assert "Row 0: length 3, appends 3 of 3" in html and "Row 1: length 5, appends 1 of 3" in html
    assert "<b>Row 0, query 1, slot 5: not attended.</b>" in html
    assert visibility.sentence(5, 1, 3, 3) in html and visibility.query_sentence(1, 3, 3) in html


def test_the_fallback_of_a_cell_that_is_attended_says_so():
    assert "<b>Row 1, query 0, slot 5: attended.</b>" in SlotExplorer(**GOOD, selected=(1, 0, 5)).html()


def test_the_fallback_of_a_call_without_queries_says_so():
    assert "This call offers no slots" in SlotExplorer([2], [0], n_queries=0, capacity=4).html()


def test_the_fallback_keeps_to_the_grid_when_numbers_shrank_after_the_selection():
    explorer = SlotExplorer([1], [1], n_queries=3, capacity=9, selected=(0, 2, 8))
    explorer.capacity, explorer.n_queries = 4, 2
    assert "Row 0, query 1, slot 3" in explorer.html()


def test_its_repr_says_what_it_shows():
    assert (
        repr(SlotExplorer(**GOOD))
        == "<Slot explorer: lengths [3, 5], counts [3, 1], n_queries 3, capacity 8>"
    )
