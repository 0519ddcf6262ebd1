"""One process of a training on several devices; see `device_processes`, which starts it.

It reads its order from stdin and tells its progress and how it ended on stdout, a JSON line each.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
import time
import traceback
from typing import Any, TextIO

from normexp.cells.device_processes import STOPPED, Order
from normexp.errors import UserError


def main() -> int:
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is no message
    order = Order(**pickle.load(sys.stdin.buffer))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        return _train(order, told)
    except UserError as error:
        _tell(told, kind="mistake", text=str(error), traceback="")
    except Exception as error:
        text = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
        _tell(told, kind="error", text=text, traceback=traceback.format_exc())
    return 1


def _train(order: Order, told: TextIO) -> int:
    from omegaconf import OmegaConf

    from normexp.cells.cell import prepare_cell
    from normexp.cells.stack import follow_stack, train_stack
    from normexp.records.logs import messages_to_stderr
    from normexp.training.stopping import Interrupted, StopRequest

    def on_steps(step: int, num_steps: int) -> None:
        _tell(told, step=step, num_steps=num_steps)

    stop = StopRequest()
    try:
        with stop.listening():
            cell = prepare_cell(OmegaConf.create(order.cfg), order.choices)
            if os.environ["RANK"] != "0":
                follow_stack(cell, order.seeds, stop)
            else:
                with messages_to_stderr(known=order.notes):  # printed as the cell was prepared
                    progress = None if order.shows_progress else on_steps
                    train_stack(cell, order.seeds, order.notes, stop, progress)
    except (Interrupted, KeyboardInterrupt):
        return STOPPED
    return 0


def _tell(told: TextIO, **message: Any) -> None:
    print(json.dumps(message | {"time": time.time()}), file=told, flush=True)


def _end_with_parent() -> None:
    """Ends this process once the other side of its stdin is gone: nobody would read its results."""
    os.read(0, 1)  # not through sys.stdin, whose lock a waiting thread would keep at the exit
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
