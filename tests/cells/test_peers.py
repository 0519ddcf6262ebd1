"""What processes that were started together say to each other: the first decides for all."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from normexp.cells import devices, peers
from normexp.cells.device_processes import Order
from normexp.cells.peers import Peers
from normexp.config.place import environment_of
from normexp.records.result import read_result
from normexp.train import main
from normexp.training.fit import Interrupted

ORDERS = [Order({"lr": 0.1}, {}, seeds, [], False) for seeds in ([0, 1], [4])]


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(timeout=20) for future in [pool.submit(call) for call in calls]]


@pytest.fixture
def both() -> tuple[Peers, Peers]:
    store = HashStore()
    return Peers(store, 0, 2), Peers(store, 1, 2)


def test_process_beside_the_first_trains_what_it_is_told_and_nothing_else(
    both: tuple[Peers, Peers], monkeypatch: pytest.MonkeyPatch
):
    first, other = both
    trained: list[list[int]] = []
    monkeypatch.setattr(devices, "prepare_cell", lambda cfg, _: cfg)
    monkeypatch.setattr(devices, "follow_stack", lambda _, seeds: trained.append(seeds))

    def lead() -> None:
        for order in ORDERS:
            first.tell(order)
            with first.training():
                pass
        first.dismiss()

    assert at_once(lead, lambda: devices.follow(other)) == [None, 0]
    assert trained == [[0, 1], [4]]


def fail_in(peer: Peers) -> bool:
    with pytest.raises(RuntimeError, match="boom"), peer.training():
        raise RuntimeError("boom")
    return peer.is_apart


def test_failure_of_all_lets_the_next_order_follow(both: tuple[Peers, Peers]):
    first, other = both
    first.tell(ORDERS[0])
    other.hear()
    assert at_once(lambda: fail_in(first), lambda: fail_in(other)) == [False, False]
    first.tell(ORDERS[1])
    assert other.hear() == ORDERS[1]


@pytest.mark.parametrize("index", [0, 1])
def test_failure_of_one_alone_ends_what_they_do_together(
    both: tuple[Peers, Peers], index: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(peers, "GRACE_SECONDS", 0.2)
    first, other = both
    first.tell(ORDERS[0])
    other.hear()
    assert fail_in(both[index])
    if index == 1:
        other.leave()
    with pytest.raises(Interrupted):
        first.tell(ORDERS[1])


@pytest.mark.parametrize("index", [0, 1])
def test_first_process_alone_tells_a_dry_run_and_waits_for_none(
    index: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["trainer=ddp", "trainer.accelerator=cpu", "dry_run=true", f"runs_dir={tmp_path}"]
    for name, value in environment_of(index, 2, 29500).items():
        monkeypatch.setenv(name, value)
    assert main(words) == 0
    assert ("runs to do" in capsys.readouterr().out) == (index == 0)


@pytest.mark.slow
def test_processes_that_see_different_records_do_what_the_first_one_sees(tmp_path: Path):
    """The second one looks into a folder of its own, where nothing is recorded."""
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    common = ["trainer=ddp", "trainer.accelerator=cpu", "steps=4", "replicas=1", "log_every=1"]
    line = [sys.executable, "-m", "normexp.train", "-m", *common]
    path = {"PYTHONPATH": os.getcwd()}
    started = {**os.environ, **path}
    subprocess.run([*line, "norm=group"], cwd=folders[0], env=started, check=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    both = [
        subprocess.Popen(
            [*line, "norm=group,nowhere,batch"],
            cwd=folders[index],
            env=started | environment_of(index, 2, store.port),
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        (told, _), (silent, _) = [process.communicate(timeout=120) for process in both]
    finally:
        for process in both:
            process.kill()
            process.wait()
    assert [process.returncode for process in both] == [1, 0]  # norm=nowhere is refused
    assert "1 finished, 1 skipped, 1 refused" in told
    assert silent == ""
    (result,) = folders[0].glob("runs/default/batch-*/seed-0/result.json")
    assert read_result(result).status == "finished"
    assert not list(folders[1].iterdir())
