"""Small networks over rows, sequences and graphs, after what people publish."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from zoo_case import LEFT_ALONE, REFUSED, UNKNOWN, Case, as_rows, mean_of_rows, normal

C, T = 6, 5


class TimeDistributed(nn.Module):
    """The steps of all series as rows of one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C), nn.ReLU())
        self.head = nn.Linear(C, 2)

    def forward(self, x: Tensor) -> Tensor:  # (N, T, C)
        return self.head(self.rows(x.reshape(-1, C)).view(x.shape).mean(1))


class TimeFirstBatchNorm(nn.Module):
    """Moments over all steps and series of (T, N, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(C)), nn.Parameter(torch.zeros(C))
        self.register_buffer("running_mean", torch.zeros(C))
        self.register_buffer("running_var", torch.ones(C))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, C)
        moments = self.running_mean, self.running_var
        out = functional.batch_norm(rows, *moments, self.weight, self.bias, self.training)
        return out.view(x.shape)


class TimeFirst(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module] = TimeFirstBatchNorm) -> None:
        super().__init__()
        self.lstm, self.norm, self.head = nn.LSTM(C, C), norm(), nn.Linear(C, 2)

    def forward(self, x: Tensor) -> Tensor:  # (T, N, C)
        return self.head(self.norm(self.lstm(x)[0]))


class WithPadding(nn.Module):
    """Normalizes the real steps alone, as rows."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.norm, self.head = nn.Linear(C, C), nn.BatchNorm1d(C), nn.Linear(C, 2)

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        real = torch.arange(T, device=x.device) < length[:, None]
        x = self.start(x)
        out = torch.zeros_like(x)
        out[real] = self.norm(x[real])
        return self.head(out.sum(1) / length[:, None])


class MaskedNorm(nn.Module):
    """Each utterance over its real frames, per band; its length is a second input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(C)), nn.Parameter(torch.zeros(C))

    def forward(self, x: Tensor, length: Tensor) -> Tensor:  # (N, C, T), (N,)
        real = (torch.arange(x.shape[2], device=x.device) < length[:, None])[:, None].to(x)
        num = real.sum(2, keepdim=True)
        mean = (x * real).sum(2, keepdim=True) / num
        var = ((x - mean).square() * real).sum(2, keepdim=True) / num
        normed = (x - mean) / (var + 1e-5).sqrt() * real
        return normed * self.weight[:, None] + self.bias[:, None]


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = MaskedNorm()
        self.body = nn.Sequential(nn.Conv1d(C, C, 3, padding=1), nn.BatchNorm1d(C), nn.ReLU())

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        return self.body(self.features(x, length)).mean(2)


class Waveform(nn.Sequential):
    """The first layers of a network for speech: group norm with a group per channel."""

    def __init__(self) -> None:
        first, second = nn.Conv1d(1, C, 5, stride=2, bias=False), nn.Conv1d(C, C, 3, stride=2)
        super().__init__(first, nn.GroupNorm(C, C), nn.GELU(), second, nn.GroupNorm(C, C))


class Graphs(nn.Module):
    """Two rounds of messages; the nodes of all graphs lie in one axis."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(C, C) for _ in range(num_layers))
        self.norms = nn.ModuleList(nn.BatchNorm1d(C) for _ in range(num_layers))

    def forward(self, nodes: Tensor, owners: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            messages = mean_of_rows(nodes, owners)[owners]  # every node hears its whole graph
            nodes = norm(layer(nodes + messages)).relu()
        return mean_of_rows(nodes, owners)


class GraphNorm(nn.Module):
    """Subtracts a learnt share of each graph's mean."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(C)), nn.Parameter(torch.zeros(C))
        self.share = nn.Parameter(torch.ones(C))

    def forward(self, nodes: Tensor, owners: Tensor) -> Tensor:
        centered = nodes - self.share * mean_of_rows(nodes, owners)[owners]
        var = mean_of_rows(centered.square(), owners)[owners]
        return self.weight * centered / (var + 1e-5).sqrt() + self.bias


class GraphsWithGraphNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(C, C), GraphNorm()
        self.head = nn.Sequential(nn.BatchNorm1d(C), nn.Linear(C, 2))

    def forward(self, nodes: Tensor, owners: Tensor) -> Tensor:
        nodes = self.norm(self.layer(nodes), owners).relu()
        return self.head(mean_of_rows(nodes, owners))


class Recurrent(nn.Module):
    """A norm in each step: one that all steps share, or one for each."""

    def __init__(self, norms: Callable[[], nn.ModuleList]) -> None:
        super().__init__()
        self.inputs, self.hidden = nn.Linear(C, C), nn.Linear(C, C, bias=False)
        self.norms = norms()

    def forward(self, x: Tensor) -> Tensor:  # (N, T, C)
        state = torch.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            norm = self.norms[step % len(self.norms)]
            state = norm(self.inputs(x[:, step]) + self.hidden(state)).tanh()
        return state


class Points(nn.Module):
    """A cloud of points, with a transform of the points that has norms too."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = nn.Sequential(nn.Conv1d(3, C, 1), nn.BatchNorm1d(C), nn.ReLU())
        self.matrix = nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C), nn.Linear(C, 9))
        self.body = nn.Sequential(nn.Conv1d(3, C, 1), nn.BatchNorm1d(C))

    def forward(self, x: Tensor) -> Tensor:  # (N, 3, P)
        matrix = self.matrix(self.transform(x).amax(2)).view(-1, 3, 3)
        return self.body(matrix @ x).amax(2)


