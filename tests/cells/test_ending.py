from __future__ import annotations

import pytest
import torch

from normexp.cells.stack import forget_peak_memory, gpu_name, peak_memory


def test_peak_memory_of_a_cpu_is_absent_as_it_is_not_of_one_cell():
    forget_peak_memory()
    assert peak_memory(torch.device("cpu")) == {}


def test_peak_memory_of_a_gpu_is_in_millions_of_bytes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 812_500_000)  # noqa: ARG005
    assert peak_memory(torch.device("cuda", 0)) == {"peak_memory_mb": 812.5}


def test_run_on_a_cpu_names_no_gpu_and_wakes_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    assert gpu_name(torch.device("cpu")) is None
    assert gpu_name(torch.device("cuda", 1)) == "GPU 1"
