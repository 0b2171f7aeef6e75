"""The JavaScript and the CSS of the widgets, as text.

One JavaScript text serves every host.  It is an expression, so that it can stand in a
classic script, which a page opened by double click may load, and in a module as well.

A new widget is a file here that defines ``build...(model, root, redraw)``, named in
`_PARTS` and `_KINDS`, and a Python class for its arguments.  ``build...`` fills ``root`` and
returns the model's ``fields`` to watch and ``update()``, which shows their present values.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from kvlib import visibility
from kvlib.widgets import _text

_HERE = Path(__file__).parent
_PARTS = ("core.js", "slots.js", "heatmap.js")
_KINDS = "{ slots: buildSlots, heatmap: buildHeatmap }"


@cache
def expression():
    """Return a JavaScript expression whose value holds ``render``, ``upgradePage`` and the rule."""
    text = {
        "SENTENCES": visibility.SENTENCES,
        "QUERY_SENTENCES": visibility.QUERY_SENTENCES,
        "NAMES": _text.NAMES,
        "GLYPHS": _text.GLYPHS,
        "LABELS": _text.LABELS,
        "SPACES": _text.SPACES,
        "HEATMAP_CAPTION": _text.HEATMAP_CAPTION,
        "NO_QUERY": _text.NO_QUERY,
    }
    parts = [(_HERE / name).read_text(encoding="utf-8") for name in _PARTS]
    return "\n".join(
        [
            "(() => {",
            '"use strict";',
            f"const TEXT = {json.dumps(text, ensure_ascii=True)};",
            *parts,
            f"const WIDGETS = {_KINDS};",
            "return { render, upgradePage, visibility, heatmapScores, softmaxOfGaps, readFloats };",
            "})()",
        ]
    )


def script():
    """Return the classic script that draws every ``<kv-widget>`` of a page.

    Load it deferred, once a page; loading it again does no harm.  It needs no network, no
    modules and no workers, so it also runs from ``file://``.
    """
    return f"{expression()}.upgradePage();\n"


def module():
    """Return the ES module that anywidget loads in a notebook."""
    return f"export default {expression()};\n"


@cache
def stylesheet():
    """Return the CSS of the widgets and of their fallbacks without JavaScript."""
    return (_HERE / "widgets.css").read_text(encoding="utf-8")
