"""Devices, signal handlers, and speed-ups that do not change results."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from training_cases import CPU, assert_same_state, build_module, image_data, train

from normexp.batching.sizes import Sizes
from normexp.errors import UserError
from normexp.models.convnet import ConvNet
from normexp.training import devices
from normexp.training.chunks import ChunkLoader
from normexp.training.devices import gpu_arithmetic, trainer_options
from normexp.training.stopping import StopRequest


@pytest.mark.parametrize(("has_cuda", "taken"), [(True, "cuda"), (False, "cpu")])
def test_auto_takes_cuda_or_the_cpu_and_nothing_else(monkeypatch, has_cuda: bool, taken: str):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    for accelerator, expected in (("auto", taken), ("gpu", "cuda")):
        options = trainer_options(replace(CPU, accelerator=accelerator), StopRequest())
        assert options["accelerator"] == expected


class NotesHandlers(pl.Callback):
    """Records the SIGTERM handler within each stage."""

    def __init__(self) -> None:
        self.handlers: set[object] = set()

    def note(self, *_: object) -> None:
        self.handlers.add(signal.getsignal(signal.SIGTERM))

    on_train_batch_start = on_validation_batch_start = on_test_batch_start = note


class StopsEarly(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, *args):  # noqa: ARG002
        trainer.should_stop = pl_module.step >= 7


def test_training_that_a_callback_ends_early_is_no_result(tmp_path: Path):
    with pytest.raises(UserError, match="after 7 of 10 steps"):
        train(build_module(max_chunk=1), tmp_path / "a.ckpt", [StopsEarly()])


def test_our_request_answers_signals_in_every_stage(tmp_path: Path):
    notes, stop, before = NotesHandlers(), StopRequest(), signal.getsignal(signal.SIGTERM)
    with stop.listening():
        ours = signal.getsignal(signal.SIGTERM)
    train(build_module(), tmp_path / "a.ckpt", [notes], stop=stop)
    assert notes.handlers == {ours}
    assert signal.getsignal(signal.SIGTERM) == before


def test_waiting_processes_keep_our_signal_handlers(monkeypatch):
    met = []
    monkeypatch.setattr(DDPStrategy, "barrier", lambda _, name: met.append(name))
    stop = StopRequest()
    strategy = trainer_options(replace(CPU, per_node=2, strategy="ddp"), stop)["strategy"]
    with stop.listening():
        ours = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as Lightning replaces it
        strategy.barrier("run-stage")
        assert signal.getsignal(signal.SIGTERM) == ours
    assert met == ["run-stage"]


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


def test_bf16_trains_float32_parameters_to_nearly_the_same_loss(tmp_path: Path):
    """In turn; of a stack, see test_gpu_trainings.py."""
    modules = {
        precision: train(
            build_module(seeds=(0, 1), sizes=Sizes(8, 4, 2)),
            tmp_path / f"{precision}.ckpt",
            precision=precision,
        )
        for precision in ("bf16-mixed", "32-true")
    }
    mixed, full = modules.values()
    assert {p.dtype for p in mixed.replicas.parameters()} == {torch.float32}
    assert mixed.metrics["val/loss"] == pytest.approx(full.metrics["val/loss"], rel=0.05)
    assert mixed.metrics["val/loss"] != full.metrics["val/loss"]


def test_arithmetic_is_set_for_a_gpu_inside_the_block_and_left_alone_on_a_cpu():
    cudnn = torch.backends.cudnn

    def settings() -> tuple[str, bool, bool]:
        return torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.deterministic

    before = settings()
    with gpu_arithmetic(replace(CPU, matmul_precision="medium")):
        assert settings() == before
    for precision, tf32 in (("high", True), ("highest", False)):
        with gpu_arithmetic(replace(CPU, accelerator="cuda", matmul_precision=precision)):
            assert settings() == (precision, tf32, True)
        assert settings() == before


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            RuntimeError("no compiler here\nand a long story"),
            pytest.raises(UserError, match=r"^compile=true: .*\(no compiler here\); try compile="),
        ),
        (torch.OutOfMemoryError("2 GiB"), pytest.raises(MemoryError, match="try fewer replicas")),
    ],
    ids=["no_compiler", "no_memory"],
)
def test_network_that_cannot_be_compiled_is_refused(tmp_path: Path, monkeypatch, error, expected):
    def failing(*_, **__):
        raise error

    monkeypatch.setattr(devices.torch, "compile", lambda *_, **__: failing)
    with expected:
        train(build_module(compile=True), tmp_path / "a.ckpt")


def test_an_error_of_the_compiled_backward_is_refused_too(tmp_path: Path, monkeypatch):
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # noqa: ARG004
            return x.clone()

        @staticmethod
        def backward(ctx, grad):  # noqa: ARG004
            raise RuntimeError("no kernel for the backward")

    def compile_(measure, **_):
        return lambda *given: Failing.apply(measure(*given))

    monkeypatch.setattr(devices.torch, "compile", compile_)
    with pytest.raises(UserError, match=r"compile=true: .*no kernel for the backward"):
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
    monkeypatch.setattr(devices.torch, "compile", lambda run, **_: compile_(run, backend=backend))
    for index in range(10):  # torch gives up on a function that it compiled 8 times
        before = len(compiled)
        width = 4 + index
        module = build_module(
            model=lambda norm, width=width: ConvNet(norm, (1, 8, 8), 4, width=width), compile=True
        )
        train(module, tmp_path / f"{index}.ckpt")
        assert len(compiled) > before, index


@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_a_step_is_compiled_once_whatever_the_chunks(tmp_path: Path, monkeypatch):
    """Of one replica; of a stack, see test_gpu_trainings.py."""
    graphs = []

    def backend(graph, inputs):
        del inputs
        graphs.append(graph)
        return graph.forward

    compile_ = torch.compile
    monkeypatch.setattr(devices.torch, "compile", lambda run, **_: compile_(run, backend=backend))
    monkeypatch.setattr(ChunkLoader, "target_seconds", 1e9)  # 1, 2, 4, 8 and 5 steps
    module = build_module(
        data=image_data(4 * 20 + 2),
        sizes=Sizes(4),
        drop_last=False,
        max_chunk=8,
        compile=True,
    )
    train(module, tmp_path / "a.ckpt")
    assert module.step == 42
    assert 1 <= len(graphs) <= 2  # one for the shorter last batch of an epoch
