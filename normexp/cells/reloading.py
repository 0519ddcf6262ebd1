"""Loads saved weights in a new process, whose networks must give the outputs of the trained ones.

They do not if a norm or a model keeps something outside of the module, as in a cache of its file.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from normexp.batching.replicas import InTurn, Replicas
from normexp.build import load_data
from normexp.cells.cell import make_builder, make_recipe
from normexp.checks.probe import change
from normexp.config.spec import CellSpec
from normexp.data.dataset import Data
from normexp.training.statistics import evaluation_mode, gather

logger = logging.getLogger(__name__)

NUM_SAMPLES = 64  # of the test split
TOLERANCE = 1e-3  # of the largest output
MOST_SECONDS = 600
SPEC, OUTPUTS = "spec.pickle", "outputs.pt"

# What was answered in this process, by what can matter: code, norm, model and data.
_answers: dict[str, str | None] = {}


def fault_of_reloaded(
    replicas: Replicas, index: int, data: Data, spec: CellSpec, weights: Path
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
    outputs = _reload(spec, weights)
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


def _reload(spec: CellSpec, weights: Path) -> Tensor | None:
    """The outputs of saved weights in a new process; None, with a warning, if that fails."""
    paths = [os.getcwd(), *filter(None, sys.path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    with TemporaryDirectory() as folder:
        (Path(folder) / SPEC).write_bytes(pickle.dumps((spec, weights.resolve())))
        try:
            subprocess.run(
                [sys.executable, "-m", "normexp.cells.reloading", folder],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=True,
                env=environment,
                timeout=MOST_SECONDS,
            )
            return torch.load(Path(folder) / OUTPUTS, weights_only=True)
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            logger.warning("the weights could not be reloaded in a new process: %s", said[-1])
            return None


def _answer(folder: Path) -> None:
    """Writes the outputs of the weights that a folder names, for the process that waits."""
    spec, weights = pickle.loads((folder / SPEC).read_bytes())
    data = load_data(spec)
    recipe = make_recipe(spec, data)
    network = make_builder(spec, recipe, data)(spec.seeds[0])
    state = torch.load(weights, map_location="cpu", weights_only=True)
    if any(value.dtype == torch.float64 for value in state.values()):
        network.double()
    network.load_state_dict(state)
    torch.save(outputs_of(InTurn([network]), data)[0], folder / OUTPUTS)


if __name__ == "__main__":
    _answer(Path(sys.argv[1]))
