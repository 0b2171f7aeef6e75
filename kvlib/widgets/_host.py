"""Where a widget lives: in a notebook with a kernel, or as HTML that needs none.

The choice is made once, at import.  ``KVLIB_STATIC=1`` asks for HTML; Colab and
environments without anywidget get it too.
"""

from __future__ import annotations

import json
import os
import sys
from html import escape

from kvlib.widgets import _bundle
from kvlib.widgets._text import NAMES


def _anywidget():
    """Return anywidget and traitlets, or None where the HTML form is due."""
    if os.environ.get("KVLIB_STATIC") == "1" or "google.colab" in sys.modules:
        return None
    try:
        import anywidget
        import traitlets
    except ModuleNotFoundError:
        return None
    return anywidget.AnyWidget, traitlets


_notebook = _anywidget()
_Host = _notebook[0] if _notebook else object


def synced():
    """Return a field that kernel and browser share; without a kernel, a plain attribute."""
    return _notebook[1].Any().tag(sync=True) if _notebook else None


def checks(*names):
    """Decorate the method that validates new values of these fields: (name, value) -> value."""
    if not _notebook:
        return lambda method: method
    traitlets = _notebook[1]

    def decorate(method):
        def validate(self, proposal):
            try:
                return method(self, proposal["trait"].name, proposal["value"])
            except (TypeError, ValueError) as error:
                raise traitlets.TraitError(str(error)) from error

        return traitlets.validate(*names)(validate)

    return decorate


class Widget(_Host):
    """A widget with a kind and some fields; subclasses name both and validate."""

    _kind: str
    _fields: tuple[str, ...]
    if _notebook:
        _esm = _bundle.module()
        _css = _bundle.stylesheet()
        kind = synced()

    def __init__(self, **fields):
        if _notebook:
            super().__init__(kind=self._kind, **fields)
        else:
            for name, value in fields.items():
                setattr(self, name, value)

    def __repr__(self):
        return f"<{NAMES[self._kind]}: {self._summary()}>"

    if not _notebook:

        def _repr_html_(self):
            if os.environ.get("KVLIB_STATIC") == "1":
                return self.html()
            return (
                f"<style>{_bundle.stylesheet()}</style>{self.html()}<script>{_bundle.script()}</script>"
            )

    def state(self):
        """Return what the browser needs to draw this widget, as JSON-ready values."""
        return {name: getattr(self, name) for name in self._fields}

    def html(self):
        """Return the widget as HTML: its state, and a fallback to read without JavaScript.

        The page has to load `kvlib.widgets.script` and `kvlib.widgets.stylesheet`.
        """
        # In a script element only "<" could end the text early, so JSON writes it as an escape.
        state = json.dumps(self.state(), ensure_ascii=False, separators=(",", ":")).replace(
            "<", "\\u003c"
        )
        return (
            f'<kv-widget kind="{self._kind}"><script type="application/json">{state}</script>'
            f'<figure class="kv kv-fallback"><figcaption>{self._caption()}</figcaption>'
            f'<div class="kv-scroll">{self._still()}</div>'
            f'<div class="kv-say"><p>{self._spoken()}</p></div></figure></kv-widget>'
        )

    def _caption(self):
        name = NAMES[self._kind]
        return f"{escape(self.title)} ({name})" if self.title else name


def spoken(headline, text):
    """Return a sentence of the fallback as HTML, its headline in bold."""
    return f"<b>{escape(headline)}</b> {escape(text)}"
