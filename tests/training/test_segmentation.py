"""Segmentation: only real pixels count, in training and in metrics, and they move with images."""

from __future__ import annotations

import dataclasses
import io
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from train_cases import prepare, results, train
from training_cases import NUM_CLASSES, build_module, group_norm, pictures
from training_cases import train as train_module

import normexp
from normexp.errors import UserError
from normexp.norms.factory import NormFactory
from normexp.train import main
from normexp.training.batching.replicas import InTurn, Stacked
from normexp.training.config.sizes import Sizes
from normexp.training.criterion import Classification, Segmentation, chance_of, criterion_of
from normexp.training.data.augment import IGNORED, Augmentation
from normexp.training.data.dataset import Data, Examples, limit_train, validate
from normexp.training.evaluation import suffix_of
from normexp.training.models.unet import UNet
from normexp.training.pictures import class_colours, draw_predictions
from normexp.training.step import StepGradient
from normexp.verdicts.metric import choose_metric, describe_metric
from normexp.verdicts.rows import Row, Status

SMALL = ["data=shapes", "data.num_images=40", "data.num_test=16", "data.size=24", "batch_size=8"]


def unet(norm: NormFactory) -> nn.Module:
    return UNet(norm, (1, 8, 8), NUM_CLASSES, depth=1, width=4)


WEIGHTS = torch.tensor([0.5, 3.0, 0.0], dtype=torch.float64)


def gradients(
    sizes: Sizes, batch: dict[str, Tensor], stacked: bool, weights: Tensor | None = None
) -> list[list[Tensor]]:
    """Of two replicas, by parameter; and their losses."""
    networks = []
    for seed in range(2):
        torch.manual_seed(seed)
        networks.append(unet(NormFactory(group_norm, norm_batch_size=sizes.norm)).double())
    replicas = (Stacked if stacked else InTurn)(networks)
    criterion = Segmentation(NUM_CLASSES, class_weights=weights)
    loss = StepGradient(replicas, criterion, sizes, [0, 1]).add(0, batch)
    named = [[p.grad for p in tree.parameters()] for tree in replicas.trees]
    by_replica = [list(of) for of in zip(*named[0], strict=True)] if stacked else named
    return [[*by_replica[index], loss[index]] for index in range(2)]


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_a_step_is_the_mean_over_its_real_pixels_however_it_is_divided(weights: Tensor | None):
    data = pictures()
    indices = torch.stack([torch.arange(8) * 4, torch.arange(8) * 5])  # other numbers are ignored
    batch = data.train.gather(indices)
    batch["targets"][1, :2] = IGNORED  # a part of two samples has none
    batch["inputs"] = data.model_inputs(batch["inputs"], torch.float64)
    expected = []
    for seed in range(2):
        torch.manual_seed(seed)
        network = unet(NormFactory(group_norm)).double()
        scores = network(batch["inputs"][seed]).movedim(1, -1)
        is_real = batch["targets"][seed] != IGNORED
        classes = batch["targets"][seed][is_real].long()
        loss = nn.functional.cross_entropy(scores[is_real], classes, weight=weights)
        expected.append([*torch.autograd.grad(loss, [*network.parameters()]), loss.detach()])
    for stacked in (False, True):
        for sizes in (Sizes(8), Sizes(8, 2), Sizes(8, None, 2), Sizes(8, 4, 2)):
            for found, of in zip(gradients(sizes, batch, stacked, weights), expected, strict=True):
                for one, two in zip(found, of, strict=True):
                    torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("target", [IGNORED, 2])  # 2 weighs nothing
def test_a_step_without_a_real_pixel_moves_nothing(stacked: bool, target: int):
    data = pictures()
    batch = data.train.gather(torch.arange(16).view(2, 8))
    batch["targets"][1] = target
    batch["inputs"] = data.model_inputs(batch["inputs"], torch.float64)
    (*one, loss), (*none, no_loss) = gradients(Sizes(8, 4), batch, stacked, WEIGHTS)
    assert loss > 0 and any(g.any() for g in one)
    assert no_loss == 0 and not any(g.any() for g in none)


