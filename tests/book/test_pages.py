"""Every page's source is a notebook that Jupyter Book runs, and lessons need no builder's tools."""

import ast
import sys

import pytest
import yaml
from bookpages import PAGES, ROOT
from static_book.reruns import page_code

HEADER = """---
jupytext:
  text_representation:
    extension: .md
    format_name: myst
    format_version: 0.13
kernelspec:
  display_name: Python 3
  language: python
  name: python3
---
"""
LESSON_PACKAGES = {"kvlib", "numpy", "torch", "matplotlib", "IPython", "tokenizers", "gguf"}


def source(page):
    return (ROOT / f"{page}.md").read_text(encoding="utf8")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_full_header_without_which_it_would_not_run(page):
    assert source(page).startswith(HEADER)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_imports_nothing_that_only_builds_the_book(page):
    allowed = LESSON_PACKAGES | sys.stdlib_module_names
    imported = set()
    for node in ast.walk(ast.parse(page_code(source(page)))):
        if isinstance(node, ast.Import):
            imported.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.partition(".")[0])
    assert imported - allowed == set()


@pytest.mark.parametrize("page", PAGES)
def test_every_page_imports_the_library(page):
    assert "kvlib" in page_code(source(page))


def test_every_page_of_the_folder_is_in_the_table_of_contents():
    sources = [path.relative_to(ROOT) for path in ROOT.glob("book/**/*.md")]
    in_folder = {path.with_suffix("").as_posix() for path in sources if ".ipynb_checkpoints" not in path.parts}
    assert in_folder == set(PAGES)


def test_the_configuration_leaves_no_failing_or_endless_cell_unnoticed():
    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf8"))
    assert config["execute"]["stderr_output"] == "error"
    assert 0 < config["execute"]["timeout"] <= 120
    assert config["sphinx"]["config"]["nb_execution_raise_on_error"] is True
