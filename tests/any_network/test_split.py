"""A split by samples is tried: one pass over two groups gives what a pass over each gives."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from foreign_norms import MAPS, ROWS, TOKENS, C
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import normexp
from normexp.errors import UserError
from normexp.norms.site import named_sites

Show = Callable[[nn.Module, Tensor], Tensor]  # calls a norm with (N, T, C), in some other layout


class Showing(nn.Module):
    def __init__(self, norm: nn.Module, show: Show) -> None:
        super().__init__()
        self.first, self.norm, self.show, self.last = nn.Linear(C, C), norm, show, nn.Linear(C, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.show(self.norm, self.first(x)))


def as_channels(norm: nn.Module, x: Tensor) -> Tensor:
    return norm(x.mT).mT


def as_rows(norm: nn.Module, x: Tensor) -> Tensor:
    return norm(x.flatten(0, 1)).view_as(x)


def as_rows_by_time(norm: nn.Module, x: Tensor) -> Tensor:
    return as_rows(norm, x.transpose(0, 1)).transpose(0, 1)


def time_first(norm: nn.Module, x: Tensor) -> Tensor:
    return norm(x.transpose(0, 1)).transpose(0, 1)


class Ragged(nn.Module):
    """Pools rows of another number in each sample, as graphs and proposals have."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(C)

    def forward(self, x: Tensor) -> Tensor:
        lengths = [1 + int(one) % 3 for one in x[:, 0, 0].abs() * 10]
        rows = torch.cat([one[:length] for one, length in zip(x, lengths, strict=True)])
        return torch.stack([part.mean(0) for part in self.norm(rows).split(lengths)])


@pytest.mark.parametrize("norm", ["batch", "as_built"])
@pytest.mark.parametrize(
    ("old", "show", "said"),
    [
        (nn.BatchNorm1d(C), as_channels, ""),
        (nn.BatchNorm1d(C), as_rows, "(N * T, ...)"),
        (nn.BatchNorm1d(C, track_running_stats=False), as_rows, "(N * T, ...)"),
        (nn.BatchNorm1d(C), as_rows_by_time, "(T * N, ...)"),
        (nn.LayerNorm(C), time_first, "(T, N, ...)"),
    ],
)
def test_a_group_is_of_samples_wherever_they_are(
    norm: str, old: nn.Module, show: Show, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    network = Showing(old, show)
    whole = normexp.replace_norms(network, norm, TOKENS).double()
    split = normexp.replace_norms(network, norm, TOKENS, norm_batch_size=2).double()
    assert said in caplog.text or isinstance(old, nn.LayerNorm) and norm == "as_built"
    x = torch.randn(6, 7, C, dtype=torch.double)  # other numbers than it was tried with
    expected = [copy.deepcopy(whole).train()(part) for part in x.split(2)]
    torch.testing.assert_close(split.train()(x), torch.cat(expected))


@pytest.mark.parametrize("length", [4, 5])
def test_torchs_transformer_has_its_samples_on_the_second_axis(length: int) -> None:
    layer = nn.TransformerEncoderLayer(C, 2, 8, dropout=0.1)
    network = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    x = torch.randn(length, 4, C)
    split = normexp.replace_norms(network, "batch", x, norm_batch_size=2)
    instance = normexp.replace_norms(network, "instance", x)
    for module in (*split.modules(), *instance.modules()):
        if isinstance(module, nn.Dropout | nn.MultiheadAttention):
            module.eval()  # and its dropout off
    other = torch.cat([x[:, :2], torch.randn(length, 2, C)], dim=1)
    for one in (split, instance):
        torch.testing.assert_close(one(x)[:, :2], one(other)[:, :2])


def test_rows_of_unequal_numbers_are_refused_with_the_site() -> None:
    x = TOKENS.clone()
    x[:, 0, 0] = torch.tensor([0.0, 0.1, 0.2, 0.1])
    for norm in ("batch", "as_built"):
        assert normexp.replace_norms(Ragged(), norm, x)
        with pytest.raises(UserError, match="norm at norm has its samples on no axis.*as_built"):
            normexp.replace_norms(Ragged(), norm, x, norm_batch_size=2)


def test_other_numbers_of_rows_later_are_refused_too() -> None:
    class Growing(Showing):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).flatten(0, 1)
            return self.norm(h if len(x) < 6 else h[1:])

    network = Growing(nn.BatchNorm1d(C), as_rows)
    split = normexp.replace_norms(network, "batch", TOKENS, norm_batch_size=2)
    with pytest.raises(UserError, match="29 rows of 6 samples"):
        split(torch.randn(6, 5, C))


