"""Leave nothing behind of a page that is no longer in the book."""

from pathlib import Path


def connect(app):
    app.connect("build-finished", remove_leftovers)


def remove_leftovers(app, exception):
    """Remove what earlier builds wrote for pages that have since been renamed or taken out."""
    if exception or app.builder.name != "html":
        return
    sources = Path(app.outdir, "_sources")
    built = {path.relative_to(sources).with_suffix("").as_posix() for path in sources.rglob("*.md")}
    for page in built - app.env.found_docs:
        for path in (Path(app.outdir, f"{page}.html"), sources / f"{page}.ipynb", sources / f"{page}.md"):
            path.unlink(missing_ok=True)
