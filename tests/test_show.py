"""Figures follow the theme, have an alternative text that states what they show, and can share a page."""

import re
import sys
from importlib import import_module
from xml.etree import ElementTree

import pytest

from kvlib import costs, show

FIGURES = {
    "score_tables": lambda: show.score_tables(4),
    "work_growth": lambda: show.work_growth(8, n_layers=2, head_dim=16),
    "rows_written": lambda: show.rows_written(8),
    "roofline": lambda: show.roofline(
        2e9,
        8e9,
        {"one query": {"8 heads": (0.25, 0.4e9), "1 head": (2, 3e9)}, "more queries": {"16": (16, 6e9)}},
    ),
}


def svg(figure):
    return next(ElementTree.fromstring(figure.data).iter("{http://www.w3.org/2000/svg}svg"))


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_an_image_with_an_alternative_text(name):
    image = svg(FIGURES[name]())
    assert image.get("role") == "img"
    assert len(image.get("aria-label")) > 80


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_takes_its_ink_from_the_page_and_paints_no_background(name):
    data = FIGURES[name]().data
    colours = {colour.lower() for colour in re.findall(r"(?:fill|stroke): (#\w+)", data)}
    assert "currentColor" in data
    assert colours <= {show._BLUE, show._ORANGE}


@pytest.mark.parametrize("name", FIGURES)
def test_no_figure_restyles_the_page_or_asks_the_network_for_anything(name):
    data = FIGURES[name]().data
    assert "<style" not in data
    addresses = {address for address in re.findall(r"https?://[^\"]+", data)}
    assert addresses == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


@pytest.mark.parametrize("name", ["IPython", "matplotlib"])
def test_a_missing_package_is_named_with_the_extra_that_adds_it(monkeypatch, name):
    monkeypatch.delitem(sys.modules, "kvlib.show")
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"kvlib.show needs {name}.*kvlib\[figures\]"):
        import_module("kvlib.show")


def test_figures_on_one_page_share_no_id():
    ids = [
        element.get("id")
        for figure in FIGURES.values()
        for element in ElementTree.fromstring(figure().data).iter()
        if element.get("id")
    ]
    assert ids and len(ids) == len(set(ids))


@pytest.mark.parametrize("name", FIGURES)
def test_every_reference_in_a_figure_points_at_something_in_it(name):
    data = FIGURES[name]().data
    references = set(re.findall(r'(?:href="|url\()#([^")]+)', data))
    assert references
    assert references <= set(re.findall(r'\bid="([^"]+)"', data))


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_drawn_twice_is_the_same(name):
    assert FIGURES[name]().data == FIGURES[name]().data


def test_the_score_tables_count_their_own_cells():
    image = svg(show.score_tables(4))
    glyphs = [text.text for text in image.iter("{http://www.w3.org/2000/svg}text") if text.text in "●=×"]
    counts = {glyph: glyphs.count(glyph) for glyph in "●=×"}
    assert counts == {"●": 10, "=": 10, "×": 10}
    assert sum(counts.values()) == costs.recomputing(1, 4).scores
    label = image.get("aria-label")
    assert "Of 30 scores, 10 are needed" in label and "10 were computed" in label and "10 are hidden" in label


def test_the_growth_figure_states_the_counts_at_its_end():
    label = svg(show.work_growth(8, n_layers=2, head_dim=16)).get("aria-label")
    recomputed = costs.recomputing(1, 8, n_layers=2, head_dim=16)
    cached = costs.caching(1, 8, n_layers=2, head_dim=16)
    assert f"rows projected {recomputed.rows_projected} against {cached.rows_projected}" in label
    assert f"scores {recomputed.scores} against {cached.scores}" in label
    assert f"bytes moved {recomputed.bytes_moved:,} against {cached.bytes_moved:,}" in label


def test_the_rows_figure_states_the_rows_at_its_end():
    label = svg(show.rows_written(8)).get("aria-label")
    assert f"writes {8 + costs.rows_recopied_by_concatenation(8)} rows" in label
    assert "writing in place writes 8." in label


def test_the_roofline_states_its_roof_and_its_points():
    image = svg(FIGURES["roofline"]())
    label = image.get("aria-label")
    assert "rises to 8 at the ridge, 4 per byte" in label
    assert "one query: 8 heads, 0.4 at 0.25; one query: 1 head, 3 at 2; more queries: 16, 6 at 16." in label
    texts = [text.text for text in image.iter("{http://www.w3.org/2000/svg}text")]
    assert {"one query", "more queries", "8 heads", "1 head", "16"} <= set(texts)


def test_the_roofline_draws_no_more_series_than_it_can_tell_apart():
    with pytest.raises(ValueError, match="^series had 3 names; it must have 2 at most"):
        show.roofline(1, 1, {"a": {}, "b": {}, "c": {}})


def documented(x):
    """Return x.

    Not shown.
    """
    # Shown.
    return x


def undocumented(x):
    return x


class Holder:
    def method(self):
        """Not shown."""
        return 1


def test_source_shows_the_code_without_the_docstring():
    assert show.source(documented).data == "```python\ndef documented(x):\n    # Shown.\n    return x\n```"


def test_source_shows_methods_at_the_margin_and_several_functions_together():
    code = "def method(self):\n    return 1\n\ndef undocumented(x):\n    return x"
    assert show.source(Holder.method, undocumented).data == f"```python\n{code}\n```"
