"""A proxy on loopback in front of an S3 server that fails on demand."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Call:
    """A request to the server."""

    method: str
    path: str
    key: str
    """The access key that signed it."""


Rule = Callable[[Call], tuple[int, str] | None]
"""Gives the status and code of an error to answer with; code `hang up` answers nothing."""


class FaultProxy:
    """Forwards to the server whatever the rule lets pass."""

    def __init__(self, server: str) -> None:
        self.rule: Rule = lambda call: None
        self.calls: list[Call] = []
        self._target = urlsplit(server).netloc
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def _serve(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                signed = self.headers.get("Authorization", "")
                key = signed.partition("Credential=")[2].partition("/")[0]
                call = Call(method=self.command, path=self.path, key=key)
                proxy.calls.append(call)
                failure = proxy.rule(call)
                if failure is not None:
                    self._fail(*failure)
                    return
                connection = http.client.HTTPConnection(proxy._target, timeout=30)
                headers = {k: v for k, v in self.headers.items() if k.lower() != "expect"}
                connection.request(self.command, self.path, body, headers)
                answer = connection.getresponse()
                data = answer.read()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                        self.send_header(name, value)
                size = answer.getheader("Content-Length") if self.command == "HEAD" else None
                self.send_header("Content-Length", size or str(len(data)))
                self.end_headers()
                self.wfile.write(data)
                connection.close()

            def _fail(self, status: int, code: str) -> None:
                if code == "hang up":
                    self.close_connection = True
                    return
                text = f"<Error><Code>{code}</Code><Message>planted {code}</Message></Error>"
                data = b"" if self.command == "HEAD" else text.encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/xml")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        for method in ("GET", "PUT", "POST", "HEAD", "DELETE"):
            setattr(Handler, f"do_{method}", Handler._serve)
        return Handler


@contextmanager
def fault_proxy(server: str) -> Iterator[FaultProxy]:
    """Serve until the context ends."""
    proxy = FaultProxy(server)
    try:
        yield proxy
    finally:
        proxy.close()
