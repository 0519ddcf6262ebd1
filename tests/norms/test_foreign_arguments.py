"""What is passed to norms from the wild, by which name."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from foreign_cases import EPS, HiddenRMSNorm
from norm_cases import C
from torch import nn

from normexp.errors import UserError
from normexp.norms.adapt import adapt, bind_eps
from normexp.norms.group import GroupNorm


class TestArguments:
    def test_features_are_passed_by_name_whatever_stands_first(self):
        def make(size: float, channels: int, *, epsilon: float) -> nn.GroupNorm:
            assert (size, epsilon) == (2.5, EPS)
            return nn.GroupNorm(1, channels, eps=epsilon)

        norm = adapt(partial(make, size=2.5), target="their.make", eps=EPS)(C)
        assert norm.num_channels == C

    def test_an_unknown_first_argument_takes_the_features(self):
        makes = (
            lambda k: nn.LayerNorm(k),
            lambda k, /: nn.LayerNorm(k),
            lambda *k: nn.LayerNorm(*k),
        )
        for make in makes:
            assert adapt(make, target="t", eps=EPS)(C).normalized_shape == (C,)

    def test_an_eps_that_the_user_set_is_kept(self):
        norm = adapt(partial(HiddenRMSNorm, variance_epsilon=0.5), target="t", eps=EPS)(C)
        assert norm.variance_epsilon == 0.5

    def test_eps_is_bound_only_where_the_signature_has_it(self):
        assert bind_eps(nn.BatchNorm2d, EPS)(C).eps == EPS
        assert bind_eps(nn.Tanh, EPS) is nn.Tanh

    def test_a_missing_argument_is_named(self):
        with pytest.raises(UserError) as caught:
            adapt(nn.GroupNorm, target="torch.nn.GroupNorm", eps=EPS)
        expected = "norm._target_=torch.nn.GroupNorm needs the argument num_groups"
        assert str(caught.value) == f"{expected}; set norm.num_groups=..."

    def test_an_unknown_knob_is_named_with_those_there_are(self):
        with pytest.raises(UserError, match=r"norm\.groups is no argument of .*num_groups, eps"):
            bind_eps(partial(GroupNorm, **{"groups": 3}), EPS)

    def test_a_constructor_that_fails_is_named_with_its_reason(self):
        norm = adapt(partial(nn.GroupNorm, num_groups=3), target="torch.nn.GroupNorm", eps=EPS)
        with pytest.raises(UserError, match="cannot be built for 8 features: num_channels"):
            norm(C)

    @pytest.mark.parametrize("make", [lambda n: n, torch.zeros, nn.functional.relu])
    def test_what_makes_no_module_is_refused(self, make):
        with pytest.raises(UserError, match=r"norm\._target_=their\.make (made|cannot|needs)"):
            adapt(make, target="their.make", eps=EPS)(C)

    def test_what_cannot_be_called_is_refused(self):
        with pytest.raises(UserError, match="names 3, which cannot be called"):
            adapt(3, target="their.number", eps=EPS)  # type: ignore[arg-type]