class Meeting(Showing):
    """Subtracts the mean of the batch always, in training, in gradients alone; or adds noise."""

    def __init__(self, kind: str) -> None:
        super().__init__(nn.BatchNorm1d(C), as_channels)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.kind == "always" or self.training and self.kind == "in training":
            return out - out.mean(0)
        if self.training and self.kind == "in gradients":
            return out - out.mean(0) + out.mean(0).detach()
        return out + torch.rand(len(x), 1, 1) if self.training and self.kind == "noise" else out


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("always", "untried: samples meet outside of its norms, also in evaluation"),
        ("in training", "untried .*in training mode: there samples meet"),
        ("in gradients", "untried .*in training mode: there samples meet"),
        ("noise", "untried .*in training mode: these draw random numbers"),
    ],
)
def test_what_cannot_be_tried_is_said(kind: str, said: str, caplog: Any) -> None:
    network = normexp.replace_norms(Meeting(kind), "batch", TOKENS, norm_batch_size=2)
    assert [site.norm_batch_size for _, site in named_sites(network)] == [2]
    assert len(caplog.messages) == 2 and re.search(said, caplog.messages[1])


def test_too_few_samples_are_said(caplog: pytest.LogCaptureFixture) -> None:
    network = nn.Sequential(nn.BatchNorm2d(C))
    normexp.replace_norms(network, "batch", MAPS[:3], norm_batch_size=2)
    assert "untried: 3 samples given, it needs 4" in caplog.text


@pytest.mark.parametrize("axis", [0, 1])
def test_too_few_samples_show_where_they_are(axis: int, caplog: pytest.LogCaptureFixture) -> None:
    network = nn.Sequential(nn.GRU(C, C, batch_first=axis == 0), States(), Rows())
    x = torch.randn(5, 5, C).narrow(axis, 0, 3)
    split = normexp.replace_norms(network, "batch", x, norm_batch_size=2).double()
    assert "untried: 3 samples given, it needs 4" in caplog.text and "* " in caplog.text
    x = torch.randn(5, 5, C).narrow(axis, 0, 4).double()
    moved = x.clone()
    moved.narrow(axis, 2, 2).zero_()
    outputs = [split(one).narrow(axis, 0, 2) for one in (x, moved)]
    torch.testing.assert_close(*outputs)


class States(nn.Module):
    def forward(self, output: tuple[Tensor, Tensor]) -> Tensor:
        return output[0]


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(C)

    def forward(self, x: Tensor) -> Tensor:
        return as_rows(self.norm, x)


def test_a_part_called_alone_takes_no_count_of_an_earlier_forward() -> None:
    network = normexp.replace_norms(nn.Sequential(Rows()), "batch", TOKENS, norm_batch_size=2)
    network(torch.randn(6, 5, C))
    with pytest.raises(UserError, match="called alone with 30 rows"):
        network[0](torch.randn(3, 10, C))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_rows_are_split_again_where_a_backward_runs_a_part_again(use_reentrant: bool) -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self[1], self[0](x), use_reentrant=use_reentrant)

    parts = nn.Linear(C, C), Rows()
    x, slopes = torch.randn(6, 5, C, dtype=torch.double), []
    for make in (nn.Sequential, Checkpointed):
        network = normexp.replace_norms(make(*parts), "batch", TOKENS, norm_batch_size=2).double()
        network(x).pow(3).sum().backward()
        slopes.append(network[0].weight.grad)
    torch.testing.assert_close(*slopes)


def test_lists_of_unequal_samples_are_refused_where_their_rows_are_split() -> None:
    class Clouds(Rows):
        def forward(self, x: list[Tensor]) -> list[Tensor]:
            return [*self.norm(torch.cat(x)).split([len(one) for one in x])]

    clouds = [torch.randn(3, C) for _ in range(4)]
    network = normexp.replace_norms(Clouds(), "batch", (clouds,), norm_batch_size=2)
    assert len(network(clouds)) == 4
    with pytest.raises(UserError, match="samples of unequal shapes"):
        network([torch.randn(2, C), torch.randn(4, C)])


@dataclass(frozen=True)
class Batch:
    steps: Tensor
    names: list[str]


