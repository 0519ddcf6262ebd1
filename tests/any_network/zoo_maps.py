"""Small networks over images and volumes, after what people publish."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from zoo_case import LEFT_ALONE, REFUSED, UNKNOWN, UNTRIED, Case, as_lists, normal

C = 6
Norm = Callable[[int], nn.Module]


class Block(nn.Sequential):
    """Convolution, norm, ReLU."""

    def __init__(self, inputs: int, outputs: int, norm: Norm = nn.BatchNorm2d) -> None:
        conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        super().__init__(conv, norm(outputs), nn.ReLU(inplace=True))


class Classifier(nn.Module):
    """Two blocks and the mean over positions."""

    def __init__(self, norm: Norm = nn.BatchNorm2d) -> None:
        super().__init__()
        self.body = nn.Sequential(Block(3, C, norm), Block(C, C, norm))
        self.head = nn.Linear(C, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


class UNet(nn.Module):
    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.down = Block(3, C, norm)
        self.bottom = Block(C, 2 * C, norm)
        self.up = nn.ConvTranspose2d(2 * C, C, 2, stride=2)
        self.joined = Block(2 * C, C, norm)
        self.head = nn.Conv2d(C, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        deep = self.up(self.bottom(functional.max_pool2d(skip, 2)))
        return self.head(self.joined(torch.cat([skip, deep], 1)))


class Pyramid(nn.Module):
    """One head, with its norm, over the maps of every scale; outputs by name."""

    def __init__(self, norm: Norm = nn.BatchNorm2d) -> None:
        super().__init__()
        self.body = Block(3, C, nn.Identity)
        self.head = Block(C, C, norm)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        fine = self.body(x)
        return {"fine": self.head(fine), "coarse": self.head(functional.avg_pool2d(fine, 2))}


class Proposals(nn.Module):
    """Normalizes the features of all boxes of all images as rows of one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, C, 3, padding=1)
        self.head = nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C), nn.ReLU(), nn.Linear(C, 4))

    def forward(self, images: list[Tensor], boxes: list[Tensor]) -> list[Tensor]:
        features = [self.body(image[None])[0] for image in images]
        pooled = []
        for maps, corners in zip(features, boxes, strict=True):
            pooled += [maps[:, y : y + 4, x : x + 4].mean((1, 2)) for y, x in corners.tolist()]
        rows = self.head(torch.stack(pooled))
        return list(rows.split([len(corners) for corners in boxes]))


class EmptyCascade(nn.Module):
    """Its second stage sees the boxes that the first one keeps: here none."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Block(3, C)
        self.second = nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        pooled = self.body(x).mean((2, 3))
        kept = pooled[pooled.mean(1) > 1e3]  # (0, C)
        return pooled, self.second(kept)


class FrozenBatchNorm(nn.Module):
    """Fixed moments, gain and shift, as in detectors."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        for name, value in (("weight", 1.0), ("bias", 0.0), ("mean", 0.3), ("var", 2.0)):
            self.register_buffer(name, torch.full((num_features,), value))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.var + 1e-5).rsqrt()
        shift = self.bias - self.mean * scale
        return x * scale[:, None, None] + shift[:, None, None]


class Volumes(nn.Sequential):
    def __init__(self) -> None:
        conv, again = nn.Conv3d(1, C, 3, padding=1), nn.Conv3d(C, 2, 1)
        super().__init__(conv, nn.BatchNorm3d(C), nn.LeakyReLU(), again)


class Video(nn.Module):
    """(T, N, C, H, W): the frames of all clips as one batch of images."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Block(3, C)

    def forward(self, x: Tensor) -> Tensor:
        frames = self.body(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return frames.mean((0, 3, 4))[None]  # (1, N, C)


class ConditionalBatchNorm(nn.Module):
    """Gain and shift by class around a batch norm without them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(C, affine=False)
        self.gain, self.shift = nn.Embedding(3, C), nn.Embedding(3, C)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        gain, shift = self.gain(labels), self.shift(labels)
        return self.norm(x) * (1 + gain[..., None, None]) + shift[..., None, None]


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(5, C * 16)
        self.norm = ConditionalBatchNorm()
        self.end = nn.Conv2d(C, 3, 3, padding=1)

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        x = self.start(noise).unflatten(1, (C, 4, 4))
        return self.end(self.norm(x, labels).relu()).tanh()


