from __future__ import annotations

import torch

from normexp.data import Examples
from normexp.data.digits import load_digits


def parts(split_seed: int) -> tuple[Examples, Examples, Examples]:
    data = load_digits(val_fraction=0.1, split_seed=split_seed, augmentation=None)
    assert isinstance(data.train, Examples)
    assert isinstance(data.val, Examples)
    assert isinstance(data.test, Examples)
    return data.train, data.val, data.test


def test_digits_splits_hold_every_source_image_once():
    from sklearn import datasets

    source = torch.as_tensor(datasets.load_digits(return_X_y=True)[0])  # (N, 64)
    held = torch.cat([part.inputs for part in parts(0)]).flatten(1)
    assert held.dtype == torch.uint8 and held.shape == (1797, 64)
    assert int(held.max()) == 255 and int(held.min()) == 0
    back = (held.double() * 16 / 255).round()  # the 17 grey values survive the conversion
    assert sorted(map(tuple, back.tolist())) == sorted(map(tuple, source.tolist()))


def test_digits_test_split_is_stratified():
    train, val, test = parts(0)
    per_class = torch.bincount(torch.cat([part.targets for part in (train, val, test)]))
    assert torch.equal(torch.bincount(test.targets), (per_class * 0.2).round().long())


def test_digits_test_split_does_not_move_with_the_seed_and_val_does():
    (_, val, test), (_, other_val, other_test) = parts(0), parts(1)
    assert torch.equal(test.inputs, other_test.inputs)
    assert not torch.equal(val.inputs, other_val.inputs)


def test_digits_name_their_source_and_shape():
    data = load_digits(val_fraction=0.1, split_seed=0, augmentation=None)
    assert data.input_shape == (1, 8, 8) and data.num_outputs == 10
    assert data.source_version.startswith("scikit-learn ")
    assert (len(data.train), len(data.val), len(data.test)) == (1294, 144, 359)
