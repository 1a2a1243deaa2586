"""Processes that check and write parts, and the one they are copies of.

`python -m rollout.part_process`, told by a socket in place of its standard input when to make one
(`rollout.part_template`). A copy is spoken to by pipes and ends when its input does, the template
when its socket does: hence with the job, also one that was killed.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Final, NoReturn

import pyarrow as pa

from rollout.errors import RolloutError
from rollout.part_wire import receive, send, unpack_rows
from rollout.part_work import PartWork

_NICE: Final = 5  # the engine goes first where there are too few cores


def main() -> None:
    """Serve one job."""
    # the job decides what a signal to the whole group means
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(_NICE)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is not the job's
    pa.array([None], pa.string())  # pyarrow's first conversion imports pandas, where there is one
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as control:
        make_copies(control)


def make_copies(control: socket.socket) -> None:
    """Make copies of this process until the socket ends.

    Args:
        control: messages `start`, with descriptors to read requests from and to write replies to,
            answered by a process number, and `wait` with one, answered by its exit code, or -9 for
            a copy of another process.
    """
    while True:
        message, files, _, _ = socket.recv_fds(control, 64, 2)
        if not message:
            return
        what, *pid = message.split()
        if what == b"wait":
            control.sendall(b"%d" % _exit_code(int(pid[0])))
            continue
        copy = os.fork()
        if not copy:
            control.close()
            _serve_and_end(*files)
        for file in files:
            os.close(file)
        control.sendall(b"%d" % copy)


def _exit_code(pid: int) -> int:
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:  # of a template that was killed
        return -signal.SIGKILL
    return os.waitstatus_to_exitcode(status)


def _serve_and_end(requests: int, replies: int) -> NoReturn:
    code = 1
    try:
        os.close(sys.stdin.fileno())  # the template's socket
        with open(requests, "rb") as read, open(replies, "wb") as write:
            serve(read, write)
        code = 0
    except BaseException:  # there is nobody above who would print it
        traceback.print_exc()
    finally:
        os._exit(code)


def serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    """Answer until the input ends.

    Args:
        requests: messages `load`, with rows, `write` and `drop`.
        replies: one answer each.
    """
    work: PartWork | None = None
    while True:
        try:
            head, body = receive(requests)
        except EOFError:
            return
        try:
            if head["do"] == "load":
                work = None  # the last part's memory goes first
                work = PartWork(unpack_rows(body))
                answer: dict[str, Any] = {"bad": [asdict(bad) for bad in work.bad_rows]}
            elif head["do"] == "drop":
                work, answer = None, {}
            else:
                assert work is not None
                path, order = Path(head["path"]), head["order"]
                info = work.write(path, order, head["fingerprint"], head["row_group_bytes"])
                answer = {"info": asdict(info)}
        except OSError as error:
            parts = [error.errno, error.strerror, error.filename]
            answer = {"os_error": [str(error)] if error.errno is None else parts}
        except RolloutError as error:
            answer = {"dataset_error": str(error)}
        except Exception as error:  # told to the job, which raises it
            answer = {"error": f"{type(error).__name__}: {error}"}
        send(replies, answer)


if __name__ == "__main__":
    main()
