"""What makes a device fast changes no result: layout, matmul precision, torch.compile, bf16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from training_cases import assert_same_state, build_module, train

from normexp.batching.sizes import Sizes
from normexp.errors import UserError
from normexp.models.convnet import ConvNet
from normexp.training import step
from normexp.training.devices import set_matmul_precision


def test_channels_last_changes_memory_and_no_result(tmp_path: Path):
    last, first = build_module(), build_module()
    last.replicas.make_channels_last()
    weight = last.replicas.trees[0].conv2.weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()
    for index, module in enumerate((last, first)):
        train(module, tmp_path / f"{index}.ckpt")
    assert last.replicas.trees[0].conv2.weight is weight  # the optimizer's parameter
    assert_same_state(last, first, 1e-12)


@pytest.mark.parametrize("stacked", [False, True], ids=["in_turn", "stacked"])
def test_bf16_trains_float32_parameters_to_nearly_the_same_loss(tmp_path: Path, stacked: bool):
    modules = {
        precision: train(
            build_module(seeds=(0, 1), stacked=stacked, sizes=Sizes(8, 4, 2)),
            tmp_path / f"{precision}.ckpt",
            precision=precision,
        )
        for precision in ("bf16-mixed", "32-true")
    }
    mixed, full = modules.values()
    assert {p.dtype for p in mixed.replicas.parameters()} == {torch.float32}
    assert mixed.metrics["val/loss"] == pytest.approx(full.metrics["val/loss"], rel=0.05)
    assert mixed.metrics["val/loss"] != full.metrics["val/loss"]


@pytest.fixture
def matmul_settings():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.usefixtures("matmul_settings")
def test_matmul_precision_is_set_for_a_gpu_and_left_alone_on_a_cpu():
    before = torch.get_float32_matmul_precision()
    set_matmul_precision("medium", "cpu")
    assert torch.get_float32_matmul_precision() == before
    for precision, tf32 in (("high", True), ("highest", False)):
        set_matmul_precision(precision, "cuda")
        assert torch.get_float32_matmul_precision() == precision
        assert torch.backends.cudnn.allow_tf32 is tf32


def test_network_that_cannot_be_compiled_is_refused_with_the_reason(tmp_path: Path, monkeypatch):
    def failing(*_, **__):
        raise RuntimeError("no compiler here\nand a long story")

    monkeypatch.setattr(step.torch, "compile", lambda *_, **__: failing)
    with pytest.raises(
        UserError, match=r"^compile=true: .*\(no compiler here\); try compile=false"
    ):
        train(build_module(compile=True), tmp_path / "a.ckpt")


def test_too_little_memory_is_no_fault_of_the_compiler(tmp_path: Path, monkeypatch):
    def failing(*_, **__):
        raise torch.OutOfMemoryError("2 GiB")

    monkeypatch.setattr(step.torch, "compile", lambda *_, **__: failing)
    with pytest.raises(torch.OutOfMemoryError):
        train(build_module(compile=True), tmp_path / "a.ckpt")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_each_network_of_a_process_is_compiled(tmp_path: Path, monkeypatch):
    compiled = []

    def backend(graph, inputs):
        del inputs
        compiled.append(graph)
        return graph.forward

    compile_ = torch.compile
    monkeypatch.setattr(step.torch, "compile", lambda run, **_: compile_(run, backend=backend))
    for index in range(10):  # torch gives up on a function that it compiled 8 times
        before = len(compiled)
        width = 4 + index
        module = build_module(
            model=lambda norm, width=width: ConvNet(norm, (1, 8, 8), 4, width=width), compile=True
        )
        train(module, tmp_path / f"{index}.ckpt")
        assert len(compiled) > before, index


@pytest.mark.slow
@pytest.mark.parametrize("stacked", [False, True], ids=["in_turn", "stacked"])
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_compiled_training_equals_the_plain_one(tmp_path: Path, stacked: bool):
    options = {"seeds": (0, 1), "stacked": stacked}
    a = train(build_module(compile=True, **options), tmp_path / "a.ckpt")
    b = train(build_module(**options), tmp_path / "b.ckpt")
    assert_same_state(a, b, 1e-9)
    assert a.metrics["test/loss"] == pytest.approx(b.metrics["test/loss"], abs=1e-9)
