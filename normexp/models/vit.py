"""A small Vision Transformer (Dosovitskiy et al. 2021, arXiv:2010.11929) for small images."""

from __future__ import annotations

from torch import Tensor, nn

from normexp.errors import UserError
from normexp.models.initialization import check_image_shape, check_positive
from normexp.models.transformer import (
    Block,
    build_embedding_norm,
    build_final_norm,
    init_transformer,
)
from normexp.norms.factory import NormFactory


class ViT(nn.Module):
    """Patches become tokens with learned positions; blocks, final norm, maximum over tokens.

    Shapes: (N, C, H, W) -> (N, num_outputs). The maximum takes the place of the
    paper's class token; a mean would erase a norm that centres each channel over positions.

    Args:
        patch_size: pixels along a side of a patch; divides H and W.
        depth: blocks.
        width: features of a token, a multiple of num_heads.
        dropout: probability for an element of what a branch adds to be dropped.

    Raises:
        UserError: an image that the patches do not divide, or of fewer than 2x2 patches; a width
            that the heads do not divide; a size below 1.
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
    ) -> None:
        super().__init__()
        check_positive(patch_size=patch_size, depth=depth, width=width, num_heads=num_heads)
        check_image_shape(input_shape, smallest=2 * patch_size, model="vit")
        self.patch_size = patch_size
        channels, height, image_width = input_shape
        if height % patch_size or image_width % patch_size:
            raise UserError(
                f"patch_size={patch_size} does not divide images of {height}x{image_width}; "
                f"try model.patch_size={largest_patch_size(height, image_width, patch_size)}"
            )
        num_tokens = (height // patch_size) * (image_width // patch_size)
        self.patch_embedding = nn.Linear(channels * patch_size**2, width)
        self.positions = nn.Embedding(num_tokens, width)
        self.embedding_norm = build_embedding_norm(norm, width)
        self.blocks = nn.ModuleList(
            Block(width, num_heads, norm, is_causal=False, dropout=dropout) for _ in range(depth)
        )
        self.final_norm = build_final_norm(norm, width)
        self.head = nn.Linear(width, num_outputs)
        init_transformer(self, depth)
        # Pixels have unit variance; so shall the tokens made of them.
        nn.init.kaiming_normal_(self.patch_embedding.weight, nonlinearity="linear")

    def split(self, images: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, T, C * patch_size^2), T patches row by row."""
        size = self.patch_size
        x = images.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))  # (N, C, h, P, w, P)
        return x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.patch_embedding(self.split(inputs)) + self.positions.weight
        x = self.embedding_norm(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x).amax(dim=1))


def largest_patch_size(height: int, width: int, limit: int) -> int:
    """The largest size below `limit` that divides both sides."""
    return max(size for size in range(1, limit) if height % size == 0 and width % size == 0)
