"""Run a page again when the parts of `kvlib` that it uses have changed.

jupyter-cache finds a page's outputs by its code cells and its kernelspec, so an edit of the
library would keep stale outputs.  The digest of the library code that a page uses therefore
goes into the kernelspec's display name, where it moves no line of the page, and comes out
again when the notebook is offered for download.
"""

import ast
import hashlib
import re
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import jupytext

PACKAGE = "kvlib"
PINS = "requirements.txt"
_DISPLAY_NAME = re.compile(r"^(  display_name: .*)$", re.MULTILINE)
_MARK = " with kvlib "


def connect(app):
    app.connect("env-get-outdated", pages_to_read_again)
    app.connect("source-read", mark_page)


def pages_to_read_again(app, env, added, changed, removed):
    """Return the known pages whose library code is not the one they ran with."""
    known = getattr(env, "page_digests", {})
    return [
        page
        for page in env.found_docs - added - changed
        if page_digest(app, Path(env.doc2path(page)).read_text(encoding="utf8")) != known.get(page)
    ]


def mark_page(app, page, source):
    """Put the digest of the library code that a page uses into its kernelspec."""
    digest = page_digest(app, source[0])
    if not hasattr(app.env, "page_digests"):
        app.env.page_digests = {}
    app.env.page_digests[page] = digest
    source[0] = _DISPLAY_NAME.sub(rf"\1{_MARK}{digest}", source[0], count=1)


def unmark(notebook):
    """Take the digest out of an executed notebook."""
    kernel = notebook.metadata["kernelspec"]
    kernel["display_name"] = kernel["display_name"].partition(_MARK)[0]


def page_digest(app, text):
    """Return a digest of everything but its own cells that a page's outputs depend on."""
    root = Path(find_spec(PACKAGE).submodule_search_locations[0])
    digest = hashlib.sha256(Path(app.confdir, PINS).read_bytes())
    for path in library_files(page_code(text), root):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def page_code(text):
    """Return the Python code of a page's cells, without lines meant for IPython."""
    notebook = jupytext.reads(text, fmt="md:myst")
    lines = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code").splitlines()
    return "\n".join(line for line in lines if not line.startswith(("%", "!")))


def library_files(code, root):
    """Return the package's files that a piece of code imports, directly or through one another.

    Parameters
    ----------
    code : str
        Python source.
    root : pathlib.Path
        The package's folder.

    Returns
    -------
    list of pathlib.Path
        Sorted, so that equal imports give equal lists.
    """
    found, waiting = set(), [name for name in _names(ast.parse(code), None)]
    while waiting:
        for path in _files(waiting.pop(), root) - found:
            found.add(path)
            waiting += _names(_tree(path, path.stat().st_mtime_ns), _package(path, root))
    return sorted(found)


@lru_cache
def _tree(path, modified):
    return ast.parse(path.read_text(encoding="utf8"))


def _names(tree, package):
    """Yield the dotted names of the package that some code imports or reaches by attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*parts, *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def _files(name, root):
    """Return the files that Python runs to provide a dotted name.

    A name that a package provides lazily is looked for among the definitions of its modules.
    """
    first, *parts = name.split(".")
    if first != root.name:
        return set()
    files, folder = {root / "__init__.py"}, root
    for part in parts:
        if (folder / part / "__init__.py").exists():
            folder = folder / part
            files.add(folder / "__init__.py")
        elif (folder / f"{part}.py").exists():
            return files | {folder / f"{part}.py"}
        else:
            return files | {
                path for path in folder.glob("*.py") if part in _defined(path, path.stat().st_mtime_ns)
            }
    return files


@lru_cache
def _defined(path, modified):
    """Return the names of the functions and classes that a module defines at its top."""
    body = _tree(path, modified).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def _package(path, root):
    """Return the dotted name of the package that a file belongs to."""
    return ".".join([root.name, *path.parent.relative_to(root).parts])
