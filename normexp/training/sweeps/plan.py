"""A dry run: what a command would train, and how long. Writes nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence

from normexp.errors import FAILED, UserError, one_line
from normexp.training.batching.replicas import model_arguments, suitable_threads
from normexp.training.cells.cell import Cell, Prepared, prepare_cell
from normexp.training.cells.module import form_of
from normexp.training.checks.network import probe_batch
from normexp.training.config.spec import CellSpec
from normexp.training.devices import device_type
from normexp.training.records.logs import messages_to_stderr
from normexp.training.records.study import CellState, read_cell
from normexp.training.studies.terminal import Plan, print_plan
from normexp.training.sweeps.machine import worker_slots
from normexp.training.sweeps.worker import import_training


def print_plan_of(cells: Sequence[CellSpec]) -> int:
    """Prints what the cells would need; returns the exit code.

    Raises:
        UserError: all cells are refused.
    """
    prepared = Prepared()
    with messages_to_stderr(), suitable_threads():
        import_training()
        plans = [_plan(cell, prepared) for cell in cells]
    refused = dict.fromkeys(plan.state.refused for plan in plans)
    if "" not in refused:
        raise UserError("; ".join(refused))
    _, num_workers = worker_slots([cell for cell in cells if not cell.error])
    print_plan(plans, num_workers=num_workers, num_points=sum(cell.num_points for cell in cells))
    return FAILED if len(refused) > 1 else 0


def _plan(spec: CellSpec, prepared: Prepared) -> Plan:
    """What a cell would need; one that cannot be prepared is refused."""
    if spec.error:
        return Plan(CellState(spec.id, spec.request, refused=spec.error))
    state = read_cell(spec.study_dir, spec.id, spec.request, [])
    try:
        cell = prepare_cell(spec, prepared)
        num_runs = len(state.missing)
        num_stacks = num_runs if form_of(cell, num_runs) == "apart" else 1
        seconds = _seconds_of_step(cell) if num_runs else 0.0
    except (Exception, SystemExit) as error:  # user code may raise anything
        state.refused = one_line(error)
        return Plan(state)
    return Plan(state, cell.recipe.num_steps, seconds, num_stacks)


def _seconds_of_step(cell: Cell) -> float:
    """The time of a forward and backward pass over a batch of one run, after the first."""
    sizes = cell.recipe.sizes
    device = device_type(cell.recipe.settings.trainer.accelerator)
    network = cell.build(cell.spec.seeds[0]).train().to(device)
    batch = probe_batch(cell.data, sizes.micro)
    arguments = [value.to(device) for value in model_arguments(batch)]
    ends = []
    for _ in range(3):
        outputs = network(*arguments)
        outputs.float().square().mean().backward()
        outputs.sum().item()  # waits for the device
        ends.append(time.perf_counter())
    seconds_per_forward = (ends[-1] - ends[0]) / 2
    return seconds_per_forward * sizes.batch_size / sizes.micro
