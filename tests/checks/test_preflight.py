"""What a network is refused for, warned of or marked with before it trains."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import broken_norms as broken
import pytest
import torch
from checks_cases import (
    VOCAB,
    WIDTH,
    FlatNet,
    Hidden,
    PositionMean,
    convnet,
    encoder,
    gpt,
    image_data,
    padded_data,
    shipped,
    text_data,
)
from torch import Tensor, nn

from normexp.batching.sizes import Sizes
from normexp.build import NetworkBuilder
from normexp.cells.cell import Cell, prepare_cell
from normexp.checks.integrity import cannot_stack, check_optimizer
from normexp.checks.preflight import (
    Traits,
    examine,
    padded_batch,
    smallest_group,
)
from normexp.checks.sites import enter_sites, measure_reaches, open_network, probe_batch
from normexp.config.compose import compose_cell
from normexp.config.target import Target
from normexp.data.dataset import Data
from normexp.errors import UserError
from normexp.norms.batch import BatchNorm
from normexp.norms.factory import NormFactory
from normexp.norms.group import GroupNorm, InstanceNorm, LayerNorm, LayerNorm2d
from normexp.norms.per_position import BatchNormPerPosition
from normexp.norms.pointwise import NoNorm
from normexp.norms.site import View
from normexp.norms.slots import Slots
from normexp.records.result import read_result
from normexp.train import main
from normexp.training.optim import parameter_groups

EXTREME_RENORM = [
    *("norm=batch_renorm", "norm.warmup=0", "norm.r_ramp_end=0", "norm.d_ramp_end=0"),
    *("norm.r_max=1000", "norm.d_max=1000"),
]


def traits_of(network: nn.Module, data: Data, *, allow_leak: bool = False) -> Traits:
    return examine(network, data, Sizes(8), drop_last=True, allow_leak=allow_leak)


def prepared(*words: str) -> Cell:
    return prepare_cell(*compose_cell(list(words)))


class Sequences(nn.Module):
    """A norm of (N, C, T) by a function of it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


# ---------------------------------------------------------------- other samples


def test_batch_norm_on_images():
    traits = traits_of(convnet(NormFactory(BatchNorm)), image_data())
    assert traits.mixes_samples and not traits.mixes_samples_in_evaluation
    assert not traits.leaks_future and not traits.leaks_future_in_training
    assert traits.pools and traits.stacking_obstacle is None and not traits.draws_for_itself
    assert traits.elements_per_sample == 8 * 64 + 16 * 16 + 16 * 16


def test_no_norm_pools_and_mixes_nothing():
    traits = traits_of(convnet(NormFactory(NoNorm)), image_data())
    assert not traits.pools and not traits.mixes_samples


def test_renorm_with_outputs_of_running_averages_mixes_samples_by_its_gradient():
    cells = [prepared(*EXTREME_RENORM, f"norm_batch_size={size}") for size in (2, 8)]
    assert cells[0].traits.mixes_samples and cells[0].id != cells[1].id


def test_norm_behind_a_gate_that_starts_at_zero_mixes_samples():
    traits = traits_of(Hidden(NormFactory(BatchNorm)), text_data())
    assert traits.mixes_samples and traits.leaks_future_in_training and not traits.leaks_future


def test_mixing_outside_of_sites_is_found():
    class Centred(FlatNet):
        def forward(self, inputs: Tensor) -> Tensor:
            out = super().forward(inputs)
            return out - out.mean(0, keepdim=True)

    traits = traits_of(Centred(NormFactory(LayerNorm)), image_data())
    assert traits.mixes_samples and traits.mixes_samples_in_evaluation


@pytest.mark.parametrize("distance", [1, 2, 4, 7, 8, 15, 16, 31])
def test_neighbour_at_any_distance_below_the_batch_is_found(distance: int):
    norm = NormFactory(lambda _: broken.ReadsFurther(0, distance))
    for network in (FlatNet(norm), convnet(norm)):
        traits = examine(network, image_data(), Sizes(32), drop_last=True)
        assert traits.mixes_samples and traits.mixes_samples_in_evaluation


def test_sites_are_probed_with_the_whole_micro_batch():
    """Also where a network is too large to run on as many samples."""
    norm = NormFactory(lambda _: broken.ReadsFurther(0, 50))
    assert examine(convnet(norm), image_data(64), Sizes(64), drop_last=True).mixes_samples


