"""Properties of every shipped norm that its card does not ask about.

The contract is measured in tests/checks/test_shipped_norms.py.
"""

from __future__ import annotations

import copy

import norm_cases as cases
import pytest
import torch
from norm_cases import (
    APPROXIMATE,
    RUNNING,
    SHAPES,
    SHIPPED,
    C,
    S,
    T,
    gradients,
    make,
    make_fresh,
    mask_for,
    num_dims_of,
    random_tensor,
    run,
    state_of,
)
from torch import nn
from torch.func import functional_call
from torch.testing import assert_close

from normexp.norms.running import RunningMomentsNorm
from normexp.norms.site import Site, merge_state, read_state, write_state

ALL = pytest.mark.parametrize("name", SHIPPED)
IN_EVALUATION = [(name, False) for name in SHIPPED if name in RUNNING]  # others are the same
MODES = pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
BOTH_MODES = pytest.mark.parametrize(
    ("name", "training"), [*((name, True) for name in SHIPPED), *IN_EVALUATION]
)
# RunningMomentsNorm promises to merge its moments exactly. A plain RunningNorm averages its
# buffers, which is exact for sums of values, as in these three.
OF_SUMS = ("moving_average_batch", "power", "taper")
MERGE_EXACTLY = [
    name for name in RUNNING if name in OF_SUMS or isinstance(make_fresh(name), RunningMomentsNorm)
]


def twins(name: str, training: bool, dtype: torch.dtype = torch.double) -> list[nn.Module]:
    return [make(name, dtype).train(training) for _ in range(2)]


@BOTH_MODES
def test_half_precision_far_from_zero_is_the_float32_result_rounded(name, training):
    """Of inputs, and under autocast, which must not take statistics in half precision."""
    for index, num_dims in enumerate(num_dims_of(name)):
        dtype = (torch.bfloat16, torch.float16)[index % 2]
        x = (random_tensor(*SHAPES[num_dims], dtype=torch.float) + 30).to(dtype)
        for mask in (None, mask_for(x)):
            norm, other = twins(name, training, torch.float)
            out, expected = norm(x, mask), other(x.float(), mask)
            assert (out.shape, out.dtype) == (x.shape, dtype)
            assert_close(out, expected.to(dtype), rtol=0, atol=0)
        norm, other = twins(name, training, torch.float)
        with torch.autocast("cpu", dtype, enabled=name != "gated_rms"):  # it has linear layers
            out = norm(x.float())
        assert_close(out, other(x.float()), rtol=0, atol=0)
        assert_close(state_of(norm), state_of(other), rtol=0, atol=0)
        cast = make_fresh(name, dtype).train(training)  # as a whole, it still runs
        assert cast(x).dtype == dtype


@pytest.mark.parametrize("name", [name for name in SHIPPED if "affine" in cases.KNOBS_OF[name]])
def test_without_affine_weight_is_one_and_bias_zero(name):
    norm, bare = make_fresh(name), cases.maker(name, affine=False)(C).double()
    bare.load_state_dict(norm.state_dict(), strict=False)  # other parameters may be drawn
    assert getattr(bare, "weight", None) is None
    for x in cases.inputs(name):
        assert_close(bare(x), norm(x), rtol=0, atol=1e-12)


@BOTH_MODES
def test_content_under_the_mask_has_no_effect_and_comes_back_zero(name, training):
    contents = torch.tensor([1e9, float("inf"), float("nan")], dtype=torch.double)
    for num_dims in num_dims_of(name):
        norm, soiled = twins(name, training)
        x = random_tensor(*SHAPES[num_dims])
        mask = mask_for(x)
        out, grads = run(norm, x, mask)
        soil = contents[torch.arange(x.numel()) % 3].view_as(x)
        found = run(soiled, torch.where(mask.unsqueeze(1), x, soil), mask)
        assert not out.movedim(1, -1)[~mask].any()
        assert_close(found, (out, grads), rtol=0, atol=0)
        assert_close(state_of(soiled), state_of(norm), rtol=0, atol=0)


@BOTH_MODES
def test_neither_a_full_mask_nor_more_padding_changes_anything(name, training):
    for num_dims in num_dims_of(name):
        plain, masked = twins(name, training)
        x = random_tensor(*SHAPES[num_dims])
        full = torch.ones(len(x), *x.shape[2:], dtype=torch.bool)
        assert_close(run(masked, x, full), run(plain, x), rtol=0, atol=1e-12)
        assert_close(state_of(masked), state_of(plain), rtol=0, atol=1e-12)
    short, long = twins(name, training)
    x = random_tensor(*SHAPES[3])
    mask, pad = mask_for(x), nn.functional.pad
    longer = long(pad(x, (0, 4), value=77.0), pad(mask, (0, 4)))
    assert_close(longer, pad(short(x, mask), (0, 4)), rtol=0, atol=1e-14)
    assert_close(state_of(long), state_of(short), rtol=0, atol=1e-14)


