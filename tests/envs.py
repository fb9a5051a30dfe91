"""Environments that misbehave, for the tests: `tests.envs:NanReward-v0`."""

import gymnasium as gym
import numpy as np


class NanReward(gym.Env):
    """Gives a reward that is not a number in the third step of every episode whose first observation is above 0.9."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.obs = self.np_random.uniform(-1, 1, 2)
        return self.obs, {}

    def step(self, action):
        self.t += 1
        return self.obs, float("nan") if self.t == 3 and self.obs[0] > 0.9 else 1.0, self.t == 5, False, {}


class Uneven(gym.Env):
    """Episodes of very different lengths; observations are a dict, actions start at 2; some episodes are truncated."""

    observation_space = gym.spaces.Dict({"a": gym.spaces.Box(-9, 9, (2, 2)), "b": gym.spaces.Discrete(3)})
    action_space = gym.spaces.Discrete(3, start=2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, 60))
        self.truncates = bool(self.np_random.integers(2))
        return self.look(), {}

    def look(self):
        return {"a": self.np_random.normal(size=(2, 2)).astype(np.float32), "b": int(self.np_random.integers(3))}

    def step(self, action):
        assert action in self.action_space
        self.left -= 1
        done = self.left <= 0
        return self.look(), float(action == 3), done and not self.truncates, done and self.truncates, {}


class Broken(gym.Env):
    """Raises in the fifth step."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Box(-1, 1, (1,))

    def reset(self, seed=None, options=None):
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        if self.t == 5:
            raise RuntimeError("the simulator fell over")
        return np.zeros(2, np.float32), 0.0, False, False, {}


for env in (NanReward, Uneven, Broken):
    gym.register(f"{env.__name__}-v0", env)
