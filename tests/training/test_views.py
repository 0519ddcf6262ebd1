"""Images at other sizes: random crops in training; centres, wholes and tiles in evaluation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from train_cases import prepare, results, train
from training_cases import NUM_CLASSES, build_module, pictures
from training_cases import train as train_module

import normexp
from normexp.errors import UserError
from normexp.evaluate import main as evaluate
from normexp.norms.factory import NormFactory
from normexp.training.batching.replicas import InTurn, Stacked
from normexp.training.criterion import Segmentation, chance_of
from normexp.training.data.augment import IGNORED, Augmentation
from normexp.training.data.batches import TrainingBatches
from normexp.training.data.views import crop_centre, read_view, with_crop
from normexp.training.evaluation import scores_of_tiles
from normexp.training.models.unet import UNet
from normexp.training.records.samples import read_samples
from normexp.verdicts.metric import describe_metric

PLACES = torch.arange(256).clamp(max=254).byte().view(1, 16, 16)  # each pixel is its place


def unet(norm: NormFactory) -> nn.Module:
    return UNet(norm, (1, 8, 8), NUM_CLASSES, depth=1, width=4)


@pytest.mark.parametrize(("padding", "flip"), [(0, False), (2, True)])
def test_training_sees_crops_at_random_places_and_their_masks(padding: int, flip: bool):
    augmentation = Augmentation(crop_padding=padding, flip=flip, cutout=0)
    images = PLACES.expand(200, 1, 16, 16)
    batch = {"inputs": images, "targets": images[:, 0]}
    augmentation.apply_to(batch, augmentation.draw(0, 0, 200), 6)
    padded = nn.functional.pad(PLACES[0], [padding] * 4)
    crops = {}
    for top in range(11 + 2 * padding):
        for left in range(11 + 2 * padding):
            crop = padded[top : top + 6, left : left + 6]
            crops[crop.numpy().tobytes()] = (top, left, False)
            if flip:
                crops[crop.flip(1).numpy().tobytes()] = (top, left, True)
    found = {crops[image[0].numpy().tobytes()] for image in batch["inputs"]}
    assert len(found) > 80 and {top for top, _, _ in found} == {*range(11 + 2 * padding)}
    masks = batch["targets"]
    assert torch.equal(masks.where(masks != IGNORED, 0), batch["inputs"][:, 0])
    assert (masks == IGNORED).any() == (padding > 0)
    assert masks.shape == (200, 6, 6)


def test_networks_see_the_crop_everywhere_but_where_more_is_asked_for(tmp_path: Path):
    whole = pictures(size=16)
    data = with_crop(whole, 8)
    assert data.input_shape == (1, 8, 8) and data.digest == whole.digest
    (batch,) = TrainingBatches(data, [0, 1], 8, drop_last=True).chunk(0, 1)
    assert batch["inputs"].shape == (2, 8, 1, 8, 8) and batch["targets"].shape == (2, 8, 8, 8)
    names = ["8", "whole", "12", "tiles8", "tiles8stride8"]
    views = [read_view(name) for name in names]
    module = build_module(model=unet, data=data, seeds=(0, 1), stacked=True, views=views)
    module = train_module(module, tmp_path / "a.ckpt")
    criterion, metrics = Segmentation(NUM_CLASSES), module.metrics
    for index in range(2):
        network = module.replicas.replica(index).eval()
        for name, side in (("", 8), ("@8", 8), ("@12", 12), ("@whole", 16)):
            batch = data.test.gather(torch.arange(12))
            crop_centre(batch, side)
            scores = network(data.model_inputs(batch["inputs"], torch.float64))
            images = criterion.scores(criterion.measure(scores, batch)["per_sample"])
            assert metrics[f"test/iou{name}"][index] == pytest.approx(images.mean().item())
            kept = module.evaluator.samples[name.strip("@") or "running"][index]
            assert kept.tolist() == pytest.approx(images.tolist())
        batch = data.test.gather(torch.arange(12))
        batch["inputs"] = data.model_inputs(batch["inputs"], torch.float64)
        for name in names[3:]:
            scores = scores_of_tiles(InTurn([network]), batch, read_view(name))[0]
            images = criterion.scores(criterion.measure(scores, batch)["per_sample"])
            assert metrics[f"test/iou@{name}"][index] == pytest.approx(images.mean().item())
    assert {f"val/iou@{name}" for name in names} <= metrics.keys()
    assert chance_of(data)["iou"] != chance_of(whole)["iou"]


@pytest.mark.parametrize(("name", "stride"), [("tiles5stride2", 2), ("tiles5", 2), ("tiles8", 4)])
def test_a_pixel_has_the_mean_probability_of_the_tiles_that_cover_it(name: str, stride: int):
    networks: list[nn.Module] = []
    for _ in range(2):
        networks.append(nn.Conv2d(1, NUM_CLASSES, 3, padding=1).double())
    images, side = torch.randn(3, 1, 8, 10).double(), read_view(name).side
    batch = {"inputs": images, "targets": torch.zeros(3, 8, 10).byte()}
    for replicas in (InTurn(networks), Stacked(networks)):
        found = scores_of_tiles(replicas, batch, read_view(name)).exp()
        for index, network in enumerate(networks):
            total, count = np.zeros((3, NUM_CLASSES, 8, 10)), np.zeros((8, 10))
            for top in sorted({*range(0, 8 - side + 1, stride), 8 - side}):
                for left in sorted({*range(0, 10 - side + 1, stride), 10 - side}):
                    place = (..., slice(top, top + side), slice(left, left + side))
                    total[place] += network(images[place]).softmax(1).detach().numpy()
                    count[place] += 1
            assert count.min() > 0
            np.testing.assert_allclose(found[index].detach(), total / count, atol=1e-12)


def test_an_image_has_the_mean_probability_of_its_tiles():
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([x.mean(dim=(1, 2, 3)), x.amax(dim=(1, 2, 3))], dim=1)

    images = torch.randn(3, 1, 4, 4)
    batch = {"inputs": images, "targets": torch.zeros(3).long()}
    found = scores_of_tiles(InTurn([Mean()]), batch, read_view("tiles2stride2"))[0]
    quarters = [images[:, :, y : y + 2, x : x + 2] for y in (0, 2) for x in (0, 2)]
    expected = torch.stack([Mean()(quarter).softmax(1) for quarter in quarters]).mean(0)
    torch.testing.assert_close(found.exp(), expected)


def test_empty_images_are_those_of_one_class():
    criterion = Segmentation(NUM_CLASSES)
    targets = torch.zeros(3, 2, 2).byte()
    targets[1, 0] = 1
    targets[2, 0, 0] = IGNORED
    predicted = torch.tensor([[[0, 0], [0, 2]], [[2, 2], [2, 2]], [[1, 1], [0, 0]]])
    counts = criterion.count(predicted, targets)[None]
    found = criterion.at_sizes(torch.ones(1), counts)
    assert found["pixel_accuracy_empty"].item() == pytest.approx(5 / 7)
    assert not criterion.at_sizes(torch.ones(1), counts[:, 1:2])
    assert criterion.at_sizes(torch.full((1,), torch.inf), counts)["pixel_accuracy_empty"].isnan()


def test_a_classifier_is_evaluated_at_other_sizes_as_it_trains_and_later(tmp_path: Path, capsys):
    small = ["norm=layer", "model.width=4", "data.crop=6"]
    assert train(tmp_path, *small, "evaluate_at=[6,whole,tiles6]") == 0
    (place, result), _ = results(tmp_path / "runs").items()
    run_dir = tmp_path / "runs" / place.parent
    metrics = result.metrics
    assert metrics["test/accuracy@6"] == metrics["test/accuracy"] != metrics["test/accuracy@whole"]
    assert read_samples(run_dir).keys() == {"running", "6", "whole", "tiles6"}
    assert normexp.load(run_dir).predict(torch.zeros(1, 1, 6, 6)) is not None
    capsys.readouterr()
    later = ["evaluate_at=[whole,tiles6stride6]", "evaluate_with=[running]"]
    assert evaluate([f"run={run_dir.parent}", *later]) == 0
    assert "tiles6stride6" in capsys.readouterr().out
    samples = read_samples(run_dir)
    assert samples.keys() == {"running", "6", "whole", "tiles6", "tiles6stride6"}
    assert samples["whole"].mean() == pytest.approx(metrics["test/accuracy@whole"])


REFUSED = {
    "data.crop=9": r"data.crop=9 is more than the images.*\(8x8\); try 8 or less",
    "+data.crop=4 data=langid": "data.crop=4: data=langid has no images",
    "evaluate_at=[9]": "evaluate_at=9 is more than the images",
    "evaluate_at=[tiles9]": "evaluate_at=tiles9 is more than the images",
    "evaluate_at=[whole] data=manual": "evaluate_at=whole: data=manual has no images",
    "evaluate_at=[6] model=vit": r"evaluate_at=6: the network cannot be shown images of 6x6 \(",
    "evaluate_at=[large]": r"evaluate_at=\[large\]: must be a list of whole, pixels, or tiles",
    "evaluate_at=[tiles4stride5]": "a stride may not exceed the tile, as in tiles4stride4",
    "evaluate_at=[6,6]": "must be a list of different values",
    "evaluate_at=whole": r"type evaluate_at=\[whole\]",
}


@pytest.mark.parametrize("words", REFUSED)
def test_sizes_that_cannot_be_are_refused(words: str):
    with pytest.raises(UserError, match=REFUSED[words]) as refused:
        prepare(*words.split())
    assert str(refused.value).count("\n") == 0


def test_an_image_whose_centre_has_no_class_is_named():
    data = pictures()
    data.test.targets[2, 3:5, 3:5] = IGNORED
    message = "data.crop=2: the 2x2 pixels at the centre of image 2 of test have no class; try"
    with pytest.raises(UserError, match=message):
        with_crop(data, 2)
    assert with_crop(data, 4).crop == 4


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("test/accuracy@48", "test accuracy (%), at 48x48 pixels"),
        ("test/iou@tiles32stride8", "test IoU per image (%), in tiles32stride8"),
        ("val/iou@whole", "val IoU per image (%), whole images"),
        ("test/loss@precise", "test loss (nats), precise statistics"),
    ],
)
def test_reports_name_the_size(name: str, words: str):
    assert describe_metric(name).label == words
