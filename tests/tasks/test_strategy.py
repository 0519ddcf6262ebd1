from __future__ import annotations

import pytest
import torch

from normexp.tasks.strategy import placed


@pytest.mark.parametrize(("has_cuda", "taken"), [(True, "cuda"), (False, "cpu")])
def test_auto_takes_cuda_or_the_cpu_and_nothing_else(monkeypatch, has_cuda: bool, taken: str):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert placed({"accelerator": "auto", "devices": 1})["accelerator"] == taken
    assert placed({"accelerator": "gpu", "devices": 1})["accelerator"] == "cuda"
