"""Batch norm per position in stacks, in groups and in merged parts, against each alone."""

from __future__ import annotations

import copy

import pytest
import torch
from norm_cases import C, gradients, random_mask, random_tensor, randomize
from per_position_cases import N, T, make, make_random, padded
from test_norm_vmap import S, compare_stack_with_loop
from torch.testing import assert_close

from normexp.norms.factory import NormFactory
from normexp.norms.site import Site
from normexp.norms.state import merge_state, read_state, write_state


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_stacked_norms_equal_norms_alone(training, masked):
    mask = padded().expand(S, N, T) if masked else None
    compare_stack_with_loop(lambda: make().train(training), random_tensor(S, N, C, T), mask)


def test_stacked_norms_equal_norms_alone_on_shorter_sequences():
    compare_stack_with_loop(make, random_tensor(S, N, C, 3))


@pytest.mark.parametrize("masked", [False, True])
def test_stacked_token_sites_in_ragged_groups_equal_sites_alone(masked):
    mask = random_mask(S * N, T).unflatten(0, (S, N)) if masked else None
    make_site = lambda: Site(make(), "sequence", 4)  # noqa: E731
    compare_stack_with_loop(make_site, random_tensor(S, N, T, C), mask)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("size", [4, 3, None])
def test_token_site_equals_each_group_alone_and_holds_the_moments_of_all(size, masked):
    """Eleven samples: a size of 4 leaves a group of three, 3 one of two."""
    x = random_tensor(N, T, C) + torch.arange(N).view(N, 1, 1)
    mask = padded() if masked else None
    factory = NormFactory(lambda _: make_random(), view="sequence", norm_batch_size=size)
    site = factory.tokens(C)
    whole, alone = copy.deepcopy(site.norm), copy.deepcopy(site.norm)
    x.requires_grad_()
    shown = x.transpose(1, 2)
    expected = torch.cat(
        [
            alone(shown[i : i + (size or N)], None if mask is None else mask[i : i + (size or N)])
            for i in range(0, N, size or N)
        ]
    ).transpose(1, 2)
    out = site(x, mask)
    assert_close(out, expected, rtol=0, atol=1e-12)
    found = gradients(out, [x, *site.norm.parameters()])
    assert_close(found, gradients(expected, [x, *alone.parameters()]), rtol=0, atol=1e-12)
    whole(shown, mask)
    assert_close(read_state(site.norm), read_state(whole), rtol=0, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
def test_merged_parts_equal_one_forward_on_all_samples(masked):
    """Under the mask parts have 0 or 1 real samples at some positions."""
    norm = make_random()
    x = random_tensor(N, C, T) + 3 * torch.arange(N).view(-1, 1, 1)
    mask = padded() if masked else torch.ones(N, T, dtype=torch.bool)
    whole, start, ends = copy.deepcopy(norm), read_state(norm), []
    whole(x, mask)
    for part, own in zip(x.split([5, 2, 4]), mask.split([5, 2, 4]), strict=True):
        norm(part, own)
        ends.append(read_state(norm))
        write_state(norm, start)
    merged = merge_state(norm, start, ends, [5 / 11, 2 / 11, 4 / 11])
    assert_close(merged, read_state(whole), rtol=0, atol=1e-12)


def test_merged_replicas_equal_each_merged_alone():
    runs, norm = [], make_random()
    for replica in range(T):  # as many as positions: axes must not be taken for one another
        start, ends = read_state(randomize(norm, seed=replica)), []
        for samples in (6, 3):
            x = random_tensor(samples, C, T, seed=10 * replica + samples)
            norm(x, padded()[:samples])
            ends.append(read_state(norm))
            write_state(norm, start)
        runs.append((start, ends))
    alone = [norm.merge_state(start, ends, [2 / 3, 1 / 3]) for start, ends in runs]
    start = {name: torch.stack([run[0][name] for run in runs]) for name in runs[0][0]}
    ends = [{k: torch.stack([run[1][i][k] for run in runs]) for k in start} for i in range(2)]
    for name, value in norm.merge_state(start, ends, [2 / 3, 1 / 3]).items():
        assert_close(value, torch.stack([own[name] for own in alone]), rtol=0, atol=1e-14)