def test_metrics_are_those_of_their_definitions():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5, NUM_CLASSES, 4, 4, generator=generator)
    targets = torch.randint(
        0, 2, (5, 4, 4), generator=generator
    ).byte()  # class 2 is only predicted
    targets[1, :3] = targets[4, 2] = IGNORED
    scores[2, 2] = -9  # and in this image it is not
    criterion = Segmentation(NUM_CLASSES)
    batch = {"targets": targets}
    measured = criterion.measure(scores, batch)
    found = criterion.summarise("test", torch.ones(1), measured["per_sample"][None])

    def iou(predicted: np.ndarray, real: np.ndarray) -> float:
        shares = []
        for index in range(NUM_CLASSES):
            a, b = (predicted == index) & (real != IGNORED), real == index
            if (a | b).any():
                shares.append((a & b).sum() / (a | b).sum())
        return float(np.mean(shares))

    predicted, real = scores.argmax(1).numpy(), targets.numpy()
    of_images = [iou(*pair) for pair in zip(predicted, real, strict=True)]
    assert criterion.scores(measured["per_sample"]).tolist() == pytest.approx(of_images)
    assert found["iou"].item() == pytest.approx(np.mean(of_images))
    assert found["miou"].item() == pytest.approx(iou(predicted, real))
    is_right = (predicted == real)[real != IGNORED]
    assert found["pixel_accuracy"].item() == pytest.approx(is_right.mean())


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_evaluation_is_that_of_the_whole_split(tmp_path: Path, weights: Tensor | None):
    data = pictures()
    criterion = Segmentation(NUM_CLASSES, class_weights=weights)
    module = build_module(model=unet, data=data, seeds=(0, 1), stacked=True, criterion=criterion)
    module = train_module(module, tmp_path / "a.ckpt")
    for index in range(2):
        network = module.replicas.replica(index).eval()
        scores = network(data.model_inputs(data.test.inputs, torch.float64))
        batch = {"targets": data.test.targets}
        targets, options = data.test.targets.long(), {"ignore_index": IGNORED}
        loss = nn.functional.cross_entropy(scores, targets, weight=weights, **options)
        images = criterion.scores(criterion.measure(scores, batch)["per_sample"])
        assert module.metrics["test/loss"][index] == pytest.approx(loss.item())
        assert module.metrics["test/iou"][index] == pytest.approx(images.mean().item())
        assert module.evaluator.samples["running"][index].tolist() == pytest.approx(images.tolist())


def test_classes_weigh_in_the_loss_of_a_classifier():
    data = pictures()
    targets = torch.tensor([[0, 1, 2, 1], [2, 2, 2, 2]])
    scores = torch.randn(2, 4, NUM_CLASSES, dtype=torch.float64)
    criterion = Classification(class_weights=WEIGHTS)
    sums = [criterion.loss(s, {"targets": t}) for s, t in zip(scores, targets, strict=True)]
    expected = nn.functional.cross_entropy(scores[0], targets[0], weight=WEIGHTS)
    totals = criterion.num_targets(targets)
    torch.testing.assert_close(sums[0] / totals[0], expected)
    assert sums[1] == totals[1] == 0
    many = torch.arange(300, dtype=torch.float64)  # class 255 of a classifier is one
    assert Classification(class_weights=many).num_targets(torch.tensor([[255, 299]])) == 554
    assert criterion_of(data, [1, 0, 2]).class_weights.tolist() == [1, 0, 2]


def test_a_mask_moves_with_its_image():
    generator = torch.Generator().manual_seed(0)
    masks = torch.randint(1, 200, (2, 6, 8, 8), generator=generator).byte()
    batch = {"inputs": masks.unsqueeze(2), "targets": masks}
    augmentation = Augmentation(crop_padding=3, flip=True, cutout=3)
    draws = torch.stack([augmentation.draw(seed, 0, 6) for seed in range(2)])
    augmentation.apply_to(batch, draws)
    images, moved = batch["inputs"][:, :, 0], batch["targets"]
    assert not torch.equal(moved, masks)
    is_border, is_cut = moved == IGNORED, (images == 0) & (moved != IGNORED)
    assert torch.equal(images[~is_cut], moved.where(~is_border, 0)[~is_cut])
    for image in range(12):  # a square of 3 pixels, or less of it where it sticks out
        assert is_cut.flatten(0, 1)[image].sum() <= 9
    assert is_border.any() and is_cut.any()


def test_chance_is_the_constant_prediction_of_the_most_frequent_class():
    data = pictures()
    targets = data.test.targets
    frequent = int(targets[targets != IGNORED].bincount().argmax())
    scores = torch.zeros(len(targets), NUM_CLASSES, 8, 8)
    scores[:, frequent] = 1
    criterion = Segmentation(NUM_CLASSES)
    counts = criterion.measure(scores, {"targets": targets})["per_sample"]
    found = chance_of(data)
    assert found["iou"] == pytest.approx(criterion.scores(counts).mean().item())
    assert 0 < found["iou"] < found["pixel_accuracy"] < 1
    assert found["loss"] == pytest.approx(-math.log(found["pixel_accuracy"]))


