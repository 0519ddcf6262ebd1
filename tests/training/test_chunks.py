"""Chunks of optimizer steps, and the rows of losses that they leave."""

from __future__ import annotations

import time

import torch

from normexp.training.chunks import ChunkLoader, LossHistory


def steps_of(loader: ChunkLoader) -> list[int]:
    return [step for chunk in loader for step in range(chunk.start, chunk.stop)]


def test_chunks_cover_the_epoch_and_end_with_it():
    chunks = list(ChunkLoader(lambda: 10, steps_per_epoch=10, total_steps=100, max_steps=4))
    assert (chunks[0].start, chunks[-1].stop) == (10, 20)
    assert all(a.stop == b.start for a, b in zip(chunks, chunks[1:], strict=False))
    assert max(c.stop - c.start for c in chunks) <= 4


def test_chunks_begin_at_the_current_step_and_end_with_the_budget():
    loader = ChunkLoader(lambda: 13, steps_per_epoch=10, total_steps=17, max_steps=8)
    assert steps_of(loader) == [13, 14, 15, 16]


def test_chunks_grow_until_one_takes_the_target_time():
    loader = ChunkLoader(lambda: 0, steps_per_epoch=31, total_steps=31, max_steps=16)
    assert [c.stop - c.start for c in loader] == [1, 2, 4, 8, 16]
    slow = ChunkLoader(lambda: 0, steps_per_epoch=4, total_steps=4, max_steps=16)
    slow.target_seconds = 0.01
    sizes = []
    for chunk in slow:
        time.sleep(0.02 * (chunk.stop - chunk.start))
        sizes.append(chunk.stop - chunk.start)
    assert sizes == [1, 1, 1, 1]


def test_rows_do_not_depend_on_when_they_are_taken_or_saved():
    losses = [torch.tensor([float(step), -float(step)]) for step in range(1, 9)]
    losses[6][1] = torch.inf
    found = []
    for interval in (1, 2, 8):
        history, rows = LossHistory(2, every=3), []
        for step, loss in enumerate(losses, start=1):
            history.add(loss)
            if step % interval == 0:
                rows += list(history.take_rows())
                state, history = history.state_dict(), LossHistory(2, every=3)
                history.load_state_dict(state, torch.device("cpu"))
        history.finish()
        found.append((rows, history.num_steps, history.diverged_at))
    rows = [(3, [2.0, -2.0]), (6, [5.0, -5.0])]
    assert found == [(rows, 8, [None, 7])] * 3
