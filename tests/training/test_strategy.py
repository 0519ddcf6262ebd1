from __future__ import annotations

import signal

import pytest
import torch
from pytorch_lightning.strategies import DDPStrategy

from normexp.training.fit import Replicated, placed
from normexp.training.stopping import StopRequest


@pytest.mark.parametrize(("has_cuda", "taken"), [(True, "cuda"), (False, "cpu")])
def test_auto_takes_cuda_or_the_cpu_and_nothing_else(monkeypatch, has_cuda: bool, taken: str):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert placed({"accelerator": "auto", "devices": 1})["accelerator"] == taken
    assert placed({"accelerator": "gpu", "devices": 1})["accelerator"] == "cuda"


def test_processes_that_wait_for_each_other_answer_signals_alike(monkeypatch):
    met = []
    monkeypatch.setattr(DDPStrategy, "barrier", lambda _, name: met.append(name))
    stop = StopRequest()
    options = {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}
    strategy = placed(options, stop)["strategy"]
    assert isinstance(strategy, Replicated)
    with stop.listening():
        ours = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as Lightning puts one of its own
        strategy.barrier("run-stage")
        assert signal.getsignal(signal.SIGTERM) == ours
    assert met == ["run-stage"]
