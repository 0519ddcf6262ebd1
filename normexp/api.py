"""The functions of `import normexp`."""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normexp.errors import UserError, rewording
from normexp.words import as_python, as_typed

if TYPE_CHECKING:
    import pandas as pd
    from pytorch_lightning import LightningModule
    from torch import Tensor, nn

    from normexp.any_network.diagnosis import Diagnosis
    from normexp.any_network.diagnosis.batches import Loss
    from normexp.norms.factory import NormFactory
    from normexp.training.config.spec import CellSpec
    from normexp.training.records.result import Result
    from normexp.verdicts.report import Report

# Errors are written for a command line; here they are told in Python, where knobs are arguments.
knobs_as_python = partial(as_python, own="norm")


@rewording(as_python)
def run(
    overrides: str | Sequence[str] = (), workers: int | None = None, **values: Any
) -> list[Result]:
    """Trains like `python -m normexp.train` with these words, and skips recorded runs.

    Returns one result per cell and seed, in the order of the cells, including failed and diverged
    runs; with `dry_run=True` prints what it would train, and returns none:

        results = normexp.run(norm="group", lr=0.3, study="mine")
        scores = [result.metrics["val/accuracy"] for result in results]
        normexp.run(norm=["batch", "group"], norm_batch_size=[2, 32], workers=2)  # a sweep
        normexp.run("-m norm=group norm.num_groups=2,4", epochs=3, tags=["mine"])

    Args:
        overrides: as on the command line; -m, --config-dir and experiments are understood.
        workers: the most trainings at once, in processes of their own; 0: this process trains all;
            None: as the overrides say, or 0. Other values than 0 need a script with
            `if __name__ == "__main__":`, as multiprocessing does.
        values: of keys; a list is swept, unless the key takes a list, as `evaluate_with`.

    Raises:
        normexp.errors.UserError: a mistake in the overrides; a sweep trains its other cells first.
        normexp.errors.Halted: no cell can be trained any more, as on a full disk.
        KeyboardInterrupt: after Ctrl-C; the same call resumes.
    """
    from normexp.training.config.keys import Index
    from normexp.training.config.validate import check_value

    check_value("workers", workers, Index | None)
    words = _words(overrides, values)
    if workers is None and not any(word.startswith("workers=") for word in words):
        workers = 0
    cells = _compose(words)

    from normexp.training.config.spec import shared_value

    if shared_value(cells, "dry_run"):
        from normexp.training.sweeps.plan import print_plan_of

        print_plan_of(cells)
        return []

    from normexp.training.sweeps.sweep import raise_if_stopped, train_cells

    states = train_cells(cells, ["normexp.run", *words], workers=workers)
    raise_if_stopped(cells, states)
    if refused := [state.refused for state in states if state.refused]:
        raise UserError(refused[0])
    return [result for state in states for result in state.results]


@rewording(as_python)
def module(overrides: str | Sequence[str] = (), **values: Any) -> LightningModule:
    """The module that trains these words, with its data, for a Trainer of your own.

        module = normexp.module(norm="group", batch_size=8, epochs=3)
        trainer = pytorch_lightning.Trainer(max_epochs=3)
        trainer.fit(module)
        trainer.test(module)
        network = module.replicas.replica(0)

    It trains seed 0 unless the words say more; several seeds train side by side, and metrics are
    their means. `epochs` is the length of the learning rate schedule, after which training ends.
    Loggers, checkpoints, precision and the device (one) are those of the Trainer. A batch is an
    optimizer step. Nothing is written to `runs_dir`.

    Args:
        overrides, values: as for `run`, of one cell.

    Raises:
        normexp.errors.UserError: a mistake in the overrides, or several cells.
    """

    words = _words(overrides, values)
    says_more = any(word.startswith("replicas=") for word in words)
    cells = _compose(words if says_more else [*words, "replicas=1"])
    if len(cells) > 1:
        raise UserError(f"{len(cells)} cells in one module; drop -m and name one value per key")

    from normexp.training.sweeps.machine import importing_torch

    with importing_torch():
        from normexp.training.cells.cell import prepare_cell
        from normexp.training.cells.module import module_of

    return module_of(prepare_cell(cells[0]))


@rewording(as_python)
def load(run_dir: str | Path) -> nn.Module:
    """The trained network of a run directory `runs/<study>/<cell_id>/seed-<k>`.

    A plain module in evaluation mode on the CPU. Its input is what the data set's `model_inputs`
    returns: images (N, C, H, W) as float32, normalised, or tokens (N, T).

    A network of images also has `predict`, which takes bytes or floats 0 to 1 and returns names:

        names = normexp.load("runs/mine/CELL/seed-0").predict(images)  # (N, C, H, W) or (C, H, W)

    Raises:
        normexp.errors.UserError: no such run, several seeds, no weights, or weights that do not
            fit.
    """
    from normexp.training.sweeps.machine import importing_torch

    with importing_torch():
        from normexp.training.cells.finished import load_run

    return load_run(Path(run_dir).expanduser())