def test_neighbour_outside_of_sites_is_found():
    class Rolled(FlatNet):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(broken.ReadsFurther(0, 9)(inputs))

    traits = examine(Rolled(NormFactory(NoNorm)), image_data(), Sizes(32), drop_last=True)
    assert traits.mixes_samples


@pytest.mark.parametrize("part", [slice(None, 4), slice(-4, None), slice(None, None, 2)], ids=str)
def test_statistics_of_a_part_of_the_batch_mix_samples(part: slice):
    norm = NormFactory(lambda _: Sequences(lambda x: x - x[part].mean(0, keepdim=True)))
    assert examine(FlatNet(norm), image_data(), Sizes(16), drop_last=True).mixes_samples


# ---------------------------------------------------------------- wiring


class Ignores(nn.Module):
    """Takes `norm` and builds its own."""

    def __init__(self, norm: NormFactory) -> None:
        super().__init__()
        del norm
        self.hidden, self.norm1 = nn.Linear(64, WIDTH), nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm1(self.hidden(inputs.flatten(1)))))


class Drops(Ignores):
    """Builds a site and drops what it returns."""

    def __init__(self, norm: NormFactory) -> None:
        super().__init__(norm)
        self.norm2 = norm(WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        self.norm2(self.hidden(inputs.flatten(1)))
        return super().forward(inputs)


class Both(Ignores):
    """Uses a site beside a norm of its own, and has one that is never entered."""

    def __init__(self, norm: NormFactory) -> None:
        super().__init__(norm)
        self.norm2, self.norm3 = norm(64), norm(64)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(self.norm2(inputs.flatten(1)))


@pytest.mark.parametrize(("network", "message"), [(Ignores, "no norm site"), (Drops, "at norm2")])
def test_network_in_which_the_norm_changes_nothing_is_refused(network, message: str):
    with pytest.raises(UserError, match=f"{message}.*has no effect"):
        traits_of(network(NormFactory(LayerNorm)), image_data())


def test_norms_outside_of_sites_and_idle_sites_are_noted(caplog: pytest.LogCaptureFixture):
    traits_of(Both(NormFactory(LayerNorm)), image_data())
    assert "norm3 has no effect" in caplog.text
    assert "norm1 (BatchNorm1d)" in caplog.text


def test_modules_that_sites_share_are_noted_and_seeds_do_not_share_them(
    caplog: pytest.LogCaptureFixture,
):
    shared = LayerNorm(WIDTH)

    def make(norm: NormFactory) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, WIDTH), norm(WIDTH), norm(WIDTH))

    build = NetworkBuilder(Target("model", "make", partial(make, NormFactory(lambda _: shared))))
    first, second = build(0), build(1)
    traits_of(nn.Sequential(first, nn.Linear(WIDTH, 3)), image_data())
    assert "0.2, 0.3 are one module" in caplog.text
    pointers = [{id(p) for p in network.parameters()} for network in (first, second)]
    assert not pointers[0] & pointers[1] and len(pointers[0]) == 4


# ---------------------------------------------------------------- state that is not saved


@pytest.mark.parametrize("norm", broken.UNSAVED, ids=lambda norm: norm.__name__)
def test_state_that_checkpoints_lack_is_refused_before_training(norm: type[nn.Module]):
    with pytest.raises(UserError, match="norm at norm1 keeps .*register_buffer"):
        traits_of(FlatNet(NormFactory(norm)), image_data())


def test_state_of_the_process_is_told_from_attributes():
    for norm, words in (
        (broken.CountsInClass, "outside of the module"),
        (broken.Counter, "its state_dict lacks: steps"),
        (broken.LateCounter, "a counter that its state_dict lacks: steps"),
        (broken.LateCounterInList, "a counter that its state_dict lacks: steps"),
        (broken.LateCounterTensor, "a counter that its state_dict lacks: steps"),
        (broken.Unsaved, "its state_dict lacks: mean"),
        (broken.LastMean, "its state_dict lacks: mean"),
    ):
        with pytest.raises(UserError, match=words):
            traits_of(FlatNet(NormFactory(norm)), image_data())


def test_state_outside_of_norms_is_refused():
    class Model(FlatNet):
        steps = 0

        def forward(self, inputs: Tensor) -> Tensor:
            self.steps += self.training
            return super().forward(inputs) * (1 + self.steps)

    with pytest.raises(UserError, match="the model keeps .*: steps"):
        traits_of(Model(NormFactory(LayerNorm)), image_data())


