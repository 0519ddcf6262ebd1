from __future__ import annotations

import numpy as np
import pytest

from normexp.stats import holm, judge_family, largest_family, sign_flip_p_value

# statsmodels 0.15.0: multipletests(P_VALUES, 0.05, "holm")
P_VALUES = [0.011, 0.04, 0.003, 0.04, 0.7, 0.02]
ADJUSTED = [0.055, 0.12, 0.018, 0.12, 0.7, 0.08]


def test_holm_equals_statsmodels():
    np.testing.assert_allclose(holm(P_VALUES), ADJUSTED, rtol=1e-12)


def test_holm_by_hand():
    # sorted .01, .02, .04 times 3, 2, 1: .03, .04, .04
    np.testing.assert_allclose(holm([0.04, 0.01, 0.02]), [0.04, 0.03, 0.04])


def test_holm_stops_at_the_first_that_is_not_rejected():
    np.testing.assert_allclose(holm([0.03, 0.031]), [0.06, 0.06])  # .031 alone would pass


def test_adjusted_p_never_exceeds_one():
    np.testing.assert_array_equal(holm([0.6, 0.9]), [1.0, 1.0])
    assert holm([]).shape == (0,)


def test_judge_family_names_what_is_rejected():
    judged = judge_family(dict(zip("abcdef", P_VALUES, strict=True)), alpha=0.06)
    assert [name for name, j in judged.items() if j.rejected] == ["a", "c"]
    assert judged["a"].p_value == 0.011
    assert judged["a"].adjusted_p_value == pytest.approx(0.055)


@pytest.mark.parametrize("p_values", [[1.2], [-0.1, 0.5], [np.nan]])
def test_what_is_no_p_value_is_refused(p_values):
    with pytest.raises(ValueError, match="p value|NaN"):
        holm(p_values)


def test_largest_family_is_the_last_that_can_reject():
    least = sign_flip_p_value([(np.ones(8), np.zeros(8))], rng=np.random.default_rng(0))
    assert largest_family(8) == 6
    assert holm([least] + [1.0] * 5)[0] <= 0.05
    assert holm([least] + [1.0] * 6)[0] > 0.05
    assert largest_family(5) == 0


def test_holm_keeps_the_familywise_error_rate():
    rng = np.random.default_rng(1)
    families = rng.uniform(size=(4000, 5))
    any_rejected = np.mean([holm(p).min() <= 0.05 for p in families])
    assert any_rejected == pytest.approx(0.05, abs=0.01)
