"""`python -m normexp.train` with a checkpoint twice a second, for `kill_campaign.py`.

With words, trains. Without, begins many trainings that have torch imported already: reads lines of
JSON, `[log, [word, ...]]` begins one in a new process and answers its id; a number waits for that
process and answers its exit status, as os.waitstatus_to_exitcode does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback

SAVE_SECONDS = 0.5


def save_often() -> None:
    from normexp.training import fit

    fit.SECONDS_BETWEEN_SAVES = SAVE_SECONDS


def serve() -> None:
    import multiprocessing

    import normexp.cells.run
    from normexp.sweeps import crew

    assert normexp.cells.run  # imported here, once, and not in each training
    save_often()
    crew.SPAWN = multiprocessing.get_context("fork")  # type: ignore[assignment]
    print("ready", flush=True)
    for line in sys.stdin:
        message = json.loads(line)
        if isinstance(message, int):
            answer = os.waitstatus_to_exitcode(os.waitpid(message, 0)[1])
        else:
            answer = begin(*message)
        print(answer, flush=True)


def begin(log: str, words: list[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setsid()
        for number, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
            path = log if number else os.devnull
            os.dup2(os.open(path, mode | os.O_CREAT | os.O_APPEND * bool(number)), number)
        from normexp.train import main

        code = main(words)
    except KeyboardInterrupt:  # before the entry could handle it, or after it had
        code = 130
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def train() -> int:
    """The entry; Ctrl-C during the imports of `save_often` is answered as by the entry."""
    try:
        if "workers=0" in sys.argv:  # the parent of workers needs no torch
            save_often()
    except KeyboardInterrupt:
        return 130
    from normexp.train import main

    return main()


if __name__ != "__main__":  # a spawned worker
    save_often()
elif len(sys.argv) == 1:
    serve()
else:
    sys.exit(train())
