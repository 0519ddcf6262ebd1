"""Identify the language of a short string; the strings are CLDR data inside Babel, no download."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain

import numpy as np
import torch

from normexp.errors import UserError
from normexp.training.batching.draws import generator
from normexp.training.data.dataset import Data, Examples
from normexp.training.data.sources import TEST_SEED, split_off_test, split_off_val

PAD, UNKNOWN = 0, 1


def load_langid(
    *,
    languages: list[str],
    samples_per_language: int,
    max_length: int,
    test_fraction: float,
    val_fraction: float,
    split_seed: int,
) -> Data:
    """Names of territories, languages, scripts, variants, currencies and units; target: language.

    Strings are cut to `max_length` characters, and dropped if several languages share them.
    Tokens are characters; 0 is padding, 1 a character that occurs only in test.

    Shapes: inputs int64 (N, max_length), mask bool of the same shape, targets int64 (N,).

    Raises:
        UserError: a language that Babel does not know, or that has too few strings of its own; a
            fraction that leaves a language without test strings or with nothing else.
    """
    import babel

    version = f"babel {babel.__version__}"
    if max_length < 1:
        raise UserError(f"data.max_length={max_length} must be positive; try data.max_length=32")
    strings = read_own_strings(languages, max_length)
    texts = _sample(strings, samples_per_language, version)
    if not 0 < round(test_fraction * samples_per_language) < samples_per_language:
        raise UserError(
            f"data.test_fraction={test_fraction} leaves train or test without strings; try 0.2"
        )
    targets = torch.arange(len(strings)).repeat_interleave(samples_per_language)
    not_test, test = split_off_test(targets, test_fraction)
    characters = np.array(texts, dtype=f"U{max_length}").view("U1")  # empty after a text's end
    characters = characters.reshape(len(texts), max_length)
    is_real = characters != ""
    vocabulary = np.unique(characters[not_test][is_real[not_test]])
    symbols = ("<pad>", "<unknown>", *vocabulary.tolist())
    tokens = np.searchsorted(vocabulary, characters) + 2
    tokens[~np.isin(characters, vocabulary)] = UNKNOWN
    tokens[~is_real] = PAD
    samples = Examples(torch.from_numpy(tokens), targets, torch.from_numpy(is_real))
    train, val = split_off_val(len(not_test), val_fraction, split_seed)
    return Data(
        "langid",
        "classification",
        train=samples.subset(not_test[train]),
        val=samples.subset(not_test[val]),
        test=samples.subset(test),
        num_outputs=len(strings),
        input_shape=(max_length,),
        vocab_size=len(symbols),
        symbols=symbols,
        source_version=version,
    )


def _sample(strings: dict[str, list[str]], per_language: int, version: str) -> list[str]:
    """Draws `per_language` strings of each language in turn, with a fixed seed."""
    fewest = min(strings, key=lambda language: len(strings[language]))
    if not 10 <= per_language <= len(strings[fewest]):
        raise UserError(
            f"data.samples_per_language={per_language} must be 10 to {len(strings[fewest])}, the "
            f"number of strings that only {fewest!r} has in {version}"
        )
    texts: list[str] = []
    for target, names in enumerate(strings.values()):
        order = torch.randperm(len(names), generator=generator(TEST_SEED, "split", target))
        texts += [names[i] for i in order[:per_language].tolist()]
    return texts


def read_own_strings(languages: list[str], max_length: int) -> dict[str, list[str]]:
    """For each language, the sorted strings that occur in no other language."""
    strings = {language: set(_read_names(language, max_length)) - {""} for language in languages}
    if len(strings) < 2:
        raise UserError(f"data.languages={list(languages)} must name two languages or more")
    num_languages = Counter(chain.from_iterable(strings.values()))
    shared = {text for text, number in num_languages.items() if number > 1}
    return {language: sorted(names - shared) for language, names in strings.items()}


def _read_names(language: str, max_length: int) -> Iterator[str]:
    from babel import Locale, UnknownLocaleError

    try:
        locale = Locale.parse(language)
    except (UnknownLocaleError, ValueError) as error:
        raise UserError(
            f"data.languages has {language!r}, which Babel does not know; try a code such as de"
        ) from error
    names = [form["long"] for form in locale.unit_display_names.values() if "long" in form]
    for kind in ("territories", "languages", "scripts", "variants", "currencies"):
        names += getattr(locale, kind).values()
    for name in names:
        yield str(name)[:max_length].strip()
