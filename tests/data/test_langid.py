from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from normexp.data import Data, Examples
from normexp.data.langid import load_langid, read_own_strings
from normexp.errors import UserError

LANGUAGES = ["de", "fr", "es", "it", "pl", "cs", "fi", "tr", "nl", "sv"]


def load(
    languages: list[str] = LANGUAGES, samples: int = 800, max_length: int = 32, split_seed: int = 0
) -> Data:
    return load_langid(
        languages=languages,
        samples_per_language=samples,
        max_length=max_length,
        val_fraction=0.1,
        split_seed=split_seed,
    )


@pytest.fixture(scope="module")
def data() -> Data:
    return load()


def splits(data: Data) -> list[Examples]:
    return [part for part in (data.train, data.val, data.test) if isinstance(part, Examples)]


def test_ten_languages_are_balanced(data: Data):
    targets = torch.cat([part.targets for part in splits(data)])
    assert torch.bincount(targets).tolist() == [800] * 10
    assert [len(part) for part in splits(data)] == [5760, 640, 1600]
    assert torch.bincount(splits(data)[2].targets).tolist() == [160] * 10
    assert data.class_names == tuple(LANGUAGES)


def test_no_sample_is_in_two_languages_or_two_splits(data: Data):
    languages_of = defaultdict(list)
    for part in splits(data)[:2]:  # test may hold the unknown symbol, so look at it by string below
        for row, target in zip(part.inputs.tolist(), part.targets.tolist(), strict=True):
            languages_of[tuple(row)].append(target)
    assert len(languages_of) == 6400
    own = read_own_strings(LANGUAGES, 32)
    strings = [text for names in own.values() for text in names]
    assert len(strings) == len(set(strings))


def test_mask_marks_exactly_the_real_characters(data: Data):
    own = {text for names in read_own_strings(LANGUAGES, 32).values() for text in names}
    assert data.symbols is not None
    for part in splits(data)[:2]:
        assert part.mask is not None
        assert torch.equal(part.mask, part.inputs != 0)
        for row, mask in zip(part.inputs[:300], part.mask[:300], strict=True):
            assert "".join(data.symbols[token] for token in row[mask].tolist()) in own
            length = int(mask.sum())
            assert mask[:length].all() and not mask[length:].any()


def test_unknown_is_in_test_alone(data: Data):
    train, val, test = splits(data)
    assert not (train.inputs == 1).any() and not (val.inputs == 1).any()
    assert test.mask is not None
    assert torch.equal(test.mask, test.inputs != 0)
    assert (test.inputs == 1).sum() < 100


def test_split_seed_moves_val_and_leaves_test_and_vocabulary(data: Data):
    other = load(split_seed=1)
    (_, val, test), (_, other_val, other_test) = splits(data), splits(other)
    assert torch.equal(test.inputs, other_test.inputs) and other.symbols == data.symbols
    assert not torch.equal(val.inputs, other_val.inputs)


def test_loading_twice_gives_the_same_content(data: Data):
    assert load().digest == data.digest
    assert data.source_version.startswith("babel ")


def test_long_strings_are_cut(data: Data):
    short = load(samples=100, max_length=5)
    assert short.input_shape == (5,)
    assert all(part.inputs.shape[1] == 5 for part in splits(short))
    assert data.input_shape == (32,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"languages": ["de", "xq"]}, "data.languages has 'xq', which Babel does not know"),
        ({"languages": ["de"]}, "must name at least two"),
        ({"samples": 100_000}, r"samples_per_language=100000 must be 10 to \d+, .* 'it' has in"),
        ({"samples": 0}, "samples_per_language=0 must be 10 to"),
        ({"max_length": 0}, "data.max_length=0 must be positive"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict, message: str):
    with pytest.raises(UserError, match=message):
        load(**arguments)
