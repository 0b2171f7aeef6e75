"""The forms of a widget: with a kernel, without one, and where packages are missing."""

import json
import os
import re
import subprocess
import sys

import anywidget
import pytest
import traitlets

from kvlib import visibility
from kvlib.widgets import AttentionHeatmap, SlotExplorer, script, stylesheet
from kvlib.widgets._bundle import expression, module
from kvlib.widgets._text import GLYPHS, LABELS


def run(code, **environment):
    """Run code in a fresh Python and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


WITHOUT = """
import sys
for name in {names}:
    sys.modules[name] = None
from kvlib.widgets import AttentionHeatmap, SlotExplorer
explorer = SlotExplorer([3], [1], n_queries=1, capacity=4)
heatmap = AttentionHeatmap([[0.0, 1.0]], [1], [1])
"""
NOTEBOOK_PACKAGES = ["anywidget", "ipywidgets", "traitlets", "IPython"]


def test_widgets_need_neither_torch_nor_anywidget():
    out = run(
        WITHOUT.format(names=["torch", *NOTEBOOK_PACKAGES])
        + "print(heatmap._repr_html_(), explorer._repr_html_())"
    )
    assert out.count("<kv-widget ") == 2


def test_importing_widgets_does_not_import_torch():
    assert run("import sys, kvlib.widgets; print('torch' in sys.modules)") == "False\n"


def test_without_anywidget_the_html_brings_its_own_script_and_style():
    out = run(WITHOUT.format(names=["anywidget"]) + "print(explorer._repr_html_())")
    assert script().strip() in out and stylesheet().strip() in out


def test_in_colab_the_html_form_is_used():
    out = run(
        "import sys, types; sys.modules['google.colab'] = types.ModuleType('google.colab')\n"
        "from kvlib.widgets import SlotExplorer\nprint(SlotExplorer([3], [1], 1, 4)._repr_html_())"
    )
    assert "<script>(() =>" in out and "<kv-widget " in out


def test_kvlib_static_selects_html_that_leaves_script_and_style_to_the_page():
    out = run(
        "from kvlib.widgets import SlotExplorer\nexplorer = SlotExplorer([3], [1], n_queries=1, capacity=4)\n"
        "assert not hasattr(explorer, 'comm')\nprint(explorer._repr_html_() == explorer.html())",
        KVLIB_STATIC="1",
    )
    assert out == "True\n"
    assert (
        "<style" not in SlotExplorer([3], [1], 1, 4).html()
        and "upgradePage" not in SlotExplorer([3], [1], 1, 4).html()
    )


def test_both_forms_give_the_same_html():
    code = "from kvlib.widgets import SlotExplorer; print(SlotExplorer([3, 1], [1, 0], 1, 4, title='One').html())"
    assert run(code, KVLIB_STATIC="1") == SlotExplorer([3, 1], [1, 0], 1, 4, title="One").html() + "\n"


def test_a_notebook_gets_an_anywidget():
    explorer = SlotExplorer([3], [1], n_queries=1, capacity=4)
    assert isinstance(explorer, anywidget.AnyWidget)
    assert explorer.kind == "slots" and explorer._esm == module() and explorer._css == stylesheet()
    bundle = explorer._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle[0]


def test_the_synced_traits_are_the_documented_fields():
    explorer, heatmap = SlotExplorer([3], [1], 1, 4), AttentionHeatmap([[0.0]], [0], [1])
    ours = lambda widget: {name for name in widget.trait_names(sync=True) if not name.startswith("_")}  # noqa: E731
    inherited = {"layout", "tabbable", "tooltip"}
    assert ours(explorer) - inherited == {
        "kind",
        "lengths",
        "counts",
        "n_queries",
        "capacity",
        "selected",
        "title",
    }
    assert ours(heatmap) - inherited == {"kind", "data", "layer", "row", "head", "selected", "title"}


def test_what_the_browser_sends_arrives_in_the_traits_and_their_observers():
    explorer = SlotExplorer([3, 5], [3, 1], n_queries=3, capacity=8)
    seen = []
    explorer.observe(lambda change: seen.append((change["name"], change["new"])), ["lengths", "counts"])
    # As the explorer's Append sends it: only both together fit.
    explorer.set_state({"lengths": [6, 6], "counts": [2, 1]})
    assert explorer.lengths == [6, 6] and explorer.counts == [2, 1]
    assert seen == [("lengths", [6, 6]), ("counts", [2, 1])]


def test_a_trait_that_does_not_fit_is_refused_and_nothing_changes():
    explorer = SlotExplorer([3, 5], [3, 1], n_queries=3, capacity=8)
    with pytest.raises(
        traitlets.TraitError, match=r"counts was \[9, 0\]; no row can append more than the 3"
    ):
        explorer.counts = [9, 0]
    with pytest.raises(traitlets.TraitError, match="selected slot was 8; it must be less than 8"):
        explorer.selected = (0, 0, 8)
    with (
        pytest.raises(traitlets.TraitError, match="capacity of 4 slots"),
        explorer.hold_trait_notifications(),
    ):
        explorer.lengths = [1, 4]
        explorer.capacity = 4
    assert explorer.state() == SlotExplorer([3, 5], [3, 1], n_queries=3, capacity=8).state()


def test_numbers_that_fit_only_together_can_be_set_together():
    explorer = SlotExplorer([3, 5], [3, 1], n_queries=3, capacity=8)
    with explorer.hold_trait_notifications():
        explorer.lengths = [20, 21]
        explorer.capacity = 24
    assert explorer.lengths == [20, 21]


def test_choices_of_the_heatmap_are_checked_traits():
    heatmap = AttentionHeatmap([[[0.0, 0.0]], [[0.0, 0.0]]], [1], [1])
    heatmap.head = 1
    with pytest.raises(traitlets.TraitError, match="head was 2; it must be less than 2"):
        heatmap.head = 2
    assert heatmap.head == 1


def test_the_script_could_run_from_a_file():
    assert not re.search(
        r"\b(import|export|fetch|Worker|XMLHttpRequest|innerHTML|insertAdjacentHTML)\b", script()
    )
    assert (
        "https:" not in script() + stylesheet()
        and "url(" not in stylesheet()
        and "@import" not in stylesheet()
    )


def test_the_module_is_the_same_text_and_an_export():
    assert module() == f"export default {expression()};\n"
    assert script() == f"{expression()}.upgradePage();\n"


def test_sentences_labels_and_glyphs_come_from_python():
    text = json.loads(re.search(r"const TEXT = (\{.*\});", expression())[1])
    assert text["SENTENCES"] == visibility.SENTENCES
    assert list(text["GLYPHS"]) == list(text["LABELS"]) == list(visibility.STATES)
    assert text["GLYPHS"] == GLYPHS and text["LABELS"] == LABELS


def test_no_two_states_share_a_glyph():
    assert len(set(GLYPHS.values())) == len(visibility.STATES)
