"""Networks broken on purpose, and healthy ones, of which a diagnosis says nothing."""

from __future__ import annotations

import copy
import json
import random
from functools import cache, partial

import diagnosis_cases as cases
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diagnosis_cases import batches, examine, kinds, network, norms_of, trained
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset
from torchvision.ops import FrozenBatchNorm2d

from normexp.diagnosis import Diagnosis, cancelling, diagnose
from normexp.errors import UserError
from normexp.norms.batch import BatchNorm
from normexp.norms.running import RunningMomentsNorm
from normexp.norms.site import Site


def frozen():
    model = trained()
    for norm in norms_of(model):
        norm.eval()
        norm.requires_grad_(False)
    return model.eval()


def frozen_modules():
    model = trained()
    for index in (1, 4, 7):
        fixed = FrozenBatchNorm2d(model[index].num_features)
        fixed.load_state_dict(model[index].state_dict(), strict=False)
        model[index] = fixed
    return model


HEALTHY = {
    "batch": trained,
    "group": partial(trained, "group"),
    "none": partial(trained, "none"),
    "frozen": frozen,
    "frozen modules": frozen_modules,
}


@cache
def of_batch_norm() -> Diagnosis:
    """The diagnosis of the trained network as it is."""
    return examine(trained())


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found_in_a_healthy_network(name: str):
    diagnosis = examine(HEALTHY[name]())
    assert not diagnosis.findings
    assert abs(diagnosis.gap.value) < 0.05


def with_state(**changes):
    """A fault of a network: each norm's attributes or buffers are replaced."""

    def broken():
        model = trained()
        for norm in norms_of(model):
            for name, change in changes.items():
                value = getattr(norm, name)
                setattr(norm, name, change(value))
        return model

    return broken


def left_out():
    model = network()
    names = ("running_mean", "running_var", "num_batches_tracked")
    state = {k: v for k, v in trained().state_dict().items() if not k.endswith(names)}
    model.load_state_dict(state, strict=False)
    return model


def young():
    model = trained()
    for norm in norms_of(model):
        norm.reset_running_stats()
        norm.momentum = 1e-4
    model.train()
    for inputs, _ in batches()[:50]:
        model(inputs)
    return model


def never_in_training_mode():
    torch.manual_seed(0)
    return network()


class Stubborn(nn.BatchNorm2d):
    def train(self, mode: bool = True):
        del mode
        return super().train(True)


def stubborn():
    model = trained()
    model[4].__class__ = Stubborn
    return model


class Checkpointed(nn.Module):
    def __init__(self, model: nn.Module, *, use_reentrant: bool) -> None:
        super().__init__()
        self.model, self.use_reentrant = model, use_reentrant

    def forward(self, x):
        if not self.training:
            return self.model(x)
        x = x.detach().requires_grad_()  # the reentrant form needs a gradient
        return checkpoint(self.model, x, use_reentrant=self.use_reentrant)


def widened():
    model = trained()
    with torch.no_grad():
        model[7].running_mean[:4], model[7].running_var[:4] = 0, 1
    return model


def dead():
    model = trained()
    with torch.no_grad():
        model[3].weight[:8] = 0
        model[4].running_mean[:8], model[4].running_var[:8] = 0, 0
    return model


def tiny_inputs():
    model = trained()
    with torch.no_grad():
        model[0].weight *= 1e-4
        model[1].running_mean *= 1e-4
        model[1].running_var *= 1e-8
    return model


class DropoutForEver(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.2)


def random_for_ever():
    model = trained()
    model[6] = DropoutForEver()
    return model


class Functional(nn.Module):
    def forward(self, x):
        return F.batch_norm(x, None, None, training=True)


def functional():
    model = trained()
    model[7] = Functional()
    return model


def without_averages():
    model = network(partial(nn.BatchNorm2d, track_running_stats=False))
    model.load_state_dict(trained().state_dict(), strict=False)
    return model


def poisoned():
    model = trained().train()
    inputs, _ = batches()[0]
    model(inputs.index_fill(0, torch.tensor([0]), torch.nan))
    return model


class Faint(nn.Module):
    def forward(self, x):
        return x / 5