class Critic(nn.Module):
    """A critic of reinforcement learning and its target, which follows slowly."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(C, C), norm(C), nn.ReLU(), nn.Linear(C, 2))
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # (N, F) or (F,)
        return self.online(x), self.target(x)


class Block(nn.Module):
    """Attention and a hidden layer, each behind a norm."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm, first: bool = True) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(C, 2, batch_first=first)
        self.hidden = nn.Sequential(nn.Linear(C, 2 * C), nn.GELU(), nn.Linear(2 * C, C))
        self.norm1, self.norm2 = norm(C), norm(C)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, normed)[0]
        return x + self.hidden(self.norm2(x))


class DiffusionTransformer(Block):
    """AdaLN-zero: gain, shift and gate of each norm from a condition."""

    def __init__(self) -> None:
        super().__init__(partial(nn.LayerNorm, elementwise_affine=False))
        self.modulation = nn.Linear(2, 6 * C)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        parts = self.modulation(condition)[:, None].chunk(6, 2)
        normed = self.norm1(x) * (1 + parts[0]) + parts[1]
        x = x + parts[2] * self.attention(normed, normed, normed)[0]
        return x + parts[5] * self.hidden(self.norm2(x) * (1 + parts[3]) + parts[4])


class LowRank(nn.Linear):
    """A frozen layer and what is trained beside it."""

    def __init__(self, old: nn.Linear) -> None:
        super().__init__(old.in_features, old.out_features)
        self.load_state_dict(old.state_dict())
        self.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, old.in_features))
        self.up = nn.Parameter(torch.randn(old.out_features, 2))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + input @ self.down.T @ self.up.T


class TrainedCopy(nn.Module):
    """Keeps a frozen module, and runs a copy that is trained."""

    def __init__(self, old: nn.Module) -> None:
        super().__init__()
        self.trained = copy.deepcopy(old)
        self.original = old.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.trained(x)


def adapted() -> nn.Module:
    """A block of which LoRA trains a layer and a copy of the second norm."""
    block = Block().requires_grad_(False)
    block.hidden[0] = LowRank(block.hidden[0])
    block.norm2 = TrainedCopy(block.norm2)
    return block


def tied() -> nn.Module:
    block = Block()
    block.norm2.weight = block.norm1.weight
    return block


class Reversible(nn.Module):
    """Normalizes each series, and gives its forecast the old mean and deviation again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(C)), nn.Parameter(torch.zeros(C))

    def forward(self, x: Tensor, mode: str) -> Tensor:
        if mode == "norm":
            self.mean = x.mean(1, keepdim=True).detach()
            self.std = (x.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt().detach()
            return (x - self.mean) / self.std * self.weight + self.bias
        return (x - self.bias) / self.weight * self.std + self.mean


class Forecast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reversible = Reversible()
        self.body = nn.Sequential(nn.Conv1d(C, C, 3, padding=1), nn.BatchNorm1d(C))

    def forward(self, x: Tensor) -> Tensor:  # (N, T, C)
        x = self.reversible(x, "norm")
        return self.reversible(self.body(x.mT).mT, "denorm")


class Experts(nn.Module):
    """Each token goes to one of two experts, which normalize what they get."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C)) for _ in range(2))
        self.experts = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:  # (N, T, C)
        tokens = x.reshape(-1, C)
        chosen = tokens[:, :2].argmax(1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            out[chosen == number] = expert(tokens[chosen == number])
        return out.view(x.shape)


def nodes_of_one() -> tuple[Tensor]:
    return (torch.randn(int(torch.randint(3, 7, ())), C),)


SERIES = normal(T, C)


def padded(shape: tuple[int, int]) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(shape), torch.randint(2, T + 1, ()))


ROWS = [
    Case("rows of all series, (N*T, C)", TimeDistributed, SERIES),
    Case("(T, N, C), T = N", TimeFirst, normal(4, C), axis=1),
    Case("(T, N, C)", TimeFirst, SERIES, axis=1),
    Case("layer norm of (T, N, C)", lambda: Block(first=False), SERIES, own="layer", axis=1),
    Case("real steps alone", WithPadding, padded((T, C)), REFUSED),
    Case("masked speech norm", Speech, padded((C, T)), LEFT_ALONE),
    Case("waveform", Waveform, normal(1, 40), own="group", knobs={"num_groups": C}),
    Case("graphs of one size", Graphs, SERIES, UNKNOWN, collate=as_rows),
    Case("graphs", Graphs, nodes_of_one, REFUSED, collate=as_rows),
    Case("GraphNorm", GraphsWithGraphNorm, nodes_of_one, LEFT_ALONE, collate=as_rows),
    Case(
        "one norm for all steps",
        lambda: Recurrent(lambda: nn.ModuleList([nn.BatchNorm1d(C)])),
        SERIES,
    ),
    Case(
        "a norm for each step",
        lambda: Recurrent(lambda: nn.ModuleList(nn.BatchNorm1d(C) for _ in range(T))),
        SERIES,
    ),
    Case("points", Points, normal(3, 7)),
    Case("critic and target, batch norm", lambda: Critic(nn.BatchNorm1d), normal(C)),
    Case("one observation", lambda: Critic(nn.LayerNorm), normal(C), own="layer", alone=True),
    Case("AdaLN", DiffusionTransformer, lambda: (torch.randn(T, C), torch.randn(2)), own="layer"),
    Case("LoRA", adapted, SERIES, own="layer"),
    Case("tied gains", tied, SERIES, own="layer"),
    Case(
        "LayerNorm(bias=False)",
        lambda: Block(partial(nn.LayerNorm, bias=False)),
        SERIES,
        own="layer",
    ),
    Case("RMS norm", lambda: Block(partial(nn.RMSNorm, eps=1e-6)), SERIES, own="rms"),
    Case("reversible norm of series", Forecast, SERIES, LEFT_ALONE),
    Case("experts", Experts, normal(2 * T, C), REFUSED),
]