@pytest.mark.parametrize("norm", [broken.KeepsItsMean, broken.NoisyTraining, BatchNorm])
def test_what_moves_no_result_is_no_state(norm: type[nn.Module]):
    traits = traits_of(FlatNet(NormFactory(norm)), image_data())
    assert traits.draws_for_itself == (norm is broken.NoisyTraining)


# ---------------------------------------------------------------- values per statistic


def group_norm(num_features: int) -> nn.Module:
    return GroupNorm(num_features, num_groups=4)


def counts_of(network: nn.Module, data: Data, group_size: int) -> dict[str, int]:
    reaches = measure_reaches(enter_sites(open_network(network), probe_batch(data, 4)))
    return {name: reach.num_values(group_size) for name, reach in reaches.items()}


# The sites of the small convnet see 8 channels at 64 positions, 16 at 16, 16 at 16.
@pytest.mark.parametrize(
    ("make", "per_sample", "group_size"),
    [
        (BatchNorm, (64, 16, 16), 3),
        (BatchNorm, (64, 16, 16), 128),
        (lambda n: nn.BatchNorm2d(n), (64, 16, 16), 128),
        (InstanceNorm, (64, 16, 16), None),
        (LayerNorm, (8 * 64, 16 * 16, 16 * 16), None),
        (LayerNorm2d, (8, 16, 16), None),
        (group_norm, (2 * 64, 4 * 16, 4 * 16), None),
    ],
)
def test_count_on_maps_is_of_the_formula(make, per_sample, group_size: int | None):
    """`group_size` None: the samples that share a batch do not count."""
    counts = counts_of(convnet(NormFactory(make)), image_data(), group_size or 32)
    assert list(counts.values()) == [count * (group_size or 1) for count in per_sample]


