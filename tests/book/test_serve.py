"""scripts/serve.py serves a folder on the first free port, and tells browsers to ask anew."""

import socket
import threading
from urllib.request import urlopen

import pytest
import serve


@pytest.fixture
def taken_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


def test_a_taken_port_is_passed_over(tmp_path, taken_port):
    with serve.open_server(tmp_path, [taken_port, 0]) as server:
        assert server.server_port != taken_port


def test_no_free_port_is_an_error_that_names_those_tried(tmp_path, taken_port):
    with pytest.raises(OSError, match=str(taken_port)):
        serve.open_server(tmp_path, [taken_port])


def test_a_file_is_served_so_that_the_next_build_shows_at_once(tmp_path):
    (tmp_path / "page.html").write_text("a page", encoding="utf8")
    with serve.open_server(tmp_path, [0]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with urlopen(f"http://127.0.0.1:{server.server_port}/page.html") as answer:
            assert answer.read() == b"a page"
            assert answer.headers["Cache-Control"] == "no-cache"
        server.shutdown()
