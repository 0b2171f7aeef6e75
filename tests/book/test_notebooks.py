"""The notebook that a page offers runs wherever it is put, with widgets that talk to its kernel."""

import os
import shutil
import subprocess
import sys

import pytest
from bookpages import PAGES, ROOT

RUN = """
import sys
import nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=120, resources={"metadata": {"path": sys.argv[2]}}).execute()
nbformat.write(notebook, sys.argv[1])
"""


@pytest.mark.parametrize("place", ["the root", "elsewhere"])
@pytest.mark.parametrize("page", PAGES)
def test_a_downloaded_notebook_runs(built_book, tmp_path, page, place):
    # Its own folder is where the build itself ran it.
    copy = tmp_path / "notebook.ipynb"
    shutil.copy(built_book / "_sources" / f"{page}.ipynb", copy)
    folder = ROOT if place == "the root" else tmp_path
    environment = {name: value for name, value in os.environ.items() if name != "KVLIB_STATIC"}
    run = subprocess.run(
        [sys.executable, "-c", RUN, copy, folder], env=environment, capture_output=True, text=True, encoding="utf8"
    )
    assert run.returncode == 0, run.stderr
    if "<kv-widget" in (built_book / f"{page}.html").read_text(encoding="utf8"):
        assert "application/vnd.jupyter.widget-view+json" in copy.read_text(encoding="utf8")
