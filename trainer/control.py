"""The values that rank 0 broadcasts with the weights, so that all ranks take the same decisions."""

from typing import Any

import numpy as np

# values of Control.stop: the run ends after this iteration; it ends now, without this iteration; no more is collected
STOP, DROPPED, LAST = 1, 2, 3
# discounts where none is given: NEAR in the first iteration; FAR, until an episode ends within HORIZON steps; then NEAR
FAR, NEAR = 0.997, 0.99
HORIZON = round(1.0 / (1.0 - FAR))


class BadData(Exception):
    """Nothing can be learned from what came of an environment or an update; one line says of what, and why."""


def _integer(name: str) -> Any:
    """An attribute of Control that is kept in an array, which a broadcast overwrites."""
    return property(lambda own: int(own.arrays[name][0]), lambda own, value: own.arrays[name].fill(value))


class Control:
    """What rank 0 decides, and how far the run is."""

    stop = _integer("stop")  # 0, STOP, DROPPED or LAST
    evaluate = _integer("evaluate")  # 1: after this iteration. In a checkpoint: a stop came before that was done
    save = _integer("save")  # 1: write a checkpoint after this iteration
    iteration = _integer("iteration")  # updates so far
    episodes = _integer("episodes")  # collected so far, by all ranks
    steps = _integer("steps")  # of the environments that the updates have learned from

    def __init__(self, gamma: float | None = None):
        """Args: gamma: None: it follows the episodes."""
        first = NEAR if gamma is None else gamma
        self.gamma = np.array([first])  # float64 (1,), the discount
        # float64 (1,), the factor of the rewards; Coady's at first: returns then are of the size of one reward
        self.rew_scale = np.array([1.0 - first if first < 0.999 else 1.0])
        names = "stop", "evaluate", "save", "iteration", "episodes", "steps"  # int64 (1,)
        # what is broadcast and saved, overwritten in place
        self.arrays = {"rew_scale": self.rew_scale, "gamma": self.gamma} | {k: np.zeros(1, np.int64) for k in names}

    @property
    def ended(self) -> bool:
        """True if the run ends now."""
        return self.stop in (STOP, DROPPED)