class Energy(nn.Module):
    """Takes and returns a dataclass; its second output is a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rows, self.last = nn.Linear(C, C), Rows(), nn.Linear(C, 1)

    def forward(self, batch: Batch) -> Batch:
        steps = batch.steps.clone().requires_grad_()
        energy = self.last(self.rows(self.first(steps)).tanh()).sum()
        return Batch(torch.autograd.grad(energy, steps, create_graph=True)[0], batch.names)


def test_dataclasses_and_gradients_in_a_forward_are_tried(caplog) -> None:
    batch = Batch(TOKENS, ["a", "b", "c", "d"])
    whole = normexp.replace_norms(Energy(), "batch", batch).double()
    split = normexp.replace_norms(Energy(), "batch", batch, norm_batch_size=2).double()
    assert "(N * T, ...)" in caplog.text and "untried" not in caplog.text
    split.load_state_dict(whole.state_dict())
    x = torch.randn(6, 7, C, dtype=torch.double)
    expected = [copy.deepcopy(whole).train()(Batch(part, [])).steps for part in x.split(2)]
    torch.testing.assert_close(split.train()(Batch(x, [])).steps, torch.cat(expected))
    batches = [(batch, TOKENS), (Batch(x.float()[:, :5], batch.names), x.float()[:, :5])]
    result = normexp.diagnose(Energy(), batches, lambda out, _: out.steps.square().mean())
    assert [site.name for site in result.sites] == ["rows.norm"]


class Recurrent(nn.Module):
    """A norm per step of a sequence with time first, and the last state alone."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.norm = nn.Linear(2 * C, C), nn.BatchNorm1d(C)

    def forward(self, x: Tensor, state: Tensor) -> dict[str, Tensor]:
        for now in x:
            state = torch.tanh(self.norm(self.step(torch.cat([now, state], dim=1))))
        return {"state": state, "loss": state.square().mean()}


def test_a_recurrence_with_time_first_splits_its_samples(caplog) -> None:
    x, state = torch.randn(5, 4, C), torch.zeros(4, C)
    inputs = {"x": x, "state": state}
    network = normexp.replace_norms(Recurrent(), "batch", inputs, norm_batch_size=2).double()
    assert len(caplog.messages) == 1 or "untried" in caplog.text
    moved = x.clone()
    moved[:, 2:] = 0
    outputs = [network(one.double(), state.double())["state"][:2] for one in (x, moved)]
    torch.testing.assert_close(*outputs)


def test_a_training_splits_samples_and_not_rows(tmp_path, monkeypatch) -> None:
    (tmp_path / "rows_model.py").write_text(
        "import torch\nfrom torch import nn\n\n\n"
        "class Steps(nn.Module):\n"
        "    def __init__(self, norm, num_classes=10):\n"
        "        super().__init__()\n"
        "        self.first, self.norm = nn.Linear(8, 16), norm(16)\n"
        "        self.last = nn.Linear(16, num_classes)\n\n"
        "    def forward(self, x):\n"
        "        h = self.first(x.flatten(1, 2))\n"
        "        h = self.norm(h.flatten(0, 1)).view_as(h) if self.rows else self.norm(h.mT).mT\n"
        "        return self.last(torch.relu(h).mean(1))\n\n\n"
        "class Rows(Steps):\n    rows = True\n\n\n"
        "class Channels(Steps):\n    rows = False\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    losses = []
    for model in ("Rows", "Channels"):
        words = f"model=rows_model.{model} norm=batch norm_batch_size=2 batch_size=8 steps=6"
        (result,) = normexp.run(f"{words} replicas=1 data.val_fraction=0.1", runs_dir=str(tmp_path))
        losses.append(result.metrics["test/loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_no_sample_and_a_single_one_without_its_axis() -> None:
    network = nn.Sequential(nn.BatchNorm1d(C), nn.ReLU())
    batch = normexp.replace_norms(network, "batch", ROWS)
    assert batch(ROWS[:0]).shape == (0, C)
    for norm in ("layer2d", "rms"):
        other = normexp.replace_norms(nn.Sequential(nn.LayerNorm(C)), norm, ROWS)
        torch.testing.assert_close(other(ROWS[0]), other(ROWS)[0])
        assert other(torch.zeros(3, 0, C)).shape == (3, 0, C)


def test_a_site_is_one_node_of_a_traced_graph() -> None:
    network = nn.Sequential(nn.Conv2d(C, C, 1), nn.BatchNorm2d(C), nn.ReLU())
    for norm in ("as_built", "group1"):
        replaced = normexp.replace_norms(network, norm, MAPS).eval()
        traced = torch.fx.symbolic_trace(replaced)
        torch.testing.assert_close(traced(MAPS), replaced(MAPS))
        assert [node.target for node in traced.graph.nodes if node.op == "call_module"][1] == "1"


def test_averages_of_a_new_batch_norm_are_read_at_its_place() -> None:
    class Reading(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self[0].running_var.mean()  # type: ignore[union-attr]

    network = Reading(nn.BatchNorm2d(C))
    torch.testing.assert_close(
        normexp.replace_norms(network, "batch", MAPS).eval()(MAPS), network.eval()(MAPS)
    )
    with pytest.raises(UserError, match="running_var of a replaced norm is read.*GroupNorm"):
        normexp.replace_norms(network, "group1", MAPS)
