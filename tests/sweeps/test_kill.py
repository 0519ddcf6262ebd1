"""A study that is killed, shared or out of disk space ends like an undisturbed one.

`scripts/kill_campaign.py` does the same for longer.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from kill_campaign import GRID, WAYS, Campaign, differing, left_over, runs_of, unmounted

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    return Campaign(tmp_path_factory.mktemp("campaign"), seed=0)


@pytest.mark.parametrize("name", WAYS)
def test_disturbed_study_ends_as_the_whole_one(campaign: Campaign, name: str):
    study = campaign.runs / name.replace(" ", "-")
    campaign.disturb(WAYS[name], study.name)
    assert campaign.problems == []  # exit codes, and files torn or written twice on the way
    assert differing(study, campaign.runs / WAYS[name].whole) == []
    assert left_over(study) == []
    assert campaign.orphans() == set()


def test_study_on_a_full_disk_goes_on_when_there_is_room(campaign: Campaign):
    with unmounted(campaign.fill_disk("full")) as study:
        if study is None:
            pytest.skip("only root can mount a small disk")
        assert campaign.problems == []
        assert differing(study, campaign.runs / "whole") == []
        assert left_over(study) == []
        assert campaign.orphans() == set()


def test_two_commands_at_once_train_each_run_once(campaign: Campaign):
    words = [[*GRID, "replicas=4", f"workers={number}"] for number in (0, 2)]
    both = [campaign.type("shared", line) for line in words]
    assert [campaign.end("shared", command, {0}) for command in both] == [0, 0]
    assert differing(campaign.runs / "shared", campaign.runs / "whole") == []
    told = campaign.log("shared").read_text()
    lines = [line.split() for line in told.splitlines() if line.startswith("[")]
    assert len(lines) == 2 * 6  # of each command, one per cell: group norm mixes no samples
    trained = [line for line in lines if line[2] == "finished"]  # after "[4/24 runs]"
    assert len(trained) == 6


def test_rate_that_raises_takes_no_other_with_it(campaign: Campaign):
    runs = runs_of(campaign.runs / "failing").items()
    ends = Counter(("lr30000" in Path(name).parts[0], run["status"]) for name, run in runs)
    assert ends == {(False, "finished"): 6, (True, "failed"): 2}
