"""What the pages show besides widgets: source code and figures.

Figures are inline SVG.  Their ink is the colour of the text around them, so they follow the
theme of the page; every figure has an alternative text.  Needs matplotlib and IPython.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
from html import escape
from textwrap import dedent
from zlib import crc32

import numpy as np

try:
    from IPython.display import HTML, Markdown
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
except ModuleNotFoundError as error:
    raise ImportError(
        f"kvlib.show needs {error.name}, which is not installed; pip install 'kvlib[figures]' adds it"
    ) from error

from kvlib import costs

__all__ = ["source", "score_tables", "work_growth", "rows_written", "roofline"]

# Blue and orange stay apart for colour-blind readers, and both stand out on white and on black.
_BLUE, _ORANGE = "#3a7cc4", "#c2600c"
_SERIES = ((_BLUE, "o"), (_ORANGE, "s"))
_INK = "#010203"  # stands for the page's text colour until the SVG is written
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kvlib",  # the same figure every time
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
}


def source(*objects):
    """Show the source code of functions or methods as it stands, without docstrings.

    Parameters
    ----------
    *objects : function

    Returns
    -------
    IPython.display.Markdown
        One highlighted code block.
    """
    code = "\n\n".join(_without_docstring(inspect.getsource(one)) for one in objects)
    return Markdown(f"```python\n{code}\n```")


def score_tables(n_tokens):
    """Draw the score table of every step, and which of its cells were needed.

    Parameters
    ----------
    n_tokens : int
        The steps to draw: step t has a table of t x t scores.

    Returns
    -------
    IPython.display.HTML
    """
    needed = n_tokens * (n_tokens + 1) // 2
    again = hidden = sum(t * (t - 1) // 2 for t in range(1, n_tokens + 1))
    with rc_context(_STYLE):
        figure = Figure(figsize=(4.8, 2.3))
        tables = figure.subplots(1, n_tokens, width_ratios=range(1, n_tokens + 1))
        for t, axes in enumerate(np.atleast_1d(tables), start=1):
            for query in range(t):
                for key in range(t):
                    face, glyph = _score_cell(query, key, t)
                    axes.add_patch(Rectangle((key, query), 0.92, 0.92, color=face, alpha=0.35, lw=0))
                    axes.text(key + 0.46, query + 0.5, glyph, ha="center", va="center")
            axes.set(xlim=(0, t), ylim=(t, 0), aspect="equal", anchor="S")
            axes.set_title(f"step {t}", fontsize=10)
            axes.axis("off")
        legend = (f"● needed now: {needed}", f"= computed before: {again}", f"× hidden: {hidden}")
        for x, text in zip((0.06, 0.4, 0.8), legend, strict=True):
            figure.text(x, 0.01, text)
        return _svg(
            figure,
            f"The score tables of {n_tokens} steps, queries down and keys across. "
            f"Of {needed + again + hidden} scores, {needed} are needed at their step, the last row of each "
            f"table; {again} were computed at an earlier step; {hidden} are hidden by the causal mask.",
        )


def work_growth(n_tokens, **sizes):
    """Draw how the work of recomputing and of caching adds up while a text grows.

    Parameters
    ----------
    n_tokens : int
        Steps to draw, from a prompt of one token.
    **sizes
        n_layers, head_dim and itemsize, as in `kvlib.costs.recomputing`.

    Returns
    -------
    IPython.display.HTML
    """
    steps = range(1, n_tokens + 1)
    ways = {
        "recompute": (_ORANGE, "--", [costs.recomputing(1, n, **sizes) for n in steps]),
        "cache": (_BLUE, "-", [costs.caching(1, n, **sizes) for n in steps]),
    }
    kinds = ("rows_projected", "scores", "bytes_moved")
    with rc_context(_STYLE):
        figure = Figure(figsize=(4.8, 5), layout="constrained")
        for axes, kind in zip(figure.subplots(len(kinds), 1, sharex=True), kinds, strict=True):
            for name, (colour, dashes, works) in ways.items():
                counts = [getattr(work, kind) for work in works]
                axes.plot(steps, counts, dashes, color=colour, lw=2)
                axes.annotate(f" {name}", (n_tokens, counts[-1]), va="center", annotation_clip=False)
            axes.set_title(kind.replace("_", " "), loc="left", fontsize=10)
            axes.set(ylim=(0, None), xlim=(0, n_tokens))
            axes.ticklabel_format(axis="y", style="plain")
            axes.yaxis.set_major_locator(_few_ticks())
            axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("tokens generated")
        ends = {name: works[-1] for name, (_, _, works) in ways.items()}
        described = "; ".join(
            f"{kind.replace('_', ' ')} {getattr(ends['recompute'], kind):,} against {getattr(ends['cache'], kind):,}"
            for kind in kinds
        )
        return _svg(
            figure,
            f"Three line charts of the work added up over {n_tokens} tokens, recomputing against "
            f"caching. At the end: {described}.",
        )


def rows_written(n_tokens):
    """Draw how many rows concatenation writes in all, against one row a token.

    Parameters
    ----------
    n_tokens : int
        Tokens appended one at a time.

    Returns
    -------
    IPython.display.HTML
    """
    steps = range(1, n_tokens + 1)
    by_concatenation = [n + costs.rows_recopied_by_concatenation(n) for n in steps]
    with rc_context(_STYLE):
        figure = Figure(figsize=(4.8, 2.6), layout="constrained")
        axes = figure.subplots()
        axes.plot(steps, by_concatenation, "--", color=_ORANGE, lw=2)
        axes.plot(steps, steps, color=_BLUE, lw=2)
        axes.annotate(" concatenate", (n_tokens, by_concatenation[-1]), va="center", annotation_clip=False)
        axes.annotate(" write in place", (n_tokens, n_tokens), va="bottom", annotation_clip=False)
        axes.set(xlabel="tokens appended", ylim=(0, None), xlim=(0, n_tokens))
        axes.set_title("rows written, added up", loc="left", fontsize=10)
        axes.yaxis.set_major_locator(_few_ticks())
        axes.yaxis.set_major_formatter("{x:,.0f}")
        return _svg(
            figure,
            f"A line chart of the rows written while {n_tokens} tokens are appended. Concatenation "
            f"writes {by_concatenation[-1]:,} rows and curves upwards; writing in place writes {n_tokens:,}.",
        )


def roofline(bytes_per_second, multiply_adds_per_second, series):
    """Draw how fast a machine can compute at each arithmetic intensity, and measured points.

    Parameters
    ----------
    bytes_per_second, multiply_adds_per_second : float
        What the machine can move and compute at most: the slope and the flat part of the roof.
    series : dict of str to dict
        Two at most, by their names.  Each maps a point's label to its intensity in
        multiply-adds per byte and to its measured multiply-adds per second.

    Returns
    -------
    IPython.display.HTML

    Raises
    ------
    ValueError
        If there are more series than can be told apart.
    """
    if len(series) > len(_SERIES):
        raise ValueError(f"series had {len(series)} names; it must have {len(_SERIES)} at most")
    ridge = multiply_adds_per_second / bytes_per_second
    x = [x for points in series.values() for x, _ in points.values()]
    ends = [min([ridge, *x]) / 2, max([ridge, *x]) * 3]
    roof = [min(bytes_per_second * x, multiply_adds_per_second) for x in (ends[0], ridge, ends[1])]
    with rc_context(_STYLE):
        figure = Figure(figsize=(4.8, 3.6), layout="constrained")
        axes = figure.subplots()
        axes.plot([ends[0], ridge, ends[1]], [rate / 1e9 for rate in roof], color=_INK, lw=2)
        axes.axvline(ridge, color=_INK, lw=1, ls=":", alpha=0.6)
        for (name, points), (colour, marker) in zip(series.items(), _SERIES):
            places = [(x, rate / 1e9) for x, rate in points.values()]
            axes.plot(*zip(*places), marker, color=colour, label=name)
            for label, place in zip(points, places):
                axes.annotate(label, place, (5, -11), textcoords="offset points")
        axes.set(xscale="log", yscale="log", xlim=ends, xlabel="multiply-adds per byte moved")
        axes.set_title("billion multiply-adds a second", loc="left", fontsize=10)
        for axis, digits in ((axes.xaxis, [1]), (axes.yaxis, [1, 2, 5])):
            axis.set_major_locator(LogLocator(subs=digits))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
        foot = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points", "style": "italic"}
        axes.annotate("memory-bound", (ridge, 0), (-6, 6), ha="right", **foot)
        axes.annotate("compute-bound", (ridge, 0), (6, 6), ha="left", **foot)
        figure.legend(loc="outside lower center", ncols=2, frameon=False, handletextpad=0.2)
        described = "; ".join(
            f"{name}: {label}, {rate / 1e9:.2g} at {x:.2g}"
            for name, points in series.items()
            for label, (x, rate) in points.items()
        )
        return _svg(
            figure,
            "A roofline: billion multiply-adds a second over multiply-adds per byte, both axes logarithmic. "
            f"The roof rises to {multiply_adds_per_second / 1e9:.2g} at the ridge, {ridge:.2g} per byte, "
            f"and is flat from there. Measured points: {described}.",
        )


def _without_docstring(code):
    code = dedent(code).strip()
    docstring = ast.parse(code).body[0].body[0]
    if not (isinstance(docstring, ast.Expr) and isinstance(docstring.value, ast.Constant)):
        return code
    lines = code.splitlines()
    del lines[docstring.lineno - 1 : docstring.end_lineno]
    return "\n".join(lines)


def _score_cell(query, key, n_tokens):
    """Return the colour and the glyph of one cell in the score table of n_tokens tokens."""
    if key > query:
        return "none", "×"
    return (_BLUE, "●") if query == n_tokens - 1 else (_ORANGE, "=")


def _few_ticks():
    return MaxNLocator(nbins=3, integer=True)


def _svg(figure, alt):
    """Return a figure as inline SVG that follows the theme and can share a page with others."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")), bbox_inches="tight")
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    svg = re.sub(r"<style.*?</style>", "", svg)  # it would restyle the whole page
    prefix = f"figure-{crc32(alt.encode()):08x}-"
    svg = re.sub(r'(\bid="|url\(#|href="#)', lambda match: match.group() + prefix, svg)
    svg = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', _opening_tag(alt), svg, count=1)
    return HTML(f'<div class="kv-figure">{svg}</div>')


def _opening_tag(alt):
    attributes = f'role="img" aria-label="{escape(alt)}" style="width: 100%; max-width: 34rem; height: auto"'
    return lambda match: (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f"{match.group(1)} {attributes}>"
    )