@BOTH_MODES
def test_what_is_masked_counts_as_if_it_were_not_there(name, training):
    """Rows of any norm; positions of a sample where samples are not pooled."""
    whole, rest = twins(name, training)
    for num_dims in set(num_dims_of(name)) & ({2} if name in RUNNING else {2, 3, 4}):
        x = random_tensor(*SHAPES[num_dims])
        mask = mask_for(x)
        out = whole(x, mask)
        if num_dims == 2:
            assert_close(out[mask], rest(x[mask]), rtol=0, atol=1e-12)
            assert_close(state_of(whole), state_of(rest), rtol=0, atol=1e-12)
            continue
        for sample, sample_out, real in zip(x, out, mask, strict=True):
            assert_close(sample_out[:, real], rest(sample[None, :, real])[0], rtol=0, atol=1e-12)


@ALL
def test_padding_alone_is_zero_with_finite_gradients_and_leaves_the_averages(name):
    x = random_tensor(*SHAPES[3])
    norm, mask = make(name), mask_for(x)
    mask[2] = False  # one sample without a real position
    out, grads = run(norm, x, mask)
    assert not out[2].any() and not grads[0][2].any()
    assert all(g.isfinite().all() for g in grads)
    norm, before = make(name), state_of(make(name))
    out, grads = run(norm, x, torch.zeros_like(mask))  # a batch without one
    assert not out.any() and all(g.isfinite().all() for g in grads)
    moved = {key for key, value in state_of(norm).items() if not torch.equal(value, before[key])}
    assert not moved & {"running_mean", "running_var", "running_square", "running_deviation"}


@BOTH_MODES
def test_norms_stacked_under_vmap_equal_norms_alone(name, training):
    for num_dims in {2, 3} & set(num_dims_of(name)):
        x = random_tensor(S, *SHAPES[num_dims])
        for mask in (None, torch.stack([mask_for(x[k]).roll(2 * k, 0) for k in range(S)])):
            alone = [make(name, seed=k).train(training) for k in range(S)]
            cases.assert_stack_equals_loop(alone, x, mask)


@ALL
@pytest.mark.parametrize("masked", [False, True])
def test_ghost_sub_batches_equal_accumulated_parts(name, masked):
    """One forward of a site in groups of 4, against four samples at a time from the same state."""
    x = random_tensor(8, C, T) + torch.arange(8).view(-1, 1, 1)
    mask = cases.random_mask(8, T) if masked else None
    site, alone = Site(make(name), "map", 4).train(), make(name)
    x.requires_grad_()
    out = site(x, mask)
    found = gradients(out, [x, *site.parameters()])
    ends, outs = [], []
    for part in (slice(0, 4), slice(4, 8)):
        ends.append(read_state(alone))  # moved in place by the part
        tensors = {**dict(alone.named_parameters()), **ends[-1]}
        own = None if mask is None else mask[part]
        outs.append(functional_call(alone, tensors, (x[part], own)))
    assert_close(out, torch.cat(outs), rtol=0, atol=1e-12)
    if name in APPROXIMATE:  # its backward uses and moves the state of each part here
        return
    expected = gradients(torch.cat(outs), [x, *alone.parameters()])
    assert_close(found, expected, rtol=0, atol=1e-12)
    merged = merge_state(alone, read_state(alone), ends, [0.5, 0.5])
    assert_close(read_state(site.norm), merged, rtol=0, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("momentum", [0.003, None])
@pytest.mark.parametrize("name", MERGE_EXACTLY)
def test_merged_parts_are_the_state_after_one_forward_on_all(name, momentum, masked):
    """Parts of 5, 2 and 4 samples; under the mask some have 0 or 1 values at a position."""
    norm, x = make(name), random_tensor(11, C, T) + 3 * torch.arange(11).view(-1, 1, 1)
    norm.momentum = 0.1 if momentum is None and norm.needs_momentum else momentum
    mask = torch.arange(T) < 1 + torch.arange(11)[:, None] % T
    mask, sizes = mask if masked else torch.ones_like(mask), [5, 2, 4]
    whole = copy.deepcopy(norm)
    whole(x, mask)
    start, ends = read_state(norm), []
    for part in zip(x.split(sizes), mask.split(sizes), strict=True):
        norm(*part)
        ends.append(read_state(norm))
        write_state(norm, start)
    merged = merge_state(norm, start, ends, [size / 11 for size in sizes])
    counters, expected = ("num_values", "num_batches_tracked"), read_state(whole)
    for key in merged if name in OF_SUMS else (*counters, *RunningMomentsNorm.averages):
        assert_close(merged[key], expected[key], rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["batch_renorm", "power", "moving_average_batch"])
def test_a_compiled_backward_uses_the_state_before_the_step(name):
    """Functionalized graphs may read a buffer that the forward has written since."""
    torch.compiler.reset()
    x = random_tensor(*SHAPES[3], dtype=torch.float)
    norm, reference = twins(name, True, torch.float)
    y = x.clone().requires_grad_()
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
    found = gradients(compiled(y), [y, *norm.parameters()])
    assert_close(found, run(reference, x)[1], rtol=1e-5, atol=1e-6)
    assert_close(state_of(norm), state_of(reference), rtol=1e-5, atol=1e-6)
