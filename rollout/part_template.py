"""Processes that write parts, as copies of one that has imported what they need.

A start takes half a second to a second of a core; a job at its widest has sixteen of them, and the
last are wanted when it ends. A copy takes some hundredths of a second.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

_CPU_INFO: Final = Path("/proc/cpuinfo")


@dataclass(frozen=True, kw_only=True, slots=True)
class PartProcess:
    """A copy at work."""

    template: PartTemplate
    pid: int
    stdin: IO[bytes]
    """What it is asked."""
    stdout: IO[bytes]
    """What it answers."""

    def wait(self) -> int:
        """Return its exit code once it has ended, negative for a signal."""
        return self.template.wait(self.pid)


class PartTemplate:
    """Makes the copies; used from several threads."""

    def __init__(self) -> None:
        """Start nothing."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self) -> PartProcess:
        """Start a copy.

        Raises:
            OSError: the system starts no process.
        """
        with self._lock:
            requests, stdin = os.pipe()
            stdout, replies = os.pipe()
            try:
                try:
                    pid = self._copy(requests, replies)
                except OSError:  # killed since the last one was made
                    self._end()
                    pid = self._copy(requests, replies)
            except BaseException:
                os.close(stdin)
                os.close(stdout)
                raise
            finally:
                os.close(requests)
                os.close(replies)
        return PartProcess(
            template=self, pid=pid, stdin=os.fdopen(stdin, "wb"), stdout=os.fdopen(stdout, "rb")
        )

    def wait(self, pid: int) -> int:
        """Return the exit code of a copy once it has ended; of one that lost its template, -9.

        Args:
            pid: the copy's.
        """
        with self._lock, contextlib.suppress(OSError):
            assert self._control is not None
            self._control.sendall(b"wait %d" % pid)
            return _answer(self._control)
        return -9

    def close(self) -> None:
        """End the template; its copies end with their pipes."""
        with self._lock:
            self._end()

    def _copy(self, requests: int, replies: int) -> int:
        if self._control is None:
            # messages have ends, and a side that is gone is noticed
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "rollout.part_process"],
                    stdin=theirs.fileno(),
                    env=os.environ | process_environment(),
                )
        socket.send_fds(self._control, [b"start"], [requests, replies])
        return _answer(self._control)

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.wait()
            self._process = None


def _answer(control: socket.socket) -> int:
    data = control.recv(64)
    if not data:
        raise ConnectionResetError("the template is gone")
    return int(data)


def process_environment() -> dict[str, str]:
    """Return the environment of a process that writes parts, where it differs from the job's."""
    chosen = {
        # one thread, since a process that has more is not safely copied
        "OPENBLAS_NUM_THREADS": "1",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
        # each part takes as much memory as the last: fetched anew page by page it cost a fifth of
        # the time, so nothing goes back to the system before the process ends
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(2**40),
        "MALLOC_TOP_PAD_": str(64 * 2**20),
        "ARROW_DEFAULT_MEMORY_POOL": "system",
    }
    info = _CPU_INFO.read_text() if _CPU_INFO.is_file() else ""
    if "AuthenticAMD" in info and re.search(r"^cpu family\s*: 25$", info, re.MULTILINE):
        # Zen 4 executes the compressing stores of NumPy's AVX-512 sort in microcode: the AVX2 sort
        # takes 8 ns an entry in place of 20
        chosen["NPY_DISABLE_CPU_FEATURES"] = os.environ.get(
            "NPY_DISABLE_CPU_FEATURES",
            "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL",
        )
    return chosen
