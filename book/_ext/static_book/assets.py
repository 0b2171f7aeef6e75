"""Give pages what they load from the book's own folder: the widgets, and maths."""

import hashlib
from importlib.resources import files
from pathlib import Path

from sphinx.errors import ExtensionError

from kvlib import widgets

WIDGET_SCRIPT = "kv-widgets.js"
WIDGET_STYLE = "kv-widgets.css"
MATHJAX_SHA256 = "214c3da890b16db3d1319684cc04f3fd4e72ea59d5eb3863f256146015fb1783"

# A page opened by double click may not fetch another to quote from it.
_SEARCH_BY_DOUBLE_CLICK = (
    'if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;'
)


def connect(app):
    app.connect("builder-inited", write_widget_files)
    app.connect("builder-inited", write_mathjax)
    app.connect("env-updated", pages_to_write_again)
    app.connect("html-page-context", load_what_the_page_needs)


def write_widget_files(app):
    """Write the one script, and the one style sheet, that serve every widget of a page."""
    for name, content in _widget_files().items():
        _write(app, name, content)


def write_mathjax(app):
    """Copy MathJax from the installed package, once its bytes are known to be the right ones.

    Its licence asks to go with every copy.
    """
    try:
        package = files("mathjax").joinpath("static/mathjax")
        script = package.joinpath("es5/tex-svg-full.js").read_bytes()
        licence = package.joinpath("LICENSE").read_bytes()
    except (ModuleNotFoundError, FileNotFoundError):
        raise ExtensionError("MathJax is missing; pip install -r requirements.txt adds it") from None
    digest = hashlib.sha256(script).hexdigest()
    if digest != MATHJAX_SHA256:
        raise ExtensionError(f"MathJax's sha256 was {digest}; it must be {MATHJAX_SHA256}")
    _write(app, app.config.mathjax_path, script)
    _write(app, Path(app.config.mathjax_path).with_name("LICENSE"), licence)


def pages_to_write_again(app, env):
    """Return every page when something changed that each of them shows.

    That is a script or a style sheet, which pages name by digest, and the contents in the sidebar.
    """
    digest = hashlib.sha256(b"".join(_widget_files().values()))
    digest.update(Path(app.confdir, app.config.external_toc_path).read_bytes())
    digest.update(repr(sorted((page, title.astext()) for page, title in env.titles.items())).encode("utf8"))
    for folder in app.config.html_static_path:
        for path in sorted(Path(app.confdir, folder).rglob("*.*")):
            digest.update(path.read_bytes())
    known, env.shared_digest = getattr(env, "shared_digest", None), digest.hexdigest()
    return [] if known == env.shared_digest else sorted(env.found_docs)


def load_what_the_page_needs(app, page, template, context, doctree):
    """Add the widgets' files to a page that holds a widget, and to the search page its exception."""
    if "<kv-widget" in context.get("body", ""):
        app.add_js_file(WIDGET_SCRIPT, loading_method="defer")
        app.add_css_file(WIDGET_STYLE)
    if template == "search.html":
        app.add_js_file(None, body=_SEARCH_BY_DOUBLE_CLICK)


def _widget_files():
    return {
        WIDGET_SCRIPT: widgets.script().encode("utf8"),
        WIDGET_STYLE: widgets.stylesheet().encode("utf8"),
    }


def _write(app, name, content):
    path = Path(app.outdir, "_static", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
