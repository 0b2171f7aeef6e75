"""Offer every page's executed notebook for download."""

from pathlib import Path

import nbformat
from jupyter_cache import get_cache
from myst_nb.sphinx_ext import OUTPUT_FOLDER

from static_book import reruns


def connect(app):
    # The theme fills its download menu at priority 501.
    app.connect("html-page-context", name_notebook, priority=400)
    app.connect("build-finished", copy_notebooks)


def name_notebook(app, page, template, context, doctree):
    """Tell the theme's download menu where a page's notebook will be."""
    if _executed(app, page).exists():
        context["ipynb_source"] = f"{page}.ipynb"


def copy_notebooks(app, exception):
    """Put the executed notebooks, free of what only the build needs, beside the pages' sources."""
    if exception or app.builder.name != "html":
        return
    cache = get_cache(app.env.mystnb_config.execution_cache_path)
    for page in filter(lambda page: _executed(app, page).exists(), app.env.found_docs):
        # myst-nb leaves the outputs out when it took them from the cache.
        _, notebook = cache.merge_match_into_notebook(nbformat.read(_executed(app, page), as_version=4))
        reruns.unmark(notebook)
        notebook.metadata.pop("source_map")
        nbformat.validate(notebook)
        path = Path(app.outdir, "_sources", f"{page}.ipynb")
        path.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, path)


def _executed(app, page):
    return Path(app.outdir).parent / OUTPUT_FOLDER / f"{page}.ipynb"
