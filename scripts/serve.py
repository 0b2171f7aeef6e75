"""Serve the built book on this machine, on port 8000 or the next one that is free."""

import argparse
import errno
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

BOOK = Path(__file__).resolve().parent.parent / "_build" / "html"


class BookHandler(SimpleHTTPRequestHandler):
    """Serve files that the browser asks for anew after each build, without a line a file."""

    def end_headers(self):
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

    def log_request(self, code="-", size="-"):
        pass


class LocalServer(ThreadingHTTPServer):
    allow_reuse_address = True
    daemon_threads = True


def open_server(folder, ports):
    """Return a server for a folder on the first free port; port 0 means any.

    Raises
    ------
    OSError
        If no port is free.
    """
    for port in ports:
        try:
            return LocalServer(("127.0.0.1", port), partial(BookHandler, directory=str(folder)))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(f"no free port among {list(ports)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000, help="the first port to try")
    first = parser.parse_args().port
    with open_server(BOOK, range(first, first + 100)) as server:
        print(f"\n  The book is at http://localhost:{server.server_port}   (Ctrl+C stops it)\n", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    main()
