"""A study that is killed, or shared by two terminals, ends like an undisturbed one.

`scripts/kill_campaign.py` does the same for longer.
"""

from __future__ import annotations

import pytest
from kill_campaign import WAYS, Campaign

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    return Campaign(tmp_path_factory.mktemp("campaign"), seed=0)


@pytest.mark.parametrize("name", WAYS)
def test_disturbed_study_ends_as_the_whole_one(campaign: Campaign, name: str):
    campaign.disturb(WAYS[name], name.replace(" ", "-"))
    assert campaign.problems == []