BAD_DATA: list[tuple[Callable[[Data], None], str]] = [
    (lambda data: data.val.targets[2].fill_(IGNORED), "val.targets of image 2 are all 255"),
    (lambda data: data.train.targets[2, 0, 0].fill_(7), "train.targets has 7.*0 to 2"),
    (lambda data: setattr(data, "order", "sorted"), "data.order=sorted.*a picture has many"),
    (lambda data: setattr(data.test, "targets", data.test.targets.long()), "test.targets is"),
    (lambda data: setattr(data, "num_outputs", 256), "at most 255 classes"),
]


@pytest.mark.parametrize(("spoil", "message"), BAD_DATA)
def test_masks_that_do_not_fit_are_refused(spoil: Callable[[Data], Any], message: str):
    data = pictures()
    validate(data)
    spoil(data)
    with pytest.raises(UserError, match=message):
        validate(data)


def test_training_pictures_are_limited_with_their_masks():
    data = pictures()
    limited = limit_train(data, 5, 0)
    places = {image.numpy().tobytes(): index for index, image in enumerate(data.train.inputs)}
    where = [places[image.numpy().tobytes()] for image in limited.train.inputs]
    assert torch.equal(limited.train.targets, data.train.targets[where])
    assert limited.digest != data.digest
    other = dataclasses.replace(data, train=Examples(data.train.inputs, 0 * data.train.targets))
    assert dataclasses.replace(other, digest="").digest != data.digest


def test_shapes_train_with_every_statistic_and_predict(tmp_path: Path):
    words = ["norm=batch", "micro_batch_size=4", "norm_batch_size=2", "model.depth=1", "steps=3"]
    words += ["evaluate_with=[running,precise,own_share,batch]", "precise_samples=8", "workers=0"]
    assert main([*SMALL, *words, "replicas=2", f"runs_dir={tmp_path}"]) == 0
    of_runs = results(tmp_path)
    assert len(of_runs) == 2
    for place, result in of_runs.items():
        kept = np.load(tmp_path / place.parent / "samples.npz")
        for kind in ("running", "precise", "own_share", "batch2"):
            of_split = result.metrics["test/iou" + suffix_of(kind)]
            assert kept[kind].shape == (16,)
            assert kept[kind].mean() == pytest.approx(of_split, rel=1e-6)
        assert {"val/miou", "test/pixel_accuracy"} <= result.metrics.keys()
        assert result.measured.chance.keys() == {*Segmentation.metrics}
    network = normexp.load(tmp_path / place.parent)
    classes = network.predict(torch.zeros(2, 3, 24, 24))
    assert classes.shape == (2, 24, 24) and classes.max() < 5
    picture = np.array(Image.open(tmp_path / place.parent / "predictions.png"))
    assert picture.shape == (3 * 24 + 2 * 2, 6 * 24 + 5 * 2, 3)
    images, masks, predicted = (picture[top : top + 24, :24] for top in (0, 26, 52))
    inputs = torch.from_numpy(images.copy()).permute(2, 0, 1)[None]
    assert (class_colours()[network.predict(inputs)[0]] == predicted).all()
    data = prepare(*SMALL).data
    assert (images == data.test.tensors[0][0].permute(1, 2, 0).numpy()).all()
    assert (masks == class_colours()[data.test.tensors[1][0]]).all()


@pytest.mark.parametrize(("num_channels", "side"), [(1, 8), (2, 8), (4, 8), (3, 300)])
def test_images_of_any_kind_are_drawn(num_channels: int, side: int):
    images = np.full((2, num_channels, side, side), 7, dtype=np.uint8)
    masks = np.full((2, side, side), IGNORED, dtype=np.uint8)
    content = draw_predictions(images, masks, np.zeros_like(masks))
    picture = np.array(Image.open(io.BytesIO(content)))
    shown = (picture.shape[0] - 2 * 2) // 3
    assert shown == (8 if side == 8 else 100)  # every third pixel of 300
    tops = [picture[row * (shown + 2), 0].tolist() for row in range(3)]
    assert tops == [[7, 7, 7], [255, 255, 255], [0, 0, 0]]