def test_count_over_tokens_is_of_the_view():
    def counts(norm: NormFactory, size: int) -> set[int]:
        return set(counts_of(encoder(norm), padded_data(), size).values())

    assert counts(NormFactory(group_norm), 8) == {16 // 4}
    assert counts(NormFactory(group_norm, view="sequence"), 8) == {16 // 4 * 8}
    assert counts(NormFactory(BatchNorm), 32) == {32 * 8}


@pytest.mark.parametrize(
    "make",
    [lambda n: nn.GroupNorm(n, n), lambda _: Sequences(lambda x: x * (x * x + 1e-5).rsqrt())],
)
def test_statistic_over_one_value_is_refused_with_its_site(make):
    with pytest.raises(UserError, match="1 value at norm1"):
        traits_of(FlatNet(NormFactory(make)), image_data())


def test_norm_without_a_statistic_or_with_a_silent_weight_has_enough_values():
    def silent(num_features: int) -> nn.Module:
        norm = BatchNorm(num_features)
        nn.init.zeros_(norm.weight)  # pyright: ignore[reportArgumentType]
        return norm

    assert counts_of(FlatNet(NormFactory(silent)), image_data(), 32) == {"norm1": 32}
    tanh = NormFactory(lambda _: Sequences(lambda x: torch.tanh(5 * x)))
    assert counts_of(FlatNet(tanh), image_data(), 32) == {}


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_norm_that_returns_nan_is_said_to(value: float):
    norm = NormFactory(lambda _: Sequences(lambda x: x * value))
    with pytest.raises(UserError, match="norm1: .*NaN"):
        traits_of(FlatNet(norm), image_data())


def test_few_values_are_warned_of_by_number_and_site(caplog: pytest.LogCaptureFixture):
    examine(FlatNet(NormFactory(BatchNorm)), image_data(), Sizes(8, None, 2), drop_last=True)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "2 values" in record.getMessage() and "norm1" in record.getMessage()


@pytest.mark.parametrize(
    ("sizes", "num_samples", "drop_last", "smallest"),
    [
        (Sizes(32), 100, True, 32),
        (Sizes(32, 16, 4), 100, True, 4),
        (Sizes(32), 96, False, 32),
        (Sizes(32), 97, False, 1),
        (Sizes(32, 8, 4), 96 + 13, False, 1),  # parts of 8 and 5, the latter in groups of 4 and 1
        (Sizes(32, 8, 4), 96 + 8, False, 4),
        (Sizes(32, None, 8), 96 + 6, False, 6),
    ],
    ids=str,
)
def test_smallest_group_counts_a_ragged_last_batch(sizes, num_samples, drop_last, smallest):
    assert smallest_group(sizes, num_samples, drop_last=drop_last) == smallest


def test_ragged_last_batch_of_one_sample_is_refused():
    network = FlatNet(NormFactory(BatchNorm))
    assert examine(network, image_data(33), Sizes(8), drop_last=True).mixes_samples
    with pytest.raises(UserError, match="norm1.*batch_size"):
        examine(network, image_data(33), Sizes(8), drop_last=False)


class Streaming(nn.Module):
    sequential_state = True

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


@pytest.mark.parametrize(
    ("sizes", "key"),
    [(Sizes(8, 4), "micro_batch_size=4"), (Sizes(8, None, 2), "norm_batch_size=2")],
)
def test_sequential_state_is_refused_where_a_step_is_split(sizes: Sizes, key: str):
    network = FlatNet(NormFactory(lambda _: Streaming()))
    assert not examine(network, image_data(), Sizes(8), drop_last=True).mixes_samples
    with pytest.raises(UserError, match=f"{key} .* norm1 "):
        examine(network, image_data(), sizes, drop_last=True)


# ---------------------------------------------------------------- later positions


@pytest.mark.parametrize(
    ("name", "view", "remedy"),
    [
        ("instance", "sequence", "norm=causal_instance"),
        ("group", "sequence", "norm=causal_group or norm.view=token"),
        ("layer", "sequence", "norm=causal_group or norm.view=token"),
    ],
)
def test_leak_names_its_sites_and_a_remedy_that_fits(name: str, view: View, remedy: str):
    network = gpt(shipped(name, text_data(), view))
    with pytest.raises(UserError, match=f"{remedy}, or allow_leak=true"):
        traits_of(network, text_data())
    leak = traits_of(network, text_data(), allow_leak=True).leak
    assert leak == "blocks.0.attn_norm, blocks.0.mlp_norm, final_norm"


class Windows(nn.Module):
    """Halves of each image are rows of their own where the norm stands."""

    def __init__(self, norm: NormFactory) -> None:
        super().__init__()
        self.norm = norm(1)
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        halves = images[:, 0].unflatten(1, (2, -1)).flatten(0, 1)  # (2 N, H / 2, W)
        return self.head(self.norm(halves[:, None]).reshape(len(images), -1))


def test_rows_that_are_no_samples_are_not_cut_into_sub_batches():
    network = Windows(NormFactory(BatchNorm))
    with pytest.raises(UserError, match="norm_batch_size=4: norm get 8 rows for 4 samples"):
        examine(network, image_data(), Sizes(8, None, 4), drop_last=True)
    assert traits_of(network, image_data()).mixes_samples


def silent_group(num_features: int) -> nn.Module:
    norm = nn.GroupNorm(4, num_features)
    nn.init.zeros_(norm.weight)
    return norm


LEAKING = {
    "batch statistics in evaluation": NormFactory(
        lambda n: BatchNorm(n, track_running_stats=False)
    ),
    "silent weight": NormFactory(silent_group, view="sequence"),
    **{
        name: NormFactory(lambda _, function=function: Sequences(function), view="sequence")
        for name, function in {
            "last": lambda x: x - x[..., -1:],
            "next": lambda x: x - 0.1 * torch.cat([x[..., 1:], x[..., -1:]], -1),
            "far": lambda x: torch.cat([x[..., :1] - 0.1 * x[..., -1:], x[..., 1:]], -1),
            "first reads second": lambda x: torch.cat([x[..., :1] + x[..., 1:2], x[..., 1:]], -1),
        }.items()
    },
}


@pytest.mark.parametrize("name", LEAKING)
def test_every_way_to_the_future_is_found(name: str):
    assert traits_of(gpt(LEAKING[name]), text_data(), allow_leak=True).leak is not None


def test_leak_behind_a_gate_that_starts_at_zero_is_found():
    network = Hidden(NormFactory(lambda _: PositionMean(), view="sequence"))
    assert traits_of(network, text_data(), allow_leak=True).leak == "norm"
    with pytest.raises(UserError, match="norm=causal_instance, or allow_leak"):
        traits_of(network, text_data())


class Unmasked(nn.Module):
    """A language model whose positions add their mean on a branch; its norm reads nothing."""

    def __init__(self, norm: NormFactory) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.norm = norm.tokens(WIDTH)
        self.residual = norm.residual()
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.norm(self.embedding(inputs))
        return self.head(x + self.residual(x.mean(dim=1, keepdim=True)))


@pytest.mark.parametrize("start", [None, 0.0], ids=["plain", "branch_from_zero"])
def test_leak_of_the_model_is_not_blamed_on_its_norm(start: float | None):
    network = Unmasked(NormFactory(NoNorm, slots=Slots(residual_scale=start)))
    leak = traits_of(network, text_data(), allow_leak=True).leak
    assert leak == "the model outside its norms"


def test_leak_in_training_alone_is_noted(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        traits = traits_of(gpt(NormFactory(BatchNorm)), text_data())
    assert traits.leaks_future_in_training and not traits.leaks_future
    assert "train/loss" in caplog.text and "blocks.0.attn_norm" in caplog.text


def test_numbers_of_a_leak_that_is_allowed_are_marked_invalid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["norm=instance", "data=manual", "allow_leak=true", f"runs_dir={tmp_path}"]
    small = ["model.depth=1", "model.width=16", "steps=2", "replicas=1", "data.block_size=8"]
    assert main([*words, *small]) == 0
    assert "INVALID" in capsys.readouterr().out
    (path,) = tmp_path.rglob("result.json")
    result = read_result(path)
    assert result is not None and result.invalid is not None
    assert "blocks.0.attn_norm, blocks.0.mlp_norm, final_norm" in result.invalid
    assert result.config["leaks_future"] is True


# ---------------------------------------------------------------- padding


class CarelessState(BatchNorm):
    """Normalizes real positions as it should, and keeps a running mean of all positions."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # (N, C)
        out = super().forward(x, mask)
        if self.training:
            assert self.running_mean is not None
            with torch.no_grad():
                self.running_mean.copy_(x.mean(dim=0))
        return out


class CarelessAtOneLength(nn.Module):
    """Reads nothing, but for a mean of all that it has seen; takes 8 positions only."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # (N, C, T)
        if x.shape[2] != 8:
            raise ValueError("takes 8 positions")
        if self.training:
            self.seen.copy_(x.detach().mean())
        return torch.tanh(x) if mask is None else torch.tanh(x) * mask[:, None]


class OneLength(nn.Module):
    """An encoder that takes strings of 8 only."""

    def __init__(self, norm: NormFactory) -> None:
        super().__init__()
        self.encoder = encoder(norm)

    def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
        return self.encoder(inputs.view(-1, 8), mask.view(-1, 8))


class WholeMean(nn.Module):
    """A classifier of strings that averages over padding too."""

    def __init__(self, norm: NormFactory) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.norm = norm.tokens(WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
        x = self.norm(self.embedding(inputs), mask)
        return self.head((x + self.embedding(inputs)).mean(dim=1))


def whole_position(num_features: int) -> nn.Module:
    return BatchNormPerPosition(num_features, num_positions=8)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (
            lambda: encoder(NormFactory(lambda _: PositionMean(), view="sequence")),
            "norm reads padding at blocks.0.attn_norm, blocks.0.mlp_norm, final_norm",
        ),
        (lambda: encoder(NormFactory(CarelessState)), "norm reads padding"),
        (
            lambda: OneLength(NormFactory(lambda _: CarelessAtOneLength(), view="sequence")),
            "norm reads padding",
        ),
        (lambda: WholeMean(NormFactory(LayerNorm)), "model reads padding"),
        (
            lambda: encoder(NormFactory(lambda n: nn.BatchNorm1d(n), view="sequence")),
            "blocks.0.attn_norm.*norm.view=token",
        ),
    ],
    ids=["norm", "state", "state at one length", "model", "no mask"],
)
def test_reader_of_padding_is_refused(network: Callable[[], nn.Module], message: str):
    with pytest.raises(UserError, match=message):
        traits_of(network(), padded_data())


@pytest.mark.parametrize(
    "network",
    [
        lambda: encoder(NormFactory(lambda n: nn.BatchNorm1d(n))),
        lambda: encoder(NormFactory(lambda n: nn.GroupNorm(4, n), view="sequence")),
        lambda: OneLength(NormFactory(whole_position, view="sequence")),
        lambda: encoder(NormFactory(BatchNorm), dropout=0.5),
    ],
    ids=["tokens without mask", "samples without mask", "one length", "dropout"],
)
def test_sound_network_reads_no_padding(network: Callable[[], nn.Module]):
    assert not traits_of(network(), padded_data()).leaks_future  # not refused


def test_batch_to_probe_has_padding_in_every_sample():
    batch = padded_batch(padded_data((8, 8, 3, 5, 8)), 4)
    assert batch is not None
    assert batch["mask"].sum(dim=1).tolist() == [3, 3, 3, 3]  # the shorter half
    assert padded_batch(padded_data((8, 8)), 4) is None
    assert padded_batch(text_data(), 4) is None


# ---------------------------------------------------------------- gradients, stacking, failures


class Forgetful(LayerNorm):
    """A layer norm that has one parameter too many, and cuts another off."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.unused = nn.Parameter(torch.ones(num_features))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        del mask
        assert self.weight is not None and self.bias is not None
        return torch.layer_norm(x, x.shape[1:]) * self.weight.detach() + self.bias


def test_optimizer_must_hold_every_parameter():
    for network in (convnet(NormFactory(LayerNorm)), gpt(NormFactory(LayerNorm))):
        groups = parameter_groups(network, weight_decay=0.1, decay_norm=False)
        check_optimizer(network, torch.optim.SGD(groups, lr=0.1))
    network = FlatNet(NormFactory(LayerNorm))
    network.head.bias.requires_grad_(False)
    with pytest.raises(UserError, match="norm1.norm.weight, norm1.norm.bias, head.weight "):
        check_optimizer(network, torch.optim.SGD(network.hidden.parameters(), lr=0.1))


def test_norm_parameter_without_a_gradient_is_warned_of(caplog: pytest.LogCaptureFixture):
    network = FlatNet(NormFactory(Forgetful))
    with caplog.at_level(logging.WARNING):
        traits_of(network, image_data())
    assert "norm1.norm.weight, norm1.norm.unused" in caplog.text
    assert all(parameter.grad is None for parameter in network.parameters())


def test_norm_that_erases_the_input_is_refused():
    """The mean over positions of what is centred over positions is its bias."""

    class MeanOverPositions(nn.Module):
        def __init__(self, norm: NormFactory) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 4, 3)
            self.final_norm = norm(4)
            self.head = nn.Linear(4, 4)

        def forward(self, inputs):
            return self.head(self.final_norm(self.conv(inputs)).mean(dim=(2, 3)))

    with pytest.raises(UserError, match="norm=layer"):
        traits_of(MeanOverPositions(NormFactory(InstanceNorm)), image_data())


def test_head_that_starts_at_zero_does_not_look_as_if_the_input_were_erased():
    network = FlatNet(NormFactory(NoNorm))
    nn.init.zeros_(network.head.weight)
    nn.init.zeros_(network.head.bias)
    assert not traits_of(network, image_data()).mixes_samples


@pytest.mark.parametrize("norm", ["instance", "causal_instance"])
def test_norm_that_needs_positions_is_refused_on_a_model_that_has_none(norm: str):
    with pytest.raises(UserError, match="site norm1: .*positions"):
        prepared(f"norm={norm}", "model=custom", "model._target_=checks_cases.FlatNet")


def test_failure_of_a_norm_in_evaluation_names_its_site():
    class Exploding(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                raise RuntimeError("no statistics\nsecond line")
            return x * torch.ones(())

    with pytest.raises(UserError, match="norm1: no statistics$"):
        traits_of(convnet(NormFactory(lambda _: Exploding())), image_data())


def test_obstacles_to_stacking():
    batch = {"inputs": torch.randn(4, 8), "targets": torch.zeros(4)}
    assert "buffer" in str(cannot_stack(broken.KeepsItsMean(8), batch))
    noisy = traits_of(FlatNet(NormFactory(broken.NoisyTraining)), image_data())
    assert noisy.draws_for_itself and noisy.stacking_obstacle is not None


def test_probes_leave_the_network_and_the_random_state_alone():
    network = gpt(NormFactory(BatchNorm))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    state = torch.get_rng_state()
    traits_of(network, text_data())
    assert torch.equal(state, torch.get_rng_state()) and network.training
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert not any(module._forward_pre_hooks for module in network.modules())
