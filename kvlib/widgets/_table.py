"""Tables for readers without JavaScript, and for print."""

from __future__ import annotations

from html import escape


def table(caption, columns, rows, cells):
    """Return an HTML table in the look of the widgets.

    Parameters
    ----------
    caption : str
        May be empty.
    columns, rows : list of (str, str)
        Their headings, and a token or "" below each.
    cells : list of list of (str, str, str)
        Look, text and inline style of each cell.
    """
    head = "".join(f'<th scope="col">{_heading(*name)}</th>' for name in columns)
    body = "".join(
        f'<tr><th scope="row">{_heading(*name)}</th>{"".join(map(_cell, line))}</tr>'
        for name, line in zip(rows, cells)
    )
    caption = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<table class="kv-table">{caption}'
        f"<thead><tr><td></td>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _heading(name, token):
    return escape(name) + (f" <small>{escape(token)}</small>" if token else "")


def _cell(cell):
    look, text, style = cell
    return f'<td class="kv-cell kv-{look}"{f" style={style!r}" if style else ""}>{escape(text)}</td>'