@rewording(as_python)
def load_study(study: str | Sequence[str], runs_dir: str | Path = "runs") -> pd.DataFrame:
    """One row per ended run of a study, or of several: cell_id, seed, config, metrics, timing.

    Nested keys are joined by dots (`norm.num_groups`, `timing.step_ms`), and sizes are numbers also
    where the config has null. A missing value is NaN or None. Runs that cannot be read, or have not
    ended, are logged as warnings.

    Raises:
        normexp.errors.UserError: no such study (names the nearest), or one without an ended run.
    """
    from normexp.training.config.validate import OPTIONS, check_value
    from normexp.training.studies.rows import read_studies
    from normexp.verdicts.tables import run_frame

    names = [study] if isinstance(study, str) else study
    check_value("study", names, OPTIONS["report"]["study"])
    records = read_studies(Path(runs_dir).expanduser(), names)
    _warn(records.problems)
    return run_frame(records.runs).infer_objects()


@rewording(as_python)
def load_report(
    study: str | Sequence[str],
    runs_dir: str | Path = "runs",
    *,
    metric: str | None = None,
    tolerance: float | None = None,
    reference: str | None = None,
    tries: int | None = None,
    choose_by: str | None = None,
) -> Report:
    """What the report of a study says: its cells, and every comparison with interval and verdict.

        for row in normexp.load_report("my-study").comparisons:
            print(row.arm, row.against, row.gap, row.verdict, row.why)

    Args:
        study: a name, or several.
        metric, tolerance, reference, tries, choose_by: as in `python -m normexp.report`.

    Raises:
        normexp.errors.UserError: a study that is missing or has no ended run, or a metric that no
            run has.
    """
    from normexp.training.config.validate import OPTIONS, check_value
    from normexp.training.studies.report import read_report

    names = [study] if isinstance(study, str) else study
    options = {"metric": metric, "tolerance": tolerance, "reference": reference, "tries": tries}
    options |= {"choose_by": choose_by}
    for key, value in {"study": names, **options}.items():
        check_value(key, value, OPTIONS["report"][key])
    report = read_report(Path(runs_dir).expanduser(), names, **options)
    _warn(report.problems)
    return report


@rewording(as_python)
def confirm_best(
    study: str,
    runs_dir: str | Path = "runs",
    *,
    best: int = 1,
    replicas: int = 8,
    baseline: str | None = None,
    workers: int | None = None,
) -> Report:
    """Trains the best tries of a study, and its baseline, on unused seeds, and compares them.

        for norm in ("batch", "group", "mine.Norm"):
            normexp.run(norm=norm, study="loop", replicas=8)
        report = normexp.confirm_best("loop")

    The same call again resumes an interrupted confirmation, or returns one that has ended. A run
    that fails raises nothing: its comparison has no verdict, and `why` says how many it lacks.

    Args:
        study: a name; its first cell is the baseline.
        best: how many tries are trained: those with the best means on validation.
        replicas: seeds of each of them and of the baseline.
        baseline: another one than the first cell, by its id or its name in the report.
        workers: as for `run`; None: 0.

    Returns:
        The report of the study. Its verdicts are those of its confirmations; other tries have none.

    Raises:
        normexp.errors.UserError: no such study or baseline, too few tries, or a try whose code has
            changed since.
        normexp.errors.Halted, KeyboardInterrupt: as for `run`.
    """
    from normexp.training.config.validate import OPTIONS, check_value

    options = {"study": study, "runs_dir": str(Path(runs_dir).expanduser()), "best": best}
    options |= {"replicas": replicas, "baseline": baseline, "workers": workers or 0}
    for key, value in options.items():
        check_value(key, value, OPTIONS["confirm"][key])
    words = [f"{key}={as_typed(value)}" for key, value in options.items() if value is not None]

    from normexp.training.sweeps.machine import importing_torch

    with importing_torch():
        from normexp.training.search.confirm import train_finalists

    train_finalists(options | {"dry_run": False}, ["normexp-confirm", *words])
    return load_report(study, runs_dir)


