from __future__ import annotations

import pytest
import torch

from normexp.data.dataset import Examples, Windows, content_digest


def test_examples_gather_keeps_the_leading_axes_of_the_indices():
    inputs = torch.arange(5 * 3).view(5, 3)
    mask = inputs % 2 == 0
    examples = Examples(inputs, torch.arange(5) * 10, mask)
    indices = torch.tensor([[4, 0], [1, 1], [2, 3]])
    batch = examples.gather(indices)
    assert len(examples) == 5
    assert batch["inputs"].shape == (3, 2, 3) and batch["mask"].shape == (3, 2, 3)
    assert batch["targets"].tolist() == [[40, 0], [10, 10], [20, 30]]
    for row in range(3):
        for column in range(2):
            index = int(indices[row, column])
            assert torch.equal(batch["inputs"][row, column], inputs[index])
            assert torch.equal(batch["mask"][row, column], mask[index])


def test_examples_without_mask_give_a_batch_without_the_key():
    batch = Examples(torch.zeros(2, 1, 1, 1), torch.zeros(2)).gather(torch.tensor([1]))
    assert sorted(batch) == ["inputs", "targets"]


@pytest.mark.parametrize("length", [8, 9, 11, 12, 13, 40])
def test_windows_targets_are_the_inputs_shifted_by_one_at_every_offset(length: int):
    block = 4
    windows = Windows(torch.arange(length) * 7, block)
    assert len(windows) == (length - 1 - (block - 1)) // block
    indices = torch.arange(len(windows))
    for offset in range(block):
        batch = windows.gather(indices, torch.tensor(offset))
        for window in range(len(windows)):
            first = window * block + offset
            assert batch["inputs"][window].tolist() == [7 * i for i in range(first, first + block)]
            assert batch["targets"][window].tolist() == [
                7 * i for i in range(first + 1, first + block + 1)
            ]


def test_windows_gather_broadcasts_an_offset_per_replica():
    windows = Windows(torch.arange(40), 4)
    indices = torch.tensor([[0, 2, 5], [1, 1, 0]])
    batch = windows.gather(indices, torch.tensor([[3], [0]]))
    assert batch["inputs"].shape == (2, 3, 4)
    assert batch["inputs"][..., 0].tolist() == [[3, 11, 23], [4, 4, 0]]
    assert torch.equal(windows.gather(indices)["inputs"][..., 0], indices * 4)


@pytest.mark.parametrize("length", [0, 1, 4, 7])
def test_windows_of_a_text_below_two_blocks_are_none(length: int):
    assert len(Windows(torch.zeros(length, dtype=torch.int64), 4)) == 0


def test_digest_depends_on_content_shape_dtype_and_symbols():
    def digest(tensor: torch.Tensor, symbols: tuple[str, ...] | None = None) -> str:
        return content_digest([Windows(tensor, 2)], symbols)

    tokens = torch.arange(6)
    others = [digest(tokens + 1), digest(tokens.int()), digest(tokens.view(2, 3))]
    others += [digest(tokens, ("a", "b"))]
    assert digest(tokens) == digest(tokens.clone())
    assert len({digest(tokens), *others}) == 5
    assert len(digest(tokens)) == 16
