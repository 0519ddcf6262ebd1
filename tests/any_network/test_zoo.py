"""A zoo of foreign networks keeps what `replace_norms` and `diagnose` promise; see zoo.py.

Networks of packages take minutes: `python tests/any_network/zoo.py --networks packages --seed 1`.
"""

from __future__ import annotations

import pytest
from zoo import check
from zoo_case import Case
from zoo_forwards import FORWARDS
from zoo_maps import MAPS
from zoo_rows import ROWS

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("case", [*MAPS, *ROWS, *FORWARDS], ids=lambda case: case.name)
def test_small_networks_after_what_people_publish(case: Case) -> None:
    assert not check(case).wrong
