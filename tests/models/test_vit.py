from __future__ import annotations

import pytest
import torch
from model_cases import PositionNorm, build_vit

from normexp.errors import UserError
from normexp.models import ViT
from normexp.norms.factory import NormFactory
from normexp.norms.site import named_sites

NORM = NormFactory(PositionNorm)


def build(input_shape: tuple[int, ...], patch_size: int = 4, num_heads: int = 4) -> ViT:
    return ViT(
        NORM,
        input_shape,
        10,
        patch_size=patch_size,
        depth=2,
        width=64,
        num_heads=num_heads,
        dropout=0.0,
    )


def test_patches_are_cut_row_by_row() -> None:
    images = torch.arange(2 * 3 * 8 * 12.0).view(2, 3, 8, 12)
    patches = build((3, 8, 12)).split(images)
    assert patches.shape == (2, 6, 48)
    for index, (row, column) in enumerate((r, c) for r in (0, 4) for c in (0, 4, 8)):
        expected = images[:, :, row : row + 4, column : column + 4].flatten(1)
        assert torch.equal(patches[:, index], expected)


def test_tokens_of_unit_pixels_start_with_unit_variance() -> None:
    torch.manual_seed(0)
    model = build((3, 32, 32))
    tokens = model.patch_embedding(model.split(torch.randn(64, 3, 32, 32)))
    assert tokens.var().item() == pytest.approx(1, rel=0.1)


def test_vit_parameter_count() -> None:
    width, depth = 64, 2
    embedding = (48 + 1) * width + 64 * width  # patches of 3 x 4 x 4, 64 positions
    blocks = depth * (12 * width**2 + 9 * width)
    norms = 2 * width * (2 * depth + 1)
    head = (width + 1) * 10
    count = sum(p.numel() for p in build((3, 32, 32)).parameters())
    assert count == embedding + blocks + norms + head


def test_vit_sites_are_named_by_role() -> None:
    names = [f"blocks.{i}.{role}" for i in (0, 1) for role in ("attn_norm", "mlp_norm")]
    assert [name for name, _ in named_sites(build_vit(NORM))] == [*names, "final_norm"]


def test_patches_that_do_not_divide_the_image_are_refused_with_one_that_does() -> None:
    with pytest.raises(UserError, match="patch_size=5 does not divide.*28x28; try .*patch_size=4"):
        build((1, 28, 28), patch_size=5)


def test_images_of_a_single_patch_are_refused() -> None:
    with pytest.raises(UserError, match="images of 8x8 are too small for model=vit"):
        build((1, 8, 8), patch_size=8)


def test_vit_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(UserError, match="num_heads=5 does not divide width=64"):
        build((1, 8, 8), num_heads=5)
