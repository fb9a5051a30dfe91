"""An environment that sleeps in each step, to measure what more ranks gain where cores are not the limit.

Gymnasium id `benchmarks.sleeping_env:Sleeping-v0`.
"""

import time
from typing import Any

import gymnasium as gym
import numpy as np

STEP_S = 5e-3
EPISODE_STEPS = 20


class Sleeping(gym.Env):
    """Observations float32 (4,), one action component in [-1, 1], 20 steps an episode, reward 1 each."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """A random observation."""
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Sleeps, then gives another random observation."""
        time.sleep(STEP_S)
        return self._observe(), 1.0, False, False, {}

    def _observe(self) -> np.ndarray:
        return self.np_random.uniform(-1.0, 1.0, 4).astype(np.float32)


gym.register("Sleeping-v0", entry_point=Sleeping, max_episode_steps=EPISODE_STEPS)
