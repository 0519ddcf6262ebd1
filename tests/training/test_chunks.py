from __future__ import annotations

import time

from normexp.training.chunks import ChunkLoader


def steps_of(loader: ChunkLoader) -> list[int]:
    return [step for chunk in loader for step in range(chunk.start, chunk.stop)]


def test_chunks_cover_the_epoch_and_end_with_it():
    chunks = list(ChunkLoader(lambda: 10, steps_per_epoch=10, total_steps=100, max_steps=4))
    assert (chunks[0].start, chunks[-1].stop) == (10, 20)
    assert all(a.stop == b.start for a, b in zip(chunks, chunks[1:], strict=False))
    assert max(c.stop - c.start for c in chunks) <= 4


def test_chunks_begin_where_training_stands_and_end_with_the_budget():
    loader = ChunkLoader(lambda: 13, steps_per_epoch=10, total_steps=17, max_steps=8)
    assert steps_of(loader) == [13, 14, 15, 16]


def test_quick_steps_are_taken_in_growing_chunks():
    loader = ChunkLoader(lambda: 0, steps_per_epoch=31, total_steps=31, max_steps=16)
    assert [c.stop - c.start for c in loader] == [1, 2, 4, 8, 16]


def test_slow_steps_are_taken_one_by_one():
    loader = ChunkLoader(lambda: 0, steps_per_epoch=4, total_steps=4, max_steps=16)
    loader.target_seconds = 0.01
    sizes = []
    for chunk in loader:
        time.sleep(0.02 * (chunk.stop - chunk.start))
        sizes.append(chunk.stop - chunk.start)
    assert sizes == [1, 1, 1, 1]
