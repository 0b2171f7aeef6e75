"""The built pages are whole: outputs, links, figures, maths, and nothing from another site."""

import re
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
from bookpages import PAGES, ROOT
from bs4 import BeautifulSoup

STRAY_MATHS = re.compile(r"\$[^$\n]+\$|\\\(|\\\[|\\(?:frac|sqrt|sum|exp|top|le|cdot|text|begin)\b")
COLUMN = 80  # characters of code that the page's column holds on a screen of 1280 px
NOT_PROSE = ["script", "style", ".math", ".cell_input", "code", "pre"]


@pytest.fixture(scope="module")
def soups(built_book):
    """Every HTML file of the book, parsed, by its path."""
    return {
        path: BeautifulSoup(path.read_text(encoding="utf8"), "html.parser")
        for path in built_book.rglob("*.html")
        if "_static" not in path.parts
    }


def soup_of(soups, built_book, page):
    return soups[built_book / f"{page}.html"]


def notebook_of(built_book, page):
    return nbformat.read(built_book / "_sources" / f"{page}.ipynb", as_version=4)


def is_elsewhere(address):
    return bool(urlsplit(address).scheme or urlsplit(address).netloc) and not address.startswith("data:")


@pytest.mark.parametrize("page", PAGES)
def test_every_cell_of_a_page_ran(built_book, page):
    cells = [cell for cell in notebook_of(built_book, page).cells if cell.cell_type == "code"]
    assert cells
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))


@pytest.mark.parametrize("page", PAGES)
def test_every_output_of_a_page_is_on_the_page(built_book, soups, page):
    cells = [cell for cell in notebook_of(built_book, page).cells if cell.cell_type == "code"]
    hidden = {"remove-output", "remove-cell"}
    shown = [cell for cell in cells if cell.outputs and not hidden & set(cell.metadata.get("tags", []))]
    assert shown
    assert len(soup_of(soups, built_book, page).select("div.cell_output")) == len(shown)


@pytest.mark.parametrize("page", PAGES)
def test_code_and_printed_lines_fit_their_column(built_book, soups, page):
    texts = [pre.get_text() for pre in soup_of(soups, built_book, page).select("div.cell pre")]
    assert texts
    assert [line for text in texts for line in text.splitlines() if len(line) > COLUMN] == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_offers_its_executed_notebook_and_its_source(built_book, soups, page):
    offered = {
        (built_book / f"{page}.html").parent.joinpath(link["href"]).resolve()
        for link in soup_of(soups, built_book, page).select("a[href*=_sources]")
    }
    assert offered == {built_book / "_sources" / f"{page}.ipynb", built_book / "_sources" / f"{page}.md"}
    assert all(path.exists() for path in offered)


@pytest.mark.parametrize("page", PAGES)
def test_a_downloaded_notebook_is_valid_clean_and_needs_no_kernel_to_be_read(built_book, page):
    notebook = notebook_of(built_book, page)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.display_name == "Python 3"
    assert "source_map" not in notebook.metadata
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert outputs
    assert [output for output in outputs if output.output_type == "error"] == []
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert "application/vnd.jupyter.widget-view+json" not in kinds


def test_every_link_inside_the_book_leads_somewhere(soups):
    def fragments(path):
        return {tag[name] for tag in soups[path].find_all() for name in ("id", "name") if tag.get(name)}

    broken, checked = [], 0
    for path, soup in soups.items():
        for link in soup.select("a[href]"):
            if is_elsewhere(link["href"]):
                continue
            checked += 1
            address = urlsplit(link["href"])
            target = (path.parent / unquote(address.path)).resolve() if address.path else path
            if not target.is_file():
                broken.append((path.name, link["href"], "no such file"))
            elif address.fragment and unquote(address.fragment) not in fragments(target):
                broken.append((path.name, link["href"], "no such place in that file"))
    # A bare "#" is the theme's, for a link that a script answers.
    assert [entry for entry in broken if entry[1] != "#"] == []
    assert checked > len(PAGES)


