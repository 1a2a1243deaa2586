"""A process that checks and writes parts: `python -m rollout.part_process`, spoken to by pipes.

It ends when its input does, hence with the job, also one that was killed.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Final

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
    pa.array([None], pa.string())  # pyarrow's first conversion imports pandas, where there is one
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    serve(requests, replies)


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
            answer = {"os_error": [error.errno, error.strerror or str(error), error.filename]}
        except RolloutError as error:
            answer = {"dataset_error": str(error)}
        except Exception as error:  # told to the job, which raises it
            answer = {"error": f"{type(error).__name__}: {error}"}
        send(replies, answer)


if __name__ == "__main__":
    main()
