"""Building fails when a page fails, each time, and runs a page again when it must and only then."""

import os
import shutil
import subprocess
import sys

import nbformat
import pytest
from bookpages import ROOT
from test_pages import HEADER


@pytest.fixture
def small_book(tmp_path):
    """A folder with this book's machinery and library, and two pages that note when they run."""
    for name in ("kvlib", "book/_ext", "book/_static"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("_config.yml", "requirements.txt", "scripts/build.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: book/one\nchapters:\n- file: book/two\n", "utf8")
    write_page(tmp_path, "one", "from kvlib import costs\nprint('ran')")
    write_page(
        tmp_path, "two", "from kvlib.widgets import SlotExplorer\nSlotExplorer([1], [1], n_queries=1, capacity=2)"
    )
    return tmp_path


def write_page(folder, name, code, prose="", title=None):
    note = f"from pathlib import Path\nwith Path('runs.txt').open('a') as runs: print('{name}', file=runs)"
    title = title or f"Page {name}"
    text = f"{HEADER}\n# {title}\n\n{prose}\n\n```{{code-cell}} ipython3\n{note}\n{code}\n```\n"
    (folder / "book" / f"{name}.md").write_text(text, encoding="utf8")


def build(folder):
    """Build a folder as `make book` does, with its own library, and return the exit code and the log."""
    result = subprocess.run(
        [sys.executable, folder / "scripts" / "build.py"],
        env={**os.environ, "PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf8",
    )
    return result.returncode, result.stdout


def new_runs(folder):
    """Return which pages ran since this was last asked."""
    runs = folder / "book" / "runs.txt"
    names = runs.read_text(encoding="utf8").split() if runs.exists() else []
    runs.unlink(missing_ok=True)
    return names


def test_a_page_runs_again_when_its_library_code_changed_and_only_then(small_book):
    code, log = build(small_book)
    assert code == 0, log
    assert sorted(new_runs(small_book)) == ["one", "two"]

    write_page(small_book, "one", "from kvlib import costs\nprint('ran')", prose="New prose.")
    code, log = build(small_book)
    assert code == 0, log
    assert new_runs(small_book) == []
    notebook = small_book / "_build" / "html" / "_sources" / "book" / "one.ipynb"
    assert "ran" in str(nbformat.read(notebook, as_version=4).cells[-1].outputs), "outputs from the cache are missing"

    with (small_book / "kvlib" / "costs.py").open("a", encoding="utf8") as module:
        module.write("\n# a change\n")
    code, log = build(small_book)
    assert code == 0, log
    assert new_runs(small_book) == ["one"]

    page = small_book / "_build" / "html" / "book" / "two.html"
    before = page.read_text(encoding="utf8")
    with (small_book / "kvlib" / "widgets" / "widgets.css").open("a", encoding="utf8") as sheet:
        sheet.write("\n/* a change */\n")
    code, log = build(small_book)
    assert code == 0, log
    assert new_runs(small_book) == []
    assert page.read_text(encoding="utf8") != before, "the page still names the old style sheet"


def test_a_renamed_page_leaves_nothing_behind_and_shows_in_every_sidebar(small_book):
    html = small_book / "_build" / "html"
    code, log = build(small_book)
    assert code == 0, log
    assert (html / "_sources" / "book" / "two.ipynb").exists()

    (small_book / "book" / "two.md").unlink()
    write_page(small_book, "three", "import kvlib")
    toc = small_book / "_toc.yml"
    toc.write_text(toc.read_text("utf8").replace("book/two", "book/three"), "utf8")
    code, log = build(small_book)
    assert code == 0, log
    assert [path.name for path in html.rglob("two.*")] == []
    first = (html / "book" / "one.html").read_text(encoding="utf8")
    assert "Page three" in first
    assert "Page two" not in first

    write_page(small_book, "one", "import kvlib", title="A new title")
    code, log = build(small_book)
    assert code == 0, log
    assert "A new title" in (html / "book" / "three.html").read_text(encoding="utf8")


@pytest.mark.parametrize(
    ("code", "prose", "complaint"),
    [
        ("raise RuntimeError('on purpose')", "", ": on purpose"),
        ("import warnings; warnings.warn('on purpose')", "", "stderr was found"),
        ("", "[a link](nowhere.md)", "nowhere.md"),
    ],
    ids=["a raise", "a warning in a cell", "a broken link"],
)
def test_a_fault_in_a_page_fails_the_build_and_the_next_build_too(small_book, code, prose, complaint):
    write_page(small_book, "one", code, prose)
    for attempt in ("first", "second"):
        exit_code, log = build(small_book)
        assert exit_code != 0, attempt
        assert complaint in log, attempt
