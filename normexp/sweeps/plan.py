"""A dry run: what a command would train, and how long. Writes nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import suppress

from normexp.batching.replicas import model_arguments
from normexp.batching.speed import suitable_threads
from normexp.cells.cell import Cell, prepare_cell
from normexp.checks.network import probe_batch
from normexp.config.cells import CellSpec
from normexp.config.words import one_line
from normexp.errors import FAILED, USER_MISTAKE, UserError
from normexp.records.logs import messages_to_stderr
from normexp.records.study import CellState, read_cell
from normexp.reporting.dry_run import Plan, print_plan
from normexp.sweeps.machine import worker_slots
from normexp.sweeps.worker import ready_to_train

TIMED_STEPS = 4


def print_plan_of(cells: Sequence[CellSpec]) -> int:
    """Prints what the cells would need; returns the exit code.

    Raises:
        UserError: all cells are refused for the same reason.
    """
    _, num_workers = worker_slots(cells)
    with messages_to_stderr(), ready_to_train(), suitable_threads(0):
        plans = [_plan(cell) for cell in cells]
    refused = [plan.state.refused for plan in plans if plan.state.refused]
    if len(set(refused)) == 1 and len(refused) == len(plans):
        raise UserError(refused[0])
    print_plan(plans, num_workers=num_workers)
    return 0 if not refused else USER_MISTAKE if len(refused) == len(plans) else FAILED


def _plan(spec: CellSpec) -> Plan:
    if spec.config is None:
        return Plan(CellState(spec.id, spec.title, refused=spec.error), {}, 0.0)
    state = read_cell(spec.directory.parent, spec.id, spec.title, spec.seeds, [])
    try:
        cell = prepare_cell(spec)
    except UserError as error:
        state.refused = str(error)
    except Exception as error:  # user code may raise anything
        state.refused = one_line(error)
    if state.refused:
        return Plan(state, {}, 0.0)
    return Plan(state, cell.description, _seconds_of_step(cell) if state.missing else 0.0)


def _seconds_of_step(cell: Cell) -> float:
    """The median time of a forward and backward pass over a batch of one run."""
    sizes, device = cell.recipe.sizes, cell.recipe.devices.type
    network = cell.build(cell.spec.seeds[0]).train().to(device)
    batch, seconds = probe_batch(cell.data, sizes.micro), list[float]()
    arguments = [value.to(device) for value in model_arguments(batch)]
    with suppress(Exception):  # user code
        for _ in range(TIMED_STEPS):
            start = time.perf_counter()
            loss = network(*arguments).float().square().mean()
            loss.backward()
            float(loss)  # waits for the device
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * sizes.batch_size / sizes.micro if seconds else 0.0
