"""Trainings on each device: as on the CPU, in bfloat16, moved, compiled, side by side."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.precision import MixedPrecision
from torch._dynamo.utils import counters
from training_cases import (
    NEEDS_GPU,
    StopAt,
    assert_same_state,
    build_module,
    image_data,
    on_devices,
    resnet20,
    rows_of,
    text_data,
    text_encoder,
    train,
)

from normexp.norms import kernel
from normexp.train import main
from normexp.training.config.sizes import Sizes
from normexp.training.records.result import read_result
from normexp.training.stopping import Interrupted

slow = pytest.mark.slow


def in_each_form(*marks_of_cpu: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """In turn on the CPU is what trainings on a GPU are compared with."""
    forms = [
        pytest.param("cpu", True, id="cpu-stacked", marks=marks_of_cpu),
        pytest.param("cuda", False, id="cuda-in_turn", marks=NEEDS_GPU),
        pytest.param("cuda", True, id="cuda-stacked", marks=NEEDS_GPU),
    ]
    return pytest.mark.parametrize(("device", "stacked"), forms)


TEXT = {"model": partial(text_encoder, dropout=0.2), "data": text_data(40), "lr": 0.01}
CHOICES = {
    "ghost_rates": {"sizes": Sizes(8, 4, 2), "lr_scales": (1.0, 0.25)},
    "resnet20": {"model": resnet20, "lr": 0.01},
    "masks_dropout_clipping": TEXT | {"max_grad_norm": 0.5},
}


@in_each_form(slow)
@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES.keys())
def test_a_training_ends_as_one_in_turn_on_the_cpu(
    tmp_path: Path, device: str, stacked: bool, choices: dict
):
    trained = []
    for where, is_stacked in (("cpu", False), (device, stacked)):
        module = build_module(**choices, seeds=(0, 1), stacked=is_stacked)
        train(module, tmp_path / f"{where}-{is_stacked}.ckpt", accelerator=where)
        trained.append(module.cpu())
    expected, found = trained
    for replica in (0, 1):
        assert_same_state(expected, found, 1e-8, replica=replica)
    assert found.metrics.keys() == expected.metrics.keys()
    assert [row[:3] for row in rows_of(found)] == [row[:3] for row in rows_of(expected)]


@in_each_form()
def test_chunks_change_nothing_and_bfloat16_is_near_float32(
    tmp_path: Path, monkeypatch, device: str, stacked: bool
):
    # Versions of Lightning differ in whether autocast keeps the rounded weights inside a chunk.
    keeps = torch.autocast(device, torch.bfloat16, cache_enabled=True)
    monkeypatch.setattr(MixedPrecision, "autocast_context_manager", lambda _: keeps)
    one, many, full = (
        train(
            build_module(seeds=(0, 1), stacked=stacked, max_chunk=size, sizes=Sizes(8, 4, 2)),
            tmp_path / f"{size}-{precision}.ckpt",
            accelerator=device,
            precision=precision,
        )
        for size, precision in ((1, "bf16-mixed"), (8, "bf16-mixed"), (8, "32-true"))
    )
    for replica in (0, 1):
        assert_same_state(one.cpu(), many.cpu(), 1e-10, replica=replica)
    rel = 0.1 if device == "cuda" else 0.05
    assert one.metrics["val/loss"] == pytest.approx(full.metrics["val/loss"], rel=rel)
    assert one.metrics["val/loss"] != full.metrics["val/loss"]
    assert all(parameter.dtype == torch.float32 for parameter in one.parameters())


@in_each_form(slow)
@pytest.mark.parametrize("choices", [{}, TEXT], ids=["convnet", "encoder"])
def test_a_checkpoint_moves_between_devices(
    tmp_path: Path, device: str, stacked: bool, choices: dict
):
    build_one = partial(build_module, seeds=(0, 1), stacked=stacked, max_chunk=2, **choices)
    whole = train(build_one(), tmp_path / "whole.ckpt", accelerator=device)
    checkpoint = tmp_path / "moved.ckpt"
    for where, stop_at in ((device, 3), ("cpu", 7)):
        stopper = StopAt(stop_at)
        with pytest.raises(Interrupted):
            train(build_one(), checkpoint, [stopper], stop=stopper.request, accelerator=where)
    moved = train(build_one(), checkpoint, accelerator=device)
    for replica in (0, 1):
        assert_same_state(whole.cpu(), moved.cpu(), 1e-9, replica=replica)


@slow
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_compiled_steps_equal_eager_ones_whatever_the_chunks(
    tmp_path: Path, monkeypatch, device: str
):
    data = image_data(4 * 20 + 2 * (device == "cuda"))  # a shorter last batch compiles again
    choices = {"data": data, "sizes": Sizes(4), "drop_last": False, "max_chunk": 8}
    choices |= {"seeds": (0, 1), "stacked": True}
    # A GPU folds the replicas of a stack into the channels whatever the size of an input.
    monkeypatch.setattr(kernel, "FOLD_FROM_ELEMENTS", 0)
    eager = train(build_module(**choices), tmp_path / "eager.ckpt", accelerator=device)
    if device == "cpu":  # where compiling takes a minute
        compile_ = torch.compile
        monkeypatch.setattr(torch, "compile", lambda run, **_: compile_(run, backend="aot_eager"))
    monkeypatch.setattr("normexp.training.module.SECONDS_PER_CHUNK", 1e9)
    counters.clear()
    module = build_module(**choices, compile=True)
    train(module, tmp_path / "compiled.ckpt", accelerator=device)
    assert module.step == (42 if device == "cuda" else 40)
    assert 1 <= counters["stats"]["unique_graphs"] <= (2 if device == "cuda" else 1)
    for replica in (0, 1):
        assert_same_state(eager.cpu(), module.cpu(), 1e-8, replica=replica)


@pytest.mark.parametrize("trainer", [pytest.param("gpu", marks=NEEDS_GPU)])
def test_two_workers_share_a_device(tmp_path: Path, trainer: str):
    words = ["norm=batch,group", "steps=6", "replicas=2", "study=two", f"trainer={trainer}"]
    assert main(["-m", *words, "workers=2", f"runs_dir={tmp_path}"]) == 0
    results = [read_result(path.parent) for path in tmp_path.rglob("result.json")]
    assert len(results) == 4 and all(result.status == "finished" for result in results)


class NotesArithmetic(pl.Callback):
    def on_train_start(self, trainer, pl_module):  # noqa: ARG002
        fused = torch.backends.cuda.flash_sdp_enabled()
        self.seen = torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32, fused


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_GPU)])
def test_a_trainer_of_ones_own_gets_the_arithmetic_of_a_gpu(tmp_path: Path, device: str):
    module, notes = build_module(matmul_precision="highest"), NotesArithmetic()
    module.recipe = on_devices(module.recipe, accelerator=device)
    before = torch.backends.cudnn.deterministic
    options = {"logger": False, "enable_progress_bar": False, "default_root_dir": tmp_path}
    pl.Trainer(accelerator="gpu", devices=1, max_epochs=1, callbacks=[notes], **options).fit(module)
    assert notes.seen == (True, False, False)
    assert torch.backends.cudnn.deterministic == before