class Discriminator(nn.Module):
    """Spectral norm, whose vectors move in each forward, and the deviation over a batch."""

    def __init__(self, sees_batch: bool) -> None:
        super().__init__()
        conv = nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, C, 3, stride=2))
        self.body = nn.Sequential(conv, nn.BatchNorm2d(C), nn.LeakyReLU(0.2))
        self.sees_batch = sees_batch
        self.head = nn.utils.parametrizations.spectral_norm(nn.Linear(C, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).mean((2, 3))
        if self.sees_batch:
            x = x + x.var(0, unbiased=False).add(1e-8).sqrt().mean()
        return self.head(x)


class AdaGroupNorm(nn.Module):
    """Gain and shift of a group norm from the embedding of a diffusion's time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.projection = nn.GroupNorm(2, C), nn.Linear(4, 2 * C)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        gain, shift = self.projection(embedding)[..., None, None].chunk(2, 1)
        return self.norm(x) * (1 + gain) + shift


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start, self.end = nn.Conv2d(3, C, 3, padding=1), nn.Conv2d(C, 3, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(1, 4), nn.SiLU())
        self.norm, self.last_norm = AdaGroupNorm(), nn.GroupNorm(2, C)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = self.norm(self.start(x), self.time(time)).relu()
        return self.end(self.last_norm(x))


class FusedFilm(nn.Module):
    """A batch norm in one class with its condition, moments and averages its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.condition = nn.Conv2d(3, C, 3), nn.Linear(2, 2 * C)
        self.plain = nn.BatchNorm2d(3)
        self.film = FilmBatchNorm()

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return self.film(self.conv(self.plain(x)), self.condition(condition)).mean((2, 3))


class FilmBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(C))
        self.register_buffer("running_var", torch.ones(C))

    def forward(self, x: Tensor, film: Tensor) -> Tensor:
        gain, shift = film[..., None, None].chunk(2, 1)
        mean, var = self.running_mean, self.running_var
        normed = functional.batch_norm(x, mean, var, training=self.training)
        return normed * (1 + gain) + shift


class Momentum(nn.Module):
    """A network beside an averaged copy of itself, which nothing trains."""

    def __init__(self) -> None:
        super().__init__()
        self.online = Classifier()
        self.averaged = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            for mean, value in zip(
                self.averaged.parameters(), self.online.parameters(), strict=True
            ):
                mean.lerp_(value, 0.1)
            target = self.averaged(x)
        return self.online(x), target


class Contrastive(nn.Module):
    """Scores of each sample against all others of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Classifier()

    def forward(self, x: Tensor) -> Tensor:
        z = functional.normalize(self.encoder(x))
        return (z @ z.T).logsumexp(1)


class TwoViews(nn.Module):
    """One encoder, called once for each view; the projector sees both as one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Classifier()
        self.projector = nn.Sequential(nn.Linear(3, C), nn.BatchNorm1d(C))

    def forward(self, one: Tensor, two: Tensor) -> tuple[Tensor, ...]:
        both = torch.cat([self.encoder(one), self.encoder(two)])
        return self.projector(both).chunk(2)


class Checkpointed(Classifier):
    """Runs its body again in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        hidden: Any = checkpoint(self.body, x, use_reentrant=False)
        return self.head(hidden.mean((2, 3)))


class DropPath(Classifier):
    """Skips a block for some samples, drawn anew in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.body[0](x)
        kept = torch.rand(len(x), 1, 1, 1, device=x.device) < 0.5 if self.training else 0.5
        return self.head((x + self.body[1](x) * kept).mean((2, 3)))


class FrozenShift(nn.Sequential):
    """The neck of a network for retrieval: its shift stays 0."""

    def __init__(self) -> None:
        neck = nn.BatchNorm1d(3)
        neck.bias.requires_grad_(False)
        super().__init__(Classifier(), neck, nn.Dropout(0.3), nn.Linear(3, 2, bias=False))


