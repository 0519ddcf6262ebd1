"""Trainings that begin with everything imported, for tests that kill many of them.

Reads lines of JSON: a list of words begins `normexp.train` in a new process and answers its id; a
number waits for that process and answers its exit status, as os.waitstatus_to_exitcode does.
"""

from __future__ import annotations

import json
import os
import sys

import normexp.cells.run
from normexp.train import main

assert normexp.cells.run  # imported here, once, and not in each training


def begin(words: list[str], log: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    code = 70
    try:
        code = main(words)
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    print("ready", flush=True)
    for line in sys.stdin:
        message = json.loads(line)
        if isinstance(message, int):
            answer = os.waitstatus_to_exitcode(os.waitpid(message, 0)[1])
        else:
            answer = begin(message, sys.argv[1])
        print(answer, flush=True)
