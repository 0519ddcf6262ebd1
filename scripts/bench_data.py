"""The data pipeline with crop and flip, against torchvision's transforms in worker processes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from bench_measure import Bench, Row, alternate, ratio
from torch.utils.data import DataLoader, Dataset

from normexp.data.augment import Augmentation
from normexp.data.batches import TrainingBatches
from normexp.data.dataset import Data, Examples

BATCH_SIZE = 128
MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)


def pipeline(bench: Bench) -> Iterator[Row]:
    num_images = 4096 if bench.quick else 12800
    images = torch.randint(0, 256, (num_images, 3, 32, 32), dtype=torch.uint8)
    targets = torch.randint(0, 10, (num_images,))
    epochs = iter(range(10**6))
    batches = TrainingBatches(_data(images, targets), [0], BATCH_SIZE, drop_last=True)
    loader = _torchvision_loader(images, targets)

    def ours() -> float:
        started, first = time.perf_counter(), next(epochs) * batches.steps_per_epoch
        for step in range(first, first + batches.steps_per_epoch):
            (batch,) = batches.chunk(step, 1)
            assert batch["inputs"].shape[1:] == (BATCH_SIZE, 3, 32, 32)
        return time.perf_counter() - started

    def theirs() -> float:
        iterator = iter(loader)
        next(iterator)  # the workers are up
        started = time.perf_counter()
        for inputs, _ in iterator:
            assert inputs.shape == (BATCH_SIZE, 3, 32, 32)
        return (time.perf_counter() - started) * len(loader) / (len(loader) - 1)

    times = alternate({"ours": ours, "theirs": theirs}, bench.rounds(7))
    rates = {name: num_images / sorted(t)[len(t) // 2] for name, t in times.items()}
    note = ", ".join(f"{name} {rate / 1000:.3g}k images/s" for name, rate in rates.items())
    what = "data with crop and flip, batch 128"
    gain = ratio(times, "theirs", "ours")
    yield Row(what, "torchvision, 2 workers", gain, 6, ">=", note=note)


def _data(images: torch.Tensor, targets: torch.Tensor) -> Data:
    split = Examples(images, targets)
    return Data(
        name="noise",
        task="classification",
        train=split,
        val=split,
        test=split,
        num_outputs=10,
        input_shape=(3, 32, 32),
        mean=MEAN,
        std=STD,
        augmentation=Augmentation(crop_padding=4, flip=True, cutout=0),
        digest="0" * 16,
    )


class Pictures(Dataset):
    """Images in memory, handed out as torchvision's CIFAR10 does: one PIL picture at a time."""

    def __init__(self, images: torch.Tensor, targets: torch.Tensor, transform) -> None:
        self.arrays = images.permute(0, 2, 3, 1).contiguous().numpy()
        self.targets = targets.tolist()
        self.transform = transform

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int):
        from PIL import Image

        return self.transform(Image.fromarray(self.arrays[index])), self.targets[index]


def _torchvision_loader(images: torch.Tensor, targets: torch.Tensor) -> DataLoader:
    from torchvision import transforms

    transform = transforms.Compose(
        [
            transforms.RandomCrop(32, padding=4),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    return DataLoader(
        Pictures(images, targets, transform),
        BATCH_SIZE,
        shuffle=True,
        drop_last=True,
        num_workers=2,
        persistent_workers=True,
    )


MEASUREMENTS = {"data": pipeline}
