"""samples.npz: its format, its size, and files that cannot be read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from normexp.errors import UserError
from normexp.records.samples import read_samples, write_samples


@pytest.mark.parametrize("num_samples", [1, 8, 13, 360])
def test_right_or_not_is_packed_and_read_back(tmp_path: Path, num_samples: int):
    rng = np.random.default_rng(0)
    samples = {kind: rng.random(num_samples) < 0.7 for kind in ("running", "batch32")}
    write_samples(tmp_path, samples)
    found = read_samples(tmp_path)
    assert found.keys() == samples.keys()
    for kind, right in samples.items():
        assert found[kind].dtype == bool
        assert np.array_equal(found[kind], right)
    with np.load(tmp_path / "samples.npz") as content:
        assert np.array_equal(content["running"], np.packbits(samples["running"]))


def test_losses_are_float32(tmp_path: Path):
    write_samples(tmp_path, {"running": np.array([1.5, 2.25])})
    (found,) = read_samples(tmp_path).values()
    assert found.dtype == np.float32
    assert found.tolist() == [1.5, 2.25]


def test_ten_thousand_samples_take_little_more_than_a_bit_each(tmp_path: Path):
    write_samples(tmp_path, {"running": np.random.default_rng(0).random(10_000) < 0.5})
    assert (tmp_path / "samples.npz").stat().st_size < 10_000 / 8 + 600


def test_run_without_the_file_has_none_and_a_torn_one_is_refused(tmp_path: Path):
    assert read_samples(tmp_path) == {}
    write_samples(tmp_path, {"running": np.ones(100, bool)})
    path = tmp_path / "samples.npz"
    for torn in (path.read_bytes()[:40], b""):
        path.write_bytes(torn)
        with pytest.raises(UserError, match=r"samples\.npz"):
            read_samples(tmp_path)
