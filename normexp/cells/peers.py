"""Processes that srun or torchrun has started for one command: the first leads, the others follow.

The first one alone reads what is recorded, decides what is trained, and tells the others, so that
they cannot come to different answers. They talk through the store in which torch.distributed meets.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache

from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
from torch import distributed
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]  it is documented
from torch.distributed.rendezvous import rendezvous

from normexp.cells.device_processes import Order
from normexp.training.stopping import Interrupted

GRACE_SECONDS = 30.0  # in which what has failed here has failed in the others too, if it does
TICK = 0.1  # seconds between two looks at the store


class Peers:
    """One of these processes, and its end of what they say to each other.

    Args:
        store: that all of them reach.
        index: of this process; 0 leads.

    Attributes:
        is_apart: a training failed here and not in the others, which may wait for this process
            inside a step; nothing more can be trained together.
    """

    def __init__(self, store: Store, index: int, count: int) -> None:
        self.index = index
        self.is_apart = False
        self._store = store
        self._others = [other for other in range(count) if other != index]
        self._number = 0  # of the order at hand

    def tell(self, order: Order | None) -> None:
        """From the first process: what all train next; None: the command has ended.

        Raises:
            Interrupted: not all are there any more.
        """
        if self.is_apart or any(self._store.check([_left(other)]) for other in self._others):
            raise Interrupted
        self._number += 1
        self._store.set(self._order, pickle.dumps(order))  # type: ignore[arg-type]  it takes bytes

    def hear(self) -> Order | None:
        """Waits for it, however long that takes: the first process may have other work."""
        self._number += 1
        while not self._store.check([self._order]):
            time.sleep(TICK)  # a wait inside the store would not notice a Ctrl-C
        return pickle.loads(self._store.get(self._order))

    @contextmanager
    def training(self) -> Iterator[None]:
        """Around the training of an order, in every process; sets `is_apart`."""
        try:
            yield
        except Interrupted:  # all together
            raise
        except Exception:
            self._store.set(self._ended(self.index), "")
            self.is_apart = not self._hear_of([self._ended(other) for other in self._others])
            raise
        self._store.set(self._ended(self.index), "")

    def leave(self) -> None:
        """The last word of a process that follows."""
        with suppress(distributed.DistError):  # the store may have ended with the first process
            self._store.set(_left(self.index), "")

    def dismiss(self) -> None:
        """The last word of the first process; waits for the others, which need its store."""
        with suppress(Interrupted, distributed.DistError):
            self.tell(None)
            self._hear_of([_left(other) for other in self._others])

    @property
    def _order(self) -> str:
        return f"normexp/order/{self._number}"

    def _ended(self, index: int) -> str:
        return f"normexp/ended/{self._number}/{index}"

    def _hear_of(self, keys: Sequence[str]) -> bool:
        try:
            self._store.wait(list(keys), timedelta(seconds=GRACE_SECONDS))
        except distributed.DistError:
            return False
        return True


def _left(index: int) -> str:
    return f"normexp/left/{index}"


@cache
def meet(index: int, count: int) -> Peers:
    """Waits for the other processes; once, as they were started once."""
    if "RANK" not in os.environ:  # by srun: where Lightning will look for the store, too
        slurm = SLURMEnvironment()
        os.environ["MASTER_ADDR"] = slurm.main_address
        os.environ["MASTER_PORT"] = str(slurm.main_port)
    store, _, _ = next(rendezvous("env://", index, count))
    return Peers(store, index, count)