def wrong_eps():
    torch.manual_seed(0)

    def faint_norm(width: int):
        return nn.Sequential(Faint(), nn.BatchNorm2d(width, eps=1e-2))

    return with_eps(cases.train(network(faint_norm)), 1e-5)


def with_eps(model, eps):
    for norm in norms_of(model):
        norm.eps = eps
    return model


def last_batch_alone():
    model = trained()
    for norm in norms_of(model):
        norm.momentum = 1.0
    model.train()
    for inputs, _ in batches(4, seed=5)[:50]:
        model(inputs)
    return model


class Scaled(nn.Module):
    def forward(self, x):
        return x if self.training else x / 10


def other_in_evaluation():
    model = trained()
    return nn.Sequential(model, Scaled())


BROKEN = {
    "stale_averages": with_state(running_mean=lambda v: v + 1),
    "noisy_averages": last_batch_alone,
    "not_loaded": left_out,
    "never_updated": never_in_training_mode,
    "initial_values": young,
    "left_in_training": stubborn,
    "updated_twice": lambda: Checkpointed(trained(), use_reentrant=False),
    "channels_never_updated": widened,
    "dead_channels": dead,
    "large_eps": tiny_inputs,
    "eps": wrong_eps,
    "rest": other_in_evaluation,
    "random_in_evaluation": random_for_ever,
    "mixes_in_evaluation": functional,
    "without_averages": without_averages,
    "not_finite": poisoned,
}
# What else may be told of a network broken in this way.
ALSO = {
    "dead_channels": {"stale_averages"},
    "large_eps": {"stale_averages", "eps"},
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_network_broken_on_purpose_is_told(kind: str):
    more = {"batches": batches(4), "max_batches": 32} if kind == "noisy_averages" else {}
    diagnosis = examine(BROKEN[kind](), **more)
    assert kind in kinds(diagnosis) <= {kind} | ALSO.get(kind, set()), str(diagnosis)
    (finding,) = [finding for finding in diagnosis.findings if finding.kind == kind]
    assert finding.cause and finding.remedy and finding.cause in " ".join(str(diagnosis).split())


def unset_frozen_modules():
    model = frozen_modules()
    for index in (1, 4, 7):
        model[index].running_mean.zero_()
        model[index].running_var.fill_(1)
    return model


def test_fixed_statistics_that_nobody_has_set_are_told():
    assert kinds(examine(unset_frozen_modules())) == {"frozen_at_defaults"}


def test_reentrant_checkpointing_is_told():
    assert kinds(examine(Checkpointed(trained(), use_reentrant=True))) == {"updated_twice"}


def test_averages_in_half_precision_are_told():
    pairs = [(x.bfloat16(), y) for x, y in batches()]
    assert kinds(examine(trained().bfloat16(), batches=pairs)) == {"half_precision"}


def test_a_part_in_training_mode_is_told_of_a_model_in_evaluation_mode():
    model = trained().eval()
    model[4].train()
    assert kinds(examine(model)) == {"left_in_training"}


def test_sorted_batches_are_told():
    assert kinds(examine(trained(), batches=batches(sort=True), max_batches=32)) == {"composition"}


def test_other_inputs_are_told_from_other_weights():
    pixels = [((x + 0.8) / 2.7, y) for x, y in batches()]
    (inputs,) = examine(trained(), batches=pixels).findings
    (weights,) = examine(with_state(running_mean=lambda v: v + 1)()).findings
    assert "Probably these inputs are preprocessed otherwise" in inputs.cause
    assert "Either the weights moved faster" in weights.cause


def test_few_initial_values_do_not_explain_what_stale_averages_cost():
    model = with_state(running_mean=lambda v: v + 1)()
    for norm in norms_of(model):
        norm.num_batches_tracked.fill_(40)  # 0.9 ** 40 is 1.5 %
    assert kinds(examine(model)) == {"stale_averages"}


@pytest.mark.parametrize("factor", [0.01, 100])
def test_wrong_variances_are_not_taken_for_another_eps(factor: float):
    assert kinds(examine(with_state(running_var=lambda v: v * factor)())) == {"stale_averages"}


def test_wrong_labels_are_no_finding():
    assert not examine(trained(), batches=[(x, y.flip(0)) for x, y in batches()]).findings


# --- The decomposition, where each term is known ----------------------------------------------


def outside_one(output, _):
    """Above 0 only for values beyond 1 and -1."""
    return (output.abs() - 1).clamp(min=0).square().mean()


def not_of_variance_one(output, _):
    return (output.square().mean() - 1).abs()


def as_target(output, target):
    return (output - target).square().mean()


def normal(*shape: int):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def averaged(model, pairs):
    """Gives every norm the mean of the moments of all batches, as long averaging would."""
    for norm in norms_of(model):
        norm.reset_running_stats()
        norm.momentum = None
    model.train()
    for inputs, _ in pairs:
        model(inputs)
    return model


def test_own_share():
    """With batches of two, training outputs are 1 and -1; with the own share they stay inside."""
    pairs = [(x, x) for x in normal(200, 2, 16)]
    model = averaged(nn.Sequential(nn.BatchNorm1d(16, eps=1e-12)), pairs)
    diagnosis = diagnose(model, pairs, outside_one, max_batches=200)
    # of a standard normal value z, (|z| - 1)^2 beyond 1: 2 (2 (1 - Phi(1)) - phi(1)) = 0.1506
    assert diagnosis.terms["own_share"].value == pytest.approx(0.1506, abs=0.02)
    assert diagnosis.terms["small_batch"].value == pytest.approx(0, abs=1e-6)
    assert kinds(diagnosis) == {"own_share"}


def test_small_batch():
    """Each batch has an offset that its statistics remove and no others can."""
    noise = normal(40, 8, 4, 5)
    offsets = 3 * torch.randn(40, 1, 4, 1, generator=torch.Generator().manual_seed(1))
    norm = nn.BatchNorm1d(4, affine=False)
    pairs = [(x + offset, norm(x).detach()) for x, offset in zip(noise, offsets, strict=True)]
    diagnosis = diagnose(averaged(nn.Sequential(norm), pairs), pairs, as_target, max_batches=40)
    assert {"small_batch", "composition"} <= kinds(diagnosis)


def above_variance_one(output, _):
    return (output.square().mean() - 1).clamp(min=0)


def test_averages_of_small_batches_leave_out_the_variance_between_them():
    """Values differ between samples alone, so a batch of two has half of the variance."""
    pairs = [(x.expand(-1, -1, 16), x) for x in normal(200, 2, 512, 1)]
    model = averaged(nn.Sequential(nn.BatchNorm1d(512)), pairs)
    diagnosis = diagnose(model, pairs, above_variance_one, max_batches=200, tolerance=0.1)
    assert diagnosis.terms["averages"].value == pytest.approx(31 / 16 - 1, abs=0.05)
    assert kinds(diagnosis) == {"biased_averages"}


def test_statistics_behind_dropout():
    """Inputs near 5 have variance 1; behind dropout of a half it is 27."""
    pairs = [(5 + x, x) for x in normal(40, 64, 8)]
    torch.manual_seed(0)
    model = averaged(nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(8)), pairs)
    diagnosis = diagnose(model, pairs, not_of_variance_one, max_batches=40)
    assert diagnosis.terms["dropout_shift"].value == pytest.approx(1 - 1 / 27, abs=0.07)
    assert kinds(diagnosis) == {"dropout_shift"}
    assert "Dropout" in str(diagnosis)


