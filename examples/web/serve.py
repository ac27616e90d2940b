"""Serves this folder on http://127.0.0.1:8000 (or the given port), with the headers for threads.

A browser lets WASM use several threads only on a page that is isolated from other origins.
"""

from __future__ import annotations

import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Isolated(SimpleHTTPRequestHandler):
    """Serves files, with headers that isolate the page."""

    extensions_map = {  # noqa: RUF012  a plain attribute in the base class
        **SimpleHTTPRequestHandler.extensions_map,
        ".js": "text/javascript",
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
    }

    def end_headers(self) -> None:
        """Adds the two headers that isolate the page."""
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        super().end_headers()


def server(port: int, folder: Path) -> ThreadingHTTPServer:
    """Returns a server of a folder that only this machine can reach."""
    return ThreadingHTTPServer(("127.0.0.1", port), partial(Isolated, directory=str(folder)))


if __name__ == "__main__":
    with server(int(sys.argv[1]) if sys.argv[1:] else 8000, Path(__file__).parent) as running:
        print(f"http://127.0.0.1:{running.server_port}/")
        running.serve_forever()
