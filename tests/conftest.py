"""What tests of several folders share: the built book, and the scripts that make and serve it."""

import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "book" / "_ext")]

import build
import serve


@pytest.fixture(scope="session")
def built_book():
    """The folder of the book, built as `make book` builds it."""
    assert build.build() == 0, "the book does not build; its log above says why"
    return ROOT / "_build" / "html"


@pytest.fixture(scope="session")
def book_server(built_book):
    """The address of a server of the built book, without a slash at its end."""
    with serve.open_server(built_book, [0]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_port}"
        server.shutdown()