@rewording(as_python)
def compare(table: pd.DataFrame, *, arm: str, seed: str, metric: str, **options: Any) -> Report:
    """Verdicts for runs made elsewhere: compares the arms of a table with a row per run.

        normexp.compare(runs, arm="optimizer", seed="seed", metric="val/accuracy")

    Args:
        table: a row per run; its other columns are found to be settings or measurements.
        arm, seed, metric: columns: what is compared, the repetition, and the outcome.
        options: of `normexp.verdicts.table.compare`, which says what is refused.

    Raises:
        normexp.errors.UserError: a table from which no verdict follows.
    """
    from normexp.verdicts import table as tables

    return tables.compare(table, arm=arm, seed=seed, metric=metric, **options)


def assert_contract(factory: Callable[..., Any], **options: Any) -> None:
    """For tests of your own: raises AssertionError naming what a norm does that no norm may.

    Args:
        factory: an nn.Module class, or a partial of one.
        options: of `normexp.training.checks.assert_contract`.
    """
    from normexp.training.checks import assert_contract as check

    check(factory, **options)


def diagnose(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss,
    *,
    max_batches: int | None = None,
    tolerance: float | None = None,
) -> Diagnosis:
    """Says why a model's loss is higher in evaluation mode than in training mode.

        result = normexp.diagnose(model, train_loader, torch.nn.functional.cross_entropy)
        print(result)

    The gap on the same samples is split into terms that add up: dropout and the like, statistics of
    the current batch, the own share of a sample in them, and running averages that are stale or
    noisy; `normexp.any_network.diagnosis.measure` defines them. Each has its standard error over
    the batches. Findings name causes whose remedies were tried on copies, with what the gap loses
    by each. Norms are known by what they compute, whatever their class and wherever they keep their
    state. An evaluation that depends on the other samples of a batch is a finding, with its losses.
    Everything runs on copies of the model.

    Args:
        model: any module. In training mode, its modes as they are count as those of training, and
            `eval()` gives those of evaluation; in evaluation mode the reverse. If your training
            keeps some norms in evaluation mode, hand the model over as it trains.
        batches: (inputs, targets) pairs as in training, augmented and shuffled, of the training's
            batch size; a tuple of inputs is a tuple of arguments. A batch may also be a mapping,
            whose keys the forward names; the loss then gets the output and the mapping.
        loss: loss(output, targets), the mean over samples; any number to be small, such as an
            error rate. It must work on the outputs of both modes.
        max_batches: how many are read, and kept in memory; None: 512 samples, in 16 to 128 batches.
        tolerance: smaller terms have no finding, in units of the loss; None: 0.01, or 1 % of the
            loss in training mode if that is more.

    Raises:
        normexp.errors.UserError: fewer than two batches, a batch that model or loss do not take, or
            a model that cannot be copied.
    """
    from normexp.any_network.diagnosis import diagnose
    from normexp.training.config.keys import NotNegative, Several
    from normexp.training.config.validate import check_value

    check_value("max_batches", max_batches, Several | None)
    check_value("tolerance", tolerance, NotNegative | None)
    return diagnose(model, batches, loss, max_batches=max_batches, tolerance=tolerance)


def recompute_averages(
    model: nn.Module, batches: Iterable[Any], *, max_batches: int | None = None
) -> tuple[str, ...]:
    """Gives the norms of a model the running averages that its weights and these batches have.

        normexp.recompute_averages(model, train_loader)

    For averages that are stale (after weights were averaged, or fine-tuned), noisy or lost. Works
    for norms of any class that average in training what their evaluation uses, while
    torch.optim.swa_utils.update_bn works for torch's. Norms use the statistics of each batch, all
    else is in evaluation mode, so dropout is off. Running means and variances become those of all
    samples (arXiv:2105.07576); other state of these norms moves by forwards in training mode.

    Args:
        model: any module; its averages change, and nothing else.
        batches: as for `diagnose`, of the training's data and batch size; targets are not used.
        max_batches: how many are read; None: all.

    Returns:
        The paths of the norms with new averages.

    Raises:
        normexp.errors.UserError: no norm has such averages, batches that the model does not take,
            or values that are not finite; the model stays as it was.
    """
    from normexp.any_network.diagnosis import recompute_averages
    from normexp.training.config.keys import Count
    from normexp.training.config.validate import check_value

    check_value("max_batches", max_batches, Count | None)
    return recompute_averages(model, batches, max_batches=max_batches)