def test_the_terms_add_up_to_the_gap():
    diagnosis = examine(cases.trained("dropout"), batches=batches(4))
    total = sum(term.value for term in diagnosis.terms.values())
    assert total == pytest.approx(diagnosis.gap.value, abs=1e-9)
    assert diagnosis.gap.value == pytest.approx(diagnosis.evaluation - diagnosis.training)


def test_losses_are_those_of_the_two_modes():
    model = trained()
    diagnosis = examine(model, batches=batches()[:3])
    by_mode = []
    for training in (True, False):
        copied = copy.deepcopy(model).train(training)
        losses = [F.cross_entropy(copied(x), y).item() for x, y in batches()[:3]]
        by_mode.append(sum(losses) / 3)
    assert [diagnosis.training, diagnosis.evaluation] == pytest.approx(by_mode)


# --- Kinds of norms and batches ----------------------------------------------------------------


def replaced(make):
    """The trained network with its norms rebuilt, and their state kept."""
    model = trained()
    for index in (1, 4, 7):
        norm = make(model[index].num_features)
        target = norm.norm if isinstance(norm, Site) else norm
        target.load_state_dict(model[index].state_dict())
        model[index] = norm.train()
    return model


def timm_norm(width: int):
    from timm.layers.norm_act import BatchNormAct2d

    return BatchNormAct2d(width, apply_act=False)