class Positions(nn.Module):
    """Divides by the deviation over positions with n - 1, as torch.std does."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))

    def forward(self, x: Tensor) -> Tensor:
        mean, std = x.mean((2, 3), keepdim=True), x.std((2, 3), keepdim=True)
        return (x - mean) / (std + 1e-5) * self.weight[:, None, None] + self.bias[:, None, None]


class ChannelsFirstLayerNorm(nn.LayerNorm):
    """Over the channels of maps, by way of channels last."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Unbatched(nn.Module):
    """Its norm gets one (C, H, W) after another."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, C, 3), nn.InstanceNorm2d(C, affine=True)

    def forward(self, images: list[Tensor]) -> list[Tensor]:
        return [self.norm(self.conv(image)) for image in images]


class Inversion(Classifier):
    """Adds how far its features lie from the averages, to each sample's output."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        conv, norm = self.body[0][0], self.body[0][1]
        features = conv(x)
        offset = features.mean((2, 3)) - norm.running_mean.clone()
        distance = (offset / (norm.running_var.clone() + 1e-5).sqrt()).square().sum(1)
        return {"scores": super().forward(x), "distance": distance}


class WithTable(nn.Module):
    """An image and a row of a table, each with norms of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.image = Classifier()
        self.table = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, C), nn.BatchNorm1d(C))
        self.head = nn.Linear(C + 3, 2)

    def forward(self, image: Tensor, table: Tensor) -> Tensor:
        return self.head(torch.cat([self.image(image), self.table(table).relu()], 1))


def averages_off_later() -> nn.Module:
    network = Classifier()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats = False
    return network


def boxes() -> tuple[Tensor, Tensor]:
    num = int(torch.randint(4, ()))
    return torch.randn(3, 8, 8), torch.randint(4, (num + 1, 2))


IMAGE = normal(3, 8, 8)
group = partial(nn.GroupNorm, 2)
instance = partial(nn.InstanceNorm2d, affine=True)
cumulative = partial(nn.BatchNorm2d, momentum=None)
MAPS = [
    Case("U-Net, batch norm", lambda: UNet(nn.BatchNorm2d), IMAGE),
    Case("U-Net, instance norm", lambda: UNet(instance), IMAGE, own="instance"),
    Case("U-Net, group norm", lambda: UNet(group), IMAGE, own="group", knobs={"num_groups": 2}),
    Case("pyramid, one norm for all scales", Pyramid, IMAGE),
    Case("pyramid, deviation with n - 1", lambda: Pyramid(Positions), IMAGE, REFUSED, "instance"),
    Case("proposals of varying number", Proposals, boxes, REFUSED, collate=as_lists),
    Case("cascade without a proposal", EmptyCascade, IMAGE, own=None),
    Case("frozen batch norm", lambda: Classifier(FrozenBatchNorm), IMAGE, REFUSED, None),
    Case("volumes", Volumes, normal(1, 4, 5, 6)),
    Case("video, (T, N, C, H, W)", Video, normal(3, 3, 8, 8), REFUSED, axis=1),
    Case("conditional GAN", Generator, lambda: (torch.randn(5), torch.randint(3, ()))),
    Case("discriminator, spectral norm", lambda: Discriminator(False), IMAGE),
    Case("discriminator, deviation of the batch", lambda: Discriminator(True), IMAGE, UNTRIED),
    Case(
        "diffusion, AdaGN",
        Denoiser,
        lambda: (torch.randn(3, 8, 8), torch.rand(1)),
        own="group",
        knobs={"num_groups": 2},
    ),
    Case("FiLM", FusedFilm, lambda: (torch.randn(3, 8, 8), torch.randn(2)), LEFT_ALONE),
    Case("averaged copy of itself", Momentum, IMAGE),
    Case("contrastive", Contrastive, IMAGE, UNTRIED),
    Case("two views", TwoViews, lambda: (*IMAGE(), *IMAGE()), REFUSED),
    Case("gradient checkpointing", Checkpointed, IMAGE),
    Case("drop path", DropPath, IMAGE, UNTRIED),
    Case("SyncBatchNorm in one process", lambda: Classifier(nn.SyncBatchNorm), IMAGE),
    Case("momentum=None", lambda: Classifier(cumulative), IMAGE),
    Case("averages switched off later", averages_off_later, IMAGE, REFUSED),
    Case("frozen shift, dropout", FrozenShift, IMAGE),
    Case("layer norm of maps", lambda: Classifier(ChannelsFirstLayerNorm), IMAGE, own="layer2d"),
    Case("instance norm of (C, H, W)", Unbatched, IMAGE, UNKNOWN, "instance", collate=as_lists),
    Case("reads running_mean", Inversion, IMAGE),
    Case("image and table", WithTable, lambda: (*IMAGE(), torch.randn(4))),
]
