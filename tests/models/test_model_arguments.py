from __future__ import annotations

import pytest
from model_cases import PositionNorm

from normexp.errors import UserError
from normexp.models import GPT, ConvNet, ResNet, TextEncoder, ViT
from normexp.models.initialization import check_image_shape, check_positive
from normexp.norms.factory import NormFactory

NORM = NormFactory(PositionNorm)
TRANSFORMER = {"depth": 1, "width": 8, "num_heads": 2, "dropout": 0.0}


@pytest.mark.parametrize("value", [0, -3, 1.5, "8"])
def test_a_knob_that_is_no_positive_whole_number_is_refused(value) -> None:
    with pytest.raises(UserError, match=f"model.width={value} is no whole number above 0"):
        check_positive(depth=4, width=value)


@pytest.mark.parametrize("key", ["depth", "width", "num_heads"])
def test_token_models_check_their_sizes(key: str) -> None:
    knobs = {**TRANSFORMER, key: 0}
    with pytest.raises(UserError, match=f"model.{key}=0"):
        GPT(NORM, 7, 4, **knobs)
    with pytest.raises(UserError, match=f"model.{key}=0"):
        TextEncoder(NORM, 7, 4, 3, **knobs)
    with pytest.raises(UserError, match=f"model.{key}=0"):
        ViT(NORM, (1, 8, 8), 3, patch_size=4, **knobs)


def test_image_models_check_their_sizes() -> None:
    with pytest.raises(UserError, match="model.patch_size=0"):
        ViT(NORM, (1, 8, 8), 3, patch_size=0, **TRANSFORMER)
    with pytest.raises(UserError, match="model.width=0"):
        ConvNet(NORM, (1, 8, 8), 3, width=0)
    with pytest.raises(UserError, match="model.width=0"):
        ResNet(NORM, (1, 8, 8), 3, depth=8, width=0)


def test_the_smallest_image_is_taken_and_one_below_refused() -> None:
    check_image_shape((3, 5, 9), smallest=5, model="resnet")
    with pytest.raises(UserError, match="images of 9x4 are too small for model=resnet"):
        check_image_shape((3, 9, 4), smallest=5, model="resnet")