def test_nothing_that_a_page_loads_lies_elsewhere(soups, built_book):
    loading = {
        "script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src",
        "video": "src", "audio": "src", "object": "data", "embed": "src",
    }  # fmt: skip
    foreign = [
        (path.name, tag[attribute])
        for path, soup in soups.items()
        for name, attribute in loading.items()
        for tag in soup.find_all(name)
        if tag.get(attribute) and is_elsewhere(tag[attribute])
    ]
    assert foreign == []


def test_no_style_sheet_loads_from_elsewhere(built_book):
    sheets = list(built_book.rglob("*.css"))
    assert sheets
    foreign = re.compile(r"(?:url\(\s*['\"]?|@import\s+['\"])(?:https?:)?//")
    assert [sheet.name for sheet in sheets if foreign.search(sheet.read_text(encoding="utf8"))] == []


def test_what_a_page_loads_is_in_the_book(soups):
    asked = [
        (path, (path.parent / unquote(urlsplit(tag[attribute]).path)).resolve())
        for path, soup in soups.items()
        for tag, attribute in [(t, a) for a in ("src", "href") for t in soup.select(f"script[{a}], link[{a}], img[{a}]")]
        if not tag[attribute].startswith("data:") and tag.get("rel") not in (["next"], ["prev"], ["search"])
    ]
    assert asked
    assert [(path.name, target.name) for path, target in asked if not target.is_file()] == []


def test_every_picture_has_a_text_that_stands_for_it(soups):
    silent = [
        (path.name, str(picture)[:120])
        for path, soup in soups.items()
        for picture in soup.find_all("img")
        if not (picture.get("alt") or "").strip() or picture["alt"].startswith(("../", "_images"))
    ]
    assert silent == []


def test_no_maths_is_left_as_raw_text(soups):
    stray = []
    for path, soup in soups.items():
        prose = BeautifulSoup(str(soup.find("main") or soup.body), "html.parser")
        for tag in prose.select(", ".join(NOT_PROSE)):
            tag.decompose()
        outputs = [tag.get_text() for tag in soup.select(".cell_output pre")]
        for text in [prose.get_text(), *outputs]:
            stray += [(path.name, found[0]) for found in STRAY_MATHS.finditer(text)]
    assert stray == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_loads_what_it_uses_and_no_more(built_book, soups, page):
    soup = soup_of(soups, built_book, page)
    scripts = " ".join(tag.get("src", "") for tag in soup.find_all("script"))
    sheets = " ".join(tag.get("href", "") for tag in soup.find_all("link"))
    assert ("mathjax" in scripts) == bool(soup.select(".math"))
    assert ("kv-widgets.js" in scripts) == bool(soup.find("kv-widget"))
    assert ("kv-widgets.css" in sheets) == bool(soup.find("kv-widget"))
    assert not re.search(r"thebe|require\.|html-manager|embed-amd", scripts + sheets)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_the_book_and_has_one_search_field_and_no_empty_bar(built_book, soups, page):
    soup = soup_of(soups, built_book, page)
    assert "The KV Cache, Slot by Slot" in soup.title.get_text()
    assert "2026" in soup.select_one("footer.bd-footer-content").get_text()
    assert len(soup.select(".search-button-field")) == 1
    assert [bar for bar in soup.select(".bd-header.navbar") if bar.find_all()] == []


def test_mathjax_comes_with_its_licence(built_book):
    [script] = built_book.rglob("tex-svg-full.js")
    assert "Apache License" in script.with_name("LICENSE").read_text(encoding="utf8")


def test_the_book_opens_at_its_first_page(built_book, soups):
    assert f"{PAGES[0]}.html" in str(soups[built_book / "index.html"].find("meta", attrs={"http-equiv": "Refresh"}))


def test_the_built_book_names_no_folder_of_the_machine_it_was_built_on(built_book):
    texts = [path for path in built_book.rglob("*") if path.suffix in {".html", ".ipynb", ".md", ".js"}]
    assert [path.name for path in texts if str(ROOT) in path.read_text(encoding="utf8")] == []
