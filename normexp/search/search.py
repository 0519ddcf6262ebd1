"""One search: which point is tried next, and what came of those before. The one that knows Optuna.

The sampler is made anew for each trial, from a seed of its own: what is proposed depends on the
trials that are told and on nothing else. So a search that was killed goes on as if it had not
been, where one sampler with one seed would propose its first points again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from normexp.search.objective import Objective
from normexp.search.points import Choice, Dimension, SearchPlan

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

RETRY_OF = "retry_of"
RANDOM_TRIALS = 5  # before the sampler follows a model of what was told


@dataclass(frozen=True)
class Trial:
    """A point that was told, or is to be trained.

    value: the objective; None where it failed, was stopped early, or has not been told.
    """

    number: int
    point: dict[str, str]
    state: str  # running, complete, pruned or fail
    value: float | None
    by_epoch: Mapping[int, float]
    retry_of: int | None = None  # the number of a failed trial whose place it takes


class Search:
    """A search in Optuna's storage, under a name that stands for everything that defines it."""

    def __init__(
        self, plan: SearchPlan, name: str, objective: Objective, storage: BaseStorage
    ) -> None:
        import optuna

        self.plan = plan
        self.name = name
        self.objective = objective
        self._storage = storage
        self._study = optuna.create_study(
            storage=storage,
            study_name=name,
            direction=objective.direction,
            load_if_exists=True,
        )
        self._study_id = storage.get_study_id_from_name(name)
        self._distributions = {d.key: _distribution(d) for d in plan.space.dimensions}
        self._end_half_made()
        self._failed_before = [trial for trial in self.ended() if trial.state == "fail"]

    @property
    def is_whole(self) -> bool:
        """Whether every point is tried: choices alone, with no more points than trials."""
        points = self.plan.space.num_points()
        return points is not None and points <= self.plan.base.tune.trials

    @property
    def target(self) -> int:
        """How many trials the search has in the end."""
        points = self.plan.space.num_points()
        return points if self.is_whole and points is not None else self.plan.base.tune.trials

    def trials(self) -> list[Trial]:
        """All trials by number; one that was killed before it had a point is no trial."""
        found = self._study.get_trials(deepcopy=False)
        return [self._read(trial) for trial in found if set(trial.params) == set(self._keys)]

    def ended(self) -> list[Trial]:
        """Those that count: told, and not tried again since."""
        trials = self.trials()
        replaced = {trial.retry_of for trial in trials}
        return [t for t in trials if t.state != "running" and t.number not in replaced]

    def best(self) -> Trial | None:
        """The best trial, the first of equals; None where none is better than the worst value."""
        return next(reversed(self.bests()), None)

    def bests(self) -> list[Trial]:
        """By number, each trial that was better than all before it."""
        bests: list[Trial] = []
        for trial in self.trials():
            if trial.value is None or trial.state != "complete":
                continue
            before = bests[-1].value if bests else None
            if self.objective.is_better(
                trial.value, self.objective.worst if before is None else before
            ):
                bests.append(trial)
        return bests

    def propose(self) -> list[Trial]:
        """What is to be trained next; empty at the end.

        First what a killed command left, then, once in a command, what failed before it. Then all
        points at once where every point is tried, else one, as the next follows from it.
        """
        left = [trial for trial in self.trials() if trial.state == "running"]
        if left:
            return left
        if self._failed_before:
            again, self._failed_before = self._failed_before, []
            return [self._ask_again(trial) for trial in again]
        if not self.is_whole:
            return [self._ask()] if len(self.ended()) < self.target else []
        tried = [trial.point for trial in self.ended()]
        proposed = []
        for point in self.plan.space.points():
            if point not in tried:
                self._study.enqueue_trial(point)
                proposed.append(self._ask())
        return proposed

    def _ask_again(self, failed: Trial) -> Trial:
        params = {d.key: _value(d, failed.point[d.key]) for d in self.plan.space.dimensions}
        self._study.enqueue_trial(params, user_attrs={RETRY_OF: failed.number})
        return self._ask()

    def tell(
        self, trial: Trial, value: float | None, by_epoch: Mapping[int, float], *, pruned: bool
    ) -> None:
        """Records what a trial came to; no value: it failed, or was stopped early."""
        from optuna.trial import TrialState

        trial_id = self._storage.get_trial_id_from_study_id_trial_number(
            self._study_id, trial.number
        )
        for epoch, mean in by_epoch.items():
            self._storage.set_trial_intermediate_value(trial_id, epoch, mean)
        if value is not None:
            self._study.tell(trial.number, value)
        else:
            state = TrialState.PRUNED if pruned else TrialState.FAIL
            self._study.tell(trial.number, state=state)

    @property
    def _keys(self) -> Sequence[str]:
        return self.plan.space.keys

    def _ask(self) -> Trial:
        import optuna

        seeds = np.random.SeedSequence([self.plan.base.tune.first_seed, len(self.ended())])
        self._study.sampler = optuna.samplers.TPESampler(
            n_startup_trials=RANDOM_TRIALS, seed=int(seeds.generate_state(1)[0])
        )
        asked = self._study.ask(self._distributions)
        return Trial(asked.number, self._point(asked.params), "running", None, {})

    def _end_half_made(self) -> None:
        """A process that was killed in the middle of a proposal left a trial without a point."""
        from optuna.trial import TrialState

        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if set(trial.params) != set(self._keys):
                self._study.tell(trial.number, state=TrialState.FAIL)

    def _read(self, trial: FrozenTrial) -> Trial:
        return Trial(
            number=trial.number,
            point=self._point(trial.params),
            state=trial.state.name.lower(),
            value=trial.value if trial.state.name == "COMPLETE" else None,
            by_epoch=dict(trial.intermediate_values),
            retry_of=trial.user_attrs.get(RETRY_OF),
        )

    def _point(self, params: Mapping[str, Any]) -> dict[str, str]:
        """Values as typed; in the order of the space, whatever order Optuna holds them in."""
        return {
            d.key: params[d.key] if isinstance(d, Choice) else d.text_of(params[d.key])
            for d in self.plan.space.dimensions
        }


def _value(dimension: Dimension, text: str) -> str | float:
    if isinstance(dimension, Choice):
        return text
    return int(text) if dimension.whole else float(text)


def _distribution(dimension: Dimension) -> BaseDistribution:
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    if isinstance(dimension, Choice):
        return CategoricalDistribution(dimension.texts)
    if dimension.whole:
        return IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log)
    return FloatDistribution(dimension.low, dimension.high, log=dimension.log)