OTHERS = {
    "sync": nn.SyncBatchNorm,
    "own": partial(BatchNorm, eps=1e-5),
    "site": lambda width: Site(BatchNorm(width, eps=1e-5), "map", 8),
}


@pytest.mark.parametrize("name", [*OTHERS, pytest.param("timm", marks=pytest.mark.slow)])
def test_other_kinds_of_batch_norm_are_analysed_alike(name: str):
    model, expected = replaced((OTHERS | {"timm": timm_norm})[name]), of_batch_norm()
    diagnosis = examine(model)
    assert not diagnosis.findings and not diagnosis.not_analysed
    assert diagnosis.evaluation == pytest.approx(expected.evaluation, rel=1e-4)
    assert len(diagnosis.sites) == 3
    if name != "site":  # there, 8 of 32 samples share statistics
        for term, value in expected.terms.items():
            assert diagnosis.terms[term].value == pytest.approx(value.value, abs=1e-5), term


class Odd(RunningMomentsNorm):
    """Its evaluation is not that of batch norm."""

    def normalize_by_running(self, x, real, affine):
        del real, affine
        return x * self.running_var.mean()


def test_an_unknown_norm_is_reported_as_not_analysed():
    diagnosis = examine(replaced(partial(Odd, eps=1e-5)))
    assert diagnosis.not_analysed == ("1", "4", "7")
    assert kinds(diagnosis) == {"not_analysed"}
    assert diagnosis.terms["averages"].value == 0


@pytest.mark.parametrize(
    "shape, norm",
    [
        ((8, 4), nn.BatchNorm1d(4)),
        ((8, 4, 5), nn.BatchNorm1d(4)),
        ((8, 4, 3, 3, 3), nn.BatchNorm3d(4)),
    ],
)
def test_shapes(shape, norm):
    pairs = [(x, x) for x in normal(20, *shape)]
    diagnosis = diagnose(averaged(nn.Sequential(norm), pairs), pairs, not_of_variance_one)
    assert not diagnosis.not_analysed
    (row,) = diagnosis.sites
    assert row.channels == 4 and row.mean_distance is not None and row.mean_distance < 0.2


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = trained()

    def forward(self, image, scale):
        return self.model(image * scale)


def test_forms_of_batches():
    scale = torch.ones(32, 1, 1, 1)
    model, pairs = TwoInputs(), batches()[:8]
    expected = of_batch_norm().to_dict()
    as_tuples = examine(model, batches=[((x, scale), y) for x, y in pairs])
    mappings = [{"image": x, "scale": scale, "label": y} for x, y in pairs]
    as_mappings = diagnose(
        model, mappings, lambda output, batch: F.cross_entropy(output, batch["label"])
    )
    for diagnosis in (as_tuples, as_mappings):
        assert diagnosis.to_dict()["terms"] == expected["terms"]
        assert diagnosis.to_dict()["loss_at_size"] == expected["loss_at_size"]


def test_mistakes_are_said():
    for wrong, part in (
        ({"model": nn.Linear}, "model=<class .*Linear'>: must be an nn.Module"),
        ({"batches": 5}, "batches is a int, must be pairs"),
        ({"batches": torch.ones(4, 3)}, "batches is a Tensor, must be pairs"),
        ({"batches": TensorDataset(torch.ones(4, 3))}, "single samples; pass .*DataLoader"),
        ({"loss": nn.CrossEntropyLoss}, r"pass an instance, CrossEntropyLoss\(\)"),
        ({"tolerance": -1}, "tolerance=-1: must be a number, 0 or more"),
    ):
        with pytest.raises(UserError, match=part):
            examine(**{"model": trained(), **wrong})
    with pytest.raises(UserError, match="batches holds 0"):
        examine(trained(), batches=iter(()))
    with pytest.raises(UserError, match=r"mappings of picture.*forward takes input"):
        examine(trained(), batches=[{"picture": x} for x, _ in batches()])
    with pytest.raises(UserError, match=r"in training mode \(RuntimeError"):
        examine(trained(), batches=[(x[:, :, 0], y) for x, y in batches()])


