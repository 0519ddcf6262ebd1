"""Each shipped norm computes what its torch.nn counterpart computes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from norm_cases import (
    CASES,
    CASES_AND_DIMS,
    SHAPES,
    C,
    gradients,
    random_tensor,
    randomize,
)
from torch import Tensor, nn
from torch.testing import assert_close

from normexp.norms.batch import BatchNorm
from normexp.norms.group import InstanceNorm

TOLERANCE = {torch.double: 1e-10, torch.float: 1e-5}


def apply_counterpart(norm: nn.Module, x: Tensor, channels_last: bool) -> Tensor:
    return norm(x.movedim(1, -1)).movedim(-1, 1) if channels_last else norm(x)


def laid_out(x: Tensor, form: str) -> Tensor:
    """The same values, contiguous or not."""
    if form == "channels_last":
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        return x.contiguous(memory_format=formats[x.ndim]) if x.ndim in formats else x
    if form == "strided":
        spread = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
        spread[..., ::2] = x
        return spread[..., ::2]
    return x


@pytest.mark.parametrize("dtype", [torch.double, torch.float], ids=["float64", "float32"])
@pytest.mark.parametrize("form", ["contiguous", "channels_last", "strided"])
@pytest.mark.parametrize(("name", "num_dims"), CASES_AND_DIMS)
def test_norm_equals_its_torch_counterpart(name, num_dims, form, dtype):
    case = CASES[name]
    theirs = randomize(case.counterpart(num_dims).to(dtype))
    ours = case.make().to(dtype)
    ours.load_state_dict(theirs.state_dict())  # strict: the same names and shapes
    close = partial(assert_close, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for training in (True, False, True):
        x = laid_out(2 * random_tensor(*SHAPES[num_dims], dtype=dtype) + 1, form)
        x.requires_grad_()
        out = ours.train(training)(x)
        expected = apply_counterpart(theirs.train(training), x, case.channels_last)
        close(out, expected)
        found = gradients(out, [x, *ours.parameters()])
        close(found, gradients(expected, [x, *theirs.parameters()]))
        close(ours.state_dict(), theirs.state_dict())


@pytest.mark.parametrize(("name", "num_dims"), CASES_AND_DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_far_from_zero_is_the_float32_result_rounded(name, num_dims, dtype):
    norm = randomize(CASES[name].make())
    x = (random_tensor(*SHAPES[num_dims], dtype=torch.float) + 30).to(dtype)
    out, expected = norm(x), norm(x.float())
    assert out.dtype == dtype
    assert_close(out, expected.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_a_norm_cast_to_bf16_as_a_whole_still_runs(name):
    norm = CASES[name].make().bfloat16()
    x = random_tensor(*SHAPES[4], dtype=torch.bfloat16)
    expected = CASES[name].make()(x.float())
    assert_close(norm(x), expected.bfloat16(), rtol=0, atol=0)
    assert norm.eval()(x).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["batch", "layer", "layer2d", "instance", "group", "rms"])
def test_without_affine_a_norm_has_no_parameters_and_weight_one(name):
    plain = CASES[name].make()
    knobs = {"num_groups": 4} if name == "group" else {}
    bare = type(plain)(C, eps=plain.eps, affine=False, **knobs).double()
    x = random_tensor(*SHAPES[4])
    assert not list(bare.parameters())
    assert_close(bare(x), plain.double()(x), rtol=0, atol=1e-12)


def test_instance_norm_has_an_affine_unless_told_otherwise():
    assert set(InstanceNorm(C).state_dict()) == {"weight", "bias"}
    assert not InstanceNorm(C, affine=False).state_dict()


def test_batch_norm_state_dict_has_torch_names_and_nothing_else():
    expected = nn.BatchNorm2d(C).state_dict()
    found = BatchNorm(C).state_dict()
    assert {k: (v.shape, v.dtype) for k, v in found.items()} == {
        k: (v.shape, v.dtype) for k, v in expected.items()
    }
