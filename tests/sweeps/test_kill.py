"""A study that is killed, shared, or out of disk space ends as one that nothing disturbed.

`scripts/kill_campaign.py` does the same for longer.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kill_campaign import GRID, WAYS, Campaign, check, train_whole

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    campaign = Campaign(tmp_path_factory.mktemp("campaign"), seed=0)
    train_whole(campaign)
    yield campaign
    campaign.close()


@pytest.mark.parametrize("way", WAYS)
def test_disturbed_study_ends_as_the_whole_one(campaign: Campaign, way: str):
    before = campaign.kills.total()
    WAYS[way](campaign, way.replace(" ", "-"))
    if way == "full disk" and campaign.kills.total() == before:
        pytest.skip("only root can mount a small disk")


def test_two_commands_at_once_train_each_run_once(campaign: Campaign):
    words = [[*GRID, "replicas=4", f"workers={number}"] for number in (0, 2)]
    both = [campaign.command("shared", line) for line in words]
    assert [command.wait() for command in both] == [0, 0]
    check(campaign, "shared", "whole")
    told = (campaign.folder / "shared.log").read_text()
    lines = [line.split() for line in told.splitlines() if line.startswith("[")]
    assert len(lines) == 2 * 8  # each command has a line for each of its cells
    trained = [line for line in lines if line[1] == "finished"]
    assert len(trained) == 6  # of which six differ, as group norm mixes no samples