def test_terms_that_cancel_are_said_to():
    assert cancelling([0.5, -0.4, 0.1]) == "the terms cancel: +0.6000 and -0.4000 leave +0.2000"
    assert not cancelling([0.5, -0.1]) and not cancelling([])


def test_evaluation_batches_that_are_preprocessed_otherwise():
    wrong = [(10 * x + 5, y) for x, y in batches(seed=3)]
    diagnosis = examine(trained(), evaluation_batches=wrong)
    assert kinds(diagnosis) == {"other_inputs"}
    assert diagnosis.other_data is not None and diagnosis.other_data.value > 1
    assert "Other data cost" in diagnosis.summary
    assert "Other data" not in examine(trained(), evaluation_batches=batches(seed=3)).summary


# --- What is left behind, and what is said -------------------------------------------------------


@pytest.mark.parametrize("kind", ["batch", "checkpoint", "left_in_training"])
def test_the_model_and_all_random_states_come_back_unchanged(kind: str):
    model = {
        "batch": cases.trained("dropout"),
        "checkpoint": Checkpointed(trained(), use_reentrant=True),
        "left_in_training": stubborn().eval(),
    }.get(kind)
    assert model is not None
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, index)
        parameter.requires_grad_(index % 2 == 0)
    buffers = dict(model.named_buffers())
    before = (
        copy.deepcopy(model.state_dict()),
        {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
        [(name, dict(m.__dict__)) for name, m in model.named_modules()],
        [p.requires_grad for p in model.parameters()],
    )
    torch.manual_seed(7), np.random.seed(7), random.seed(7)
    loader = torch.utils.data.DataLoader([(x, y) for x, y in batches()[:4]], batch_size=None)
    examine(model, batches=loader)
    drawn = torch.rand(3), np.random.rand(3), random.random()
    torch.manual_seed(7), np.random.seed(7), random.seed(7)
    again = torch.rand(3), np.random.rand(3), random.random()
    assert torch.equal(drawn[0], again[0]) and (drawn[1] == again[1]).all() and drawn[2] == again[2]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[0][name], rtol=0, atol=0)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, before[1][name])
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    for (name, values), module in zip(before[2], model.modules(), strict=True):
        assert values.keys() == vars(module).keys(), name
        assert values["training"] == module.training, name
        assert not module._forward_pre_hooks, name
    assert [p.requires_grad for p in model.parameters()] == before[3]


def test_a_diagnosis_is_plain_data_and_a_figure(tmp_path):
    diagnosis = examine(poisoned())
    content = json.loads(json.dumps(diagnosis.to_dict(), allow_nan=False))
    assert content["findings"][0]["kind"] == "not_finite"
    assert content["evaluation"] is None
    figure = examine(cases.trained("dropout")).figure()
    figure.save(tmp_path / "gap.svg")
    assert "running averages" in (tmp_path / "gap.svg").read_text()


def test_small_batches_are_many_and_a_gap_that_may_be_chance_is_said_with_its_size():
    torch.manual_seed(1)
    images, classes = torch.randn(400, 1, 8, 8), torch.randint(10, (400,))
    pairs = list(zip(images.split(2), classes.split(2), strict=True))
    norm = nn.BatchNorm2d(1)
    model = nn.Sequential(norm, nn.Flatten(), nn.Linear(64, 10))
    with torch.no_grad():
        for inputs, _ in pairs:
            norm(inputs)
    many = diagnose(model, pairs, F.cross_entropy)
    assert many.num_batches == 128 and many.batch_size == 2
    few = diagnose(model, pairs, F.cross_entropy, max_batches=4, tolerance=1e-6)
    assert "may be chance" in few.summary and f"{abs(few.gap.value):.4f}" in few.summary
    assert any("more or larger batches" in note for note in few.notes)
    equal = diagnose(model, pairs, F.cross_entropy, max_batches=16, tolerance=1.0)
    assert "No gap above 1 " in equal.summary and "min var/eps" not in str(equal)
    assert not any("more or larger" in note for note in equal.notes)