@rewording(knobs_as_python)
def replace_norms(
    model: nn.Module,
    norm: str | type[nn.Module],
    inputs: Any = None,
    *,
    norm_batch_size: int | None = None,
    **knobs: Any,
) -> nn.Module:
    """A copy of any network with other norms, for a loop of your own.

        model = torchvision.models.segmentation.fcn_resnet50(weights="DEFAULT")
        model = normexp.replace_norms(model, "group", images, num_groups=16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)  # of the copy

    A norm is recognised by what it computes: a gain and a shift by channel, after moments over
    samples, groups of channels or one position. The new one takes its place, layout, device,
    gain, shift and running moments, and its eps and momentum unless `knobs` set them. Frozen
    parameters stay frozen. What computes more, such as an activation inside its forward, is left as
    it is. Logged as a warning: what was replaced, what was left and why, and what the new norm has
    no place for. A second call replaces the norms of the first.

    Args:
        model: any module, which stays as it is.
        norm: a class, or as on the command line: `group`, `my_norm.MyNorm`, or `as_built`, the
            network's own.
        inputs: of a small batch, to run the model on: a tensor, a tuple of arguments, or a mapping
            of keyword arguments. Without them only torch's own classes are replaced.
        norm_batch_size: samples that share batch statistics in training; None: all of a forward.
        knobs: of the norm, as `num_groups=16`, and `eps`.

    Raises:
        normexp.errors.UserError: no norm is recognised, a knob that the norm does not take, or a
            forward that fails with it.
    """
    from normexp.any_network.replace import replace_norms

    norm = _typed(norm) if isinstance(norm, type) else norm
    factory = _norm_factory(norm, norm_batch_size, knobs)
    network, notes = replace_norms(model, factory, inputs)
    _warn([knobs_as_python(f"norm={norm}: {note}") for note in notes])
    return network


def state_as_built(model: nn.Module) -> dict[str, Tensor]:
    """The state_dict of a network with replaced norms, under the names that its authors gave.

        torch.save(normexp.state_as_built(model), "weights.pt")

    A new norm sits in a `Site`, so its weights are `bn1.norm.weight` in the model's own state_dict,
    and `bn1.weight` here, as in the `weights.pt` of a run: the same network, built with these norms
    and without normexp, loads them.
    """
    from normexp.norms.site import state_as_built

    return state_as_built(model)


def _norm_factory(norm: str, norm_batch_size: int | None, knobs: Mapping[str, Any]) -> NormFactory:
    """The factory of a norm, as for a training of these words."""
    from normexp.norms.build import build_norm
    from normexp.training.config.compose import compose_config
    from normexp.training.config.keys import KEYS, Count
    from normexp.training.config.validate import check_keys, check_value

    check_value("norm", norm, str)
    check_value("norm_batch_size", norm_batch_size, Count | None)
    if lacking := knobs.keys() & {"at", "half_life"}:
        raise UserError(
            f"{min(lacking)} needs a training by normexp; drop it, or use normexp.module"
        )
    words = [f"norm={norm}"]
    for key, value in knobs.items():
        words.append(f"{'' if key == 'eps' else 'norm.'}{key}={as_typed(value)}")
    with rewording(partial(re.sub, r"(?<![\w.])norm\.(?=[a-z])", "")):  # also keys without a value
        config = compose_config(words)
        check_keys(config, KEYS.keys() & {f"norm.{key}" for key in knobs})
        return build_norm(config, norm_batch_size, typed=knobs)


def _words(overrides: str | Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """The words of a command line: `overrides`, and one for each of the values."""
    from normexp.training.config.keys import Words
    from normexp.training.config.validate import check_value, takes

    words = shlex.split(overrides) if isinstance(overrides, str) else [*overrides]
    check_value("overrides", words, Words)
    for key, value in values.items():
        if isinstance(value, list | tuple) and not takes(key, [*value]):
            words += ["-m", f"{key}={','.join(map(_typed, value))}"]
        else:
            words.append(f"{key}={_typed(value)}")
    return words


def _typed(value: Any) -> str:
    """A value as typed. Raises UserError for a class or function that no path leads to."""
    if "<locals>" in (name := getattr(value, "__qualname__", "")):
        raise UserError(
            f"{name} is defined inside a function, where its name does not lead to it; define it "
            "at the top of its file"
        )
    return as_typed(value)


def _compose(words: Sequence[str]) -> list[CellSpec]:
    """The cells of a command line that trains here."""
    from normexp.cli import parse_command
    from normexp.training.config.command import compose_cells

    if {"--help", "-h"} & set(words):
        raise UserError("--help works only in a shell")
    command = parse_command(words)
    if command.shows_config or command.launcher is not None:
        raise UserError(f"{' '.join(words)}: --cfg and launchers work only in a shell")
    return compose_cells(command)


def _warn(lines: Sequence[str]) -> None:
    for line in lines:
        logging.getLogger(__name__).warning(line)