def test_reports_compare_by_image_and_count_chance():
    images = np.array([0.9, 0.5, 0.7, 0.3], dtype=np.float32)
    chance = {"chance.iou": 0.3, "chance.miou": 0.2, "chance.loss": 0.7}
    metrics = {"test/iou": 0.6, "test/miou": 0.5, "test/loss": 0.4}

    def row(scale: float, status: Status = Status.FINISHED) -> Row:
        own = {**metrics, "test/iou": scale * 0.6}
        load = partial(dict, running=scale * images)
        return Row("s", "c", 0, status, {}, own, measured=chance, load_samples=load)

    iou, miou, loss = (describe_metric(f"test/{kind}") for kind in ("iou", "miou", "loss"))
    good, poor, diverged = row(1.0), row(0.4), row(1.0, Status.DIVERGED)
    assert good.samples(iou) == pytest.approx(100 * images, rel=1e-6)
    assert not len(good.samples(miou)) and not len(good.samples(loss))
    assert [good.value(m) for m in (iou, miou, loss)] == pytest.approx([60, 50, 0.4])
    assert not good.is_at_chance and poor.is_at_chance
    for run in (poor, diverged):
        assert [run.value(m) for m in (iou, miou, loss)] == pytest.approx([30, 20, 0.7])
    assert poor.samples(iou).tolist() == pytest.approx([30] * 4)
    assert (iou.unit, iou.tolerance, iou.selection_name) == ("pp", 1.0, "val/iou")
    assert choose_metric(metrics, None, None) == iou


def test_images_are_no_text_whatever_statistics_are_recorded():
    images = np.linspace(0.2, 0.8, 40, dtype=np.float32)
    metrics = {"test/iou@batch2": float(images.mean())}
    measured = {"data_set.task": "segmentation"}
    load = partial(dict, batch2=images)
    run = Row("s", "c", 0, Status.FINISHED, {}, metrics, measured=measured, load_samples=load)
    assert len(run.samples(describe_metric("test/iou@batch2"))) == 40


OWN = """
from torch import nn

class Plain(nn.Module):  # its norms are replaced
    def __init__(self, num_classes, in_channels, as_mapping=True):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(in_channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, num_classes, 1),
        )
        self.as_mapping = as_mapping

    def forward(self, x):
        y = self.layers(x)
        return {"out": y, "aux": y} if self.as_mapping else (y, y)

class Taking(Plain):  # it builds its norms itself
    def __init__(self, norm, input_shape, num_outputs, as_mapping=True):
        super().__init__(num_outputs, input_shape[0], as_mapping)
        self.layers[1] = norm(8)
"""


@pytest.mark.parametrize("name", ["Plain", "Taking"])
def test_a_network_of_ones_own_may_return_a_mapping(tmp_path: Path, name: str, own_module, capsys):
    own_module("own_segmentation", OWN)
    model = f"model=own_segmentation.{name}"
    assert train(tmp_path, model, "norm=layer", *SMALL, "stack=true") == 0
    assert len(results(tmp_path / "runs")) == 2
    capsys.readouterr()
    assert train(tmp_path, model, "+model.as_mapping=false", *SMALL, "study=other") == 2
    assert "returns a tuple" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data=shapes", "class_weights=[1,2]"], r"class_weights=\[1,2\]: .*each of the 5 classes"),
        (["data=digits", f"class_weights={[0] * 10}"], "one above 0"),
        (["class_weights=5"], r"must be a list, and \[5\] must have at least 2 items$"),
        (["data=manual", "class_weights=[1,2]"], "tokens are no classes; drop it"),
        (["data=shapes", "model=convnet"], r"needs \(2, 5, 48, 48\): try model=unet"),
        (["data=digits", "model=unet"], r"needs \(2, 10\): try model=convnet"),
        (["data=shapes", "model=text_encoder"], "TextEncoder does not fit data=shapes"),
        (["data=shapes", "data.size=28"], "model.depth=3.*28x28.*model.depth=2"),
        (["data=shapes", "data.size=16"], "data.size=16 is too small.*24"),
        (["data=shapes", "data.order=sorted"], "data.order"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, words: list[str], message: str, capsys):
    few = [] if words[0] != "data=shapes" else ["data.num_images=40", "data.num_test=16"]
    assert train(tmp_path, *words, *few) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") <= 2
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_network_of_torchvision_segments(tmp_path: Path):
    words = ["model=torchvision", "model.name=lraspp_mobilenet_v3_large", "norm=group"]
    assert train(tmp_path, *words, *SMALL, "norm.groups_policy=nearest") == 0
