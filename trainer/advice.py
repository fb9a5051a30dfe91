"""What a run is told once: that its return does not rise any more."""

import contextlib
import math
from bisect import bisect
from collections.abc import Mapping
from statistics import fmean

import gymnasium as gym

from trainer.config import Config

# Chosen on the kept curves of docs/learning.md: runs that learn well may rest for a quarter of a million steps.
FLAT_SHARE, FLAT_STEPS, FLAT_STEPS_ENDLESS = 0.3, 150_000, 500_000  # least age, of the whole run; of one without an end
GROWTH = 0.05  # least rise, of what was learned before
SOLVED = 0.8  # of the way to the environment's reward threshold: from here on a flat return is no failure


class Standstill:
    """Compares the returns in the second half of the steps with those in the quarter before."""

    def __init__(self, config: Config):
        total, self._solved = config.total_steps, math.inf
        self._least = max(FLAT_SHARE * total, FLAT_STEPS) if total else FLAT_STEPS_ENDLESS
        with contextlib.suppress(gym.error.Error, ImportError):  # it may have no entry
            if (threshold := gym.spec(config.env.rpartition(":")[2]).reward_threshold) is not None:
                self._solved = threshold
        self._steps, self._rets = list[float](), list[float]()  # of rows in which an episode has ended

    def after(self, row: Mapping[str, float]) -> str:
        """Adds a row of progress.txt. Returns: the advice, one line; else ""."""
        steps, rets = row["TotalEnvInteracts"], self._rets
        if not math.isnan(row["AverageEpRet"]):
            self._steps.append(steps)
            rets.append(row["AverageEpRet"])
        quarter, half = (bisect(self._steps, steps * share) for share in (0.25, 0.5))
        if steps < self._least or not quarter < half < len(rets):
            return ""
        first, before, now = rets[0], fmean(rets[quarter:half]), fmean(rets[half:])
        if now > first + SOLVED * (self._solved - first) or now > before + GROWTH * abs(before - first):
            return ""
        self._least = math.inf  # it is said once
        what = f"the return has hardly risen for {steps / 2:,.0f} steps: {now:,.1f}, before that {before:,.1f}; "
        what += "if more is possible, try another --seed, --gamma 0.999 if rewards come late, "
        return what + "--ent_coef 0.01 if it tries too little"
