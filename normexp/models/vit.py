"""A small Vision Transformer (Dosovitskiy et al. 2021, arXiv:2010.11929) for small images."""

from __future__ import annotations

from torch import Tensor, nn

from normexp.errors import UserError
from normexp.models.common import check_image_shape, check_positive
from normexp.models.transformer import Init, Transformer
from normexp.norms.factory import NormFactory


class ViT(Transformer):
    """Patches become tokens with learned positions; blocks, final norm, maximum over tokens.

    Shapes: (N, C, H, W) -> (N, num_outputs). The paper has a class token instead of the maximum; a
    mean would erase a norm that centres each channel over positions. Other sizes as in
    `Transformer.add_blocks`.

    Args:
        patch_size: pixels along a side of a patch; divides H and W.

    Raises:
        UserError: an image that the patches do not divide, or of fewer than 2x2 patches; other
            sizes that do not fit.
    """

    def __init__(
        self,
        norm: NormFactory,
        input_shape: tuple[int, ...],
        num_outputs: int,
        *,
        patch_size: int,
        depth: int,
        width: int,
        num_heads: int,
        dropout: float,
        init: Init = "depth_scaled",
    ) -> None:
        super().__init__()
        check_positive(patch_size=patch_size, depth=depth, width=width, num_heads=num_heads)
        check_image_shape(input_shape, smallest=2 * patch_size, model="vit")
        channels, rows, columns = input_shape
        sides = (rows, columns)
        if any(side % patch_size for side in sides):
            sizes = range(patch_size, 0, -1)
            fitting = next(s for s in sizes if not any(side % s for side in sides))
            raise UserError(
                f"model.patch_size={patch_size} does not divide images of "
                f"{rows}x{columns}; try model.patch_size={fitting}"
            )
        num_tokens = rows * columns // patch_size**2
        self.patch_size = patch_size
        self.patch_embedding = nn.Linear(channels * patch_size**2, width)
        self.positions = nn.Embedding(num_tokens, width)
        self.add_blocks(norm, depth, width, num_heads, is_causal=False, dropout=dropout)
        self.head = nn.Linear(width, num_outputs)
        self.init_weights(init)
        # Pixels have unit variance, and so should tokens.
        nn.init.kaiming_normal_(self.patch_embedding.weight, nonlinearity="linear")

    def split(self, images: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, T, C * patch_size^2), T patches row by row."""
        size = self.patch_size
        x = images.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))  # (N, C, h, P, w, P)
        return x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.patch_embedding(self.split(inputs)) + self.positions.weight
        return self.head(self.apply_blocks(x).amax(dim=1))
