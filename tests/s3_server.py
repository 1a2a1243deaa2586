"""An S3 server on loopback in a process of its own.

Not a thread of the tests: vLLM looks through every loaded module while it starts, and the objects
of the server's web framework raise when they are looked at.
"""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

_SERVE = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(*server.get_host_and_port(), flush=True)
sys.stdin.read()
server.stop()
"""


@contextmanager
def s3_server(bucket: str) -> Iterator[str]:
    """Start a server with one bucket; it ends with the context, or with this process."""
    command = [sys.executable, "-c", _SERVE]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        host, port = process.stdout.readline().split()
        url = f"http://{host}:{port}"
        urllib.request.urlopen(urllib.request.Request(f"{url}/{bucket}", method="PUT")).close()
        try:
            yield url
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(timeout=30)
