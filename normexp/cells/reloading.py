"""Loads saved weights in a new process, whose networks must give the outputs of the trained ones.

Outputs differ if a norm or a model keeps values outside of its module, as in a cache of its file.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from normexp.batching.replicas import InTurn, Replicas
from normexp.batching.sizes import Sizes
from normexp.build import build_network, build_norm, load_data
from normexp.checks.probe import change
from normexp.config.spec import CellSpec
from normexp.data.dataset import Data
from normexp.norms.site import load_as_built
from normexp.training.statistics import evaluation_mode, gather

if TYPE_CHECKING:  # the new process trains nothing, and so needs no Lightning
    from normexp.training.recipe import Recipe

logger = logging.getLogger(__name__)

NUM_SAMPLES = 64  # of the test split
TOLERANCE = 1e-3  # of the largest output
MOST_SECONDS = 600
TASK, OUTPUTS = "task.pickle", "outputs.pt"

# What was answered in this process, by what can matter: code, norm, model and data.
_answers: dict[str, str | None] = {}


@dataclass(frozen=True)
class _Task:
    """What a new process needs to build a trained network again."""

    spec: CellSpec
    sizes: Sizes
    num_steps: int
    norm_momentum: float | None
    weights: Path

    def outputs(self) -> Tensor:
        """The outputs (N, ...) of the saved weights, see `outputs_of`."""
        data = load_data(self.spec)
        norm = build_norm(
            self.spec.norm,
            *(self.sizes, data),
            num_steps=self.num_steps,
            momentum=self.norm_momentum,
        )
        network = build_network(self.spec.values["model"], norm, data)(self.spec.seeds[0])
        state = torch.load(self.weights, map_location="cpu", weights_only=True)
        if any(value.dtype == torch.float64 for value in state.values()):
            network.double()
        load_as_built(network, state)
        return outputs_of(InTurn([network]), data)[0]


def fault_of_reloaded(
    replicas: Replicas, index: int, data: Data, spec: CellSpec, recipe: Recipe, weights: Path
) -> str | None:
    """What differs if the weights of a replica are loaded in a new process; None if nothing does.

    Asked once for each norm, model and data in this process. A process that fails is a warning.

    Args:
        replicas: as they were trained.
        weights: the file of replica `index`.
    """
    content = {key: spec.identity.get(key) for key in ("norm", "model", "data")}
    key = json.dumps([content, spec.sources], sort_keys=True, default=str)
    if key in _answers:
        return _answers[key]
    expected = outputs_of(replicas, data)[index]
    if not expected.isfinite().all():
        return None
    task = _Task(spec, recipe.sizes, recipe.num_steps, recipe.norm_momentum, weights.resolve())
    outputs = _reload(task)
    if outputs is None:
        return None
    far, fault = change(expected, outputs), None
    if far > TOLERANCE:
        fault = (
            "its weights, reloaded in a new process, give other test outputs (by "
            f"{far:.1g} of the largest): the norm or the model keeps something outside of the "
            "module; use self.register_buffer(...)"
        )
    _answers[key] = fault
    return fault


@torch.no_grad()
def outputs_of(replicas: Replicas, data: Data) -> Tensor:
    """The outputs (S, N, ...) of the first test samples in evaluation mode, on the CPU."""
    device = next(replicas.parameters()).device
    batch = gather(replicas, data, "test", torch.arange(min(NUM_SAMPLES, len(data.test))))
    batch = {name: value.to(device) for name, value in batch.items()}
    with evaluation_mode(replicas):
        return replicas.measure(batch, lambda output, _: output, shared=True).float().cpu()


def _reload(task: _Task) -> Tensor | None:
    """The outputs of saved weights in a new process; None, with a warning, if that fails."""
    paths = [os.getcwd(), *filter(None, sys.path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    with TemporaryDirectory() as folder:
        (Path(folder) / TASK).write_bytes(pickle.dumps(task))
        try:
            subprocess.run(
                [sys.executable, "-m", "normexp.cells.reloading", folder],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=True,
                env=environment,
                timeout=MOST_SECONDS,
                start_new_session=True,  # Ctrl-C stops this process after the check
            )
            return torch.load(Path(folder) / OUTPUTS, weights_only=True)
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            logger.warning("the weights could not be reloaded in a new process: %s", said[-1])
            return None


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.save(pickle.loads((folder / TASK).read_bytes()).outputs(), folder / OUTPUTS)
