"""A server on loopback that answers requests with JSON."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class JsonServer(ThreadingHTTPServer):
    """Serves in a thread of its own while it is open: `with JsonServer() as server:`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), JsonHandler)
        self.port = self.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.lock = threading.Lock()

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def respond(self, path: str, body: Any, headers: Mapping[str, str]) -> Any:
        """A row or a text, alone or after a status, or between a status and further headers; None
        for a server that has died.

        `body` is empty for GET.
        """
        raise NotImplementedError


class JsonHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: JsonServer

    def do_GET(self) -> None:
        self.answer({})

    def do_POST(self) -> None:
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, body: Any) -> None:
        response = self.server.respond(self.path, body, self.headers)
        if response is None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        status, row, *more = response if isinstance(response, tuple) else (200, response)
        data = (row if isinstance(row, str) else json.dumps(row)).encode()
        self.send_response(status)
        kind = "text/plain" if isinstance(row, str) else "application/json"
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in more[0].items() if more else ():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass
