"""Environments that misbehave, for the tests: `tests.envs:Broken-v0`."""

import builtins
import contextlib
import multiprocessing
import os
import threading

import gymnasium as gym
import numpy as np


class NotFinite(gym.Env):
    """If NOT_FINITE says so, such as "reward nan", then where the first observation is above 0.9 it is, in step 3."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        self.where, value = os.environ.get("NOT_FINITE", "nothing 0").split()
        self.value = float(value)

    def bad(self, where):
        return where == self.where and self.obs[0] > 0.9 and (self.t == 3 or where == "reset")

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.obs = self.np_random.uniform(-1, 1, 2)
        return np.array([self.obs[0], self.value if self.bad("reset") else 0.0]), {}

    def step(self, action):
        self.t += 1
        if np.isnan(self.obs[1]):
            raise RuntimeError("the simulator was given NaN")
        self.obs[1] = np.nan if self.bad("crash") else self.obs[1]
        obs = np.array([self.obs[0], self.value if self.bad("observation") else self.obs[1]])
        return obs, self.value if self.bad("reward") else 1.0, self.t == 5, False, {}


class Uneven(gym.Env):
    """Episodes of very different lengths; observations are a dict, actions start at 2; some episodes are truncated.

    The file that MPI_UTIL_TEST_RAISE_ONCE names is made by an exception in the 40th episode of a process.
    """

    observation_space = gym.spaces.Dict({"a": gym.spaces.Box(-9, 9, (2, 2)), "b": gym.spaces.Discrete(3)})
    action_space = gym.spaces.Discrete(3, start=2)

    episodes = 0

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.episodes += 1
        once = os.environ.get("MPI_UTIL_TEST_RAISE_ONCE")
        if once and self.episodes == 40 and not os.path.exists(once):
            open(once, "w").close()
            raise RuntimeError("a flaw")
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


class Same(gym.Env):
    """Each step brings the same, whatever is done, and one in 300 ends the episode: a pole that hardly ever falls."""

    observation_space = gym.spaces.Box(-9, 9, (2,))
    action_space = gym.spaces.Box(-1, 1, (1,))

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return self.look(), {}

    def look(self):
        return self.np_random.normal(size=2).astype(np.float32)

    def step(self, action):
        return self.look(), 1.0, self.np_random.random() < 1 / 300, False, {}


class Broken(gym.Env):
    """Raises in the fifth step; or as BROKEN says, such as "reset OSError"."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Box(-1, 1, (1,))

    def reset(self, seed=None, options=None):
        self.t = 0
        self.fail("reset")
        return np.zeros(2, np.float32), {}

    def fail(self, where):
        place, error = os.environ.get("BROKEN", "step RuntimeError").split()
        if where == place:
            raise getattr(builtins, error)(0 if error == "SystemExit" else "the simulator fell over")

    def step(self, action):
        self.t += 1
        if self.t == 5:
            self.fail("step")
        return np.zeros(2, np.float32), 0.0, False, False, {}


class Walk(gym.Env):
    """A noisy walk of 20 to 200 steps. Raises as FLAKY says, a folder: once each, in whichever process comes first."""

    observation_space = gym.spaces.Box(-9, 9, (2,))
    action_space = gym.spaces.Box(-1, 1, (2,))
    render_mode = None

    def __init__(self):
        self.resets = self.calm = 0
        self.tried = False  # by train.py before the run, which plays the episodes of the seeds 0 and 1
        if "FLAKY" in os.environ and os.path.exists(f"{os.environ['FLAKY']}/step"):
            self.fail("init")

    def fail(self, where):
        if self.tried:
            return
        with contextlib.suppress(KeyError, FileExistsError):
            open(f"{os.environ['FLAKY']}/{where}", "x").close()
            raise RuntimeError(f"{where} failed")

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.resets, self.tried = self.resets + 1, seed in (0, 1)
        if self.resets == 3:
            self.fail("reset")
        self.t, self.left = 0, int(self.np_random.integers(20, 200))
        self.at = self.np_random.normal(size=2)
        return self.at.astype(np.float32), {}

    def step(self, action):
        self.t += 1
        self.calm = (self.calm + 1) * bool((np.abs(action) < 0.1).all())
        if self.t == 17:
            self.fail("step")
        # nowhere else are actions without noise, until a policy has learned, or processes of multiprocessing
        if self.calm == 9 or (self.t == 9 and multiprocessing.parent_process()):
            self.fail("evaluation")
        self.at = 0.9 * self.at + 0.3 * action + self.np_random.normal(size=2)
        return self.at.astype(np.float32), -float(np.square(self.at).sum()), self.t == self.left, False, {}


class Moody(Walk):
    """Never the same twice."""

    def step(self, action):
        obs, *rest = super().step(action)
        return obs + np.float32(np.random.uniform(-0.01, 0.01)), *rest


class Tiring(Walk):
    """Each episode is harder than the one before."""

    def step(self, action):
        return super().step(action / self.resets)


class Unseeded(Walk):
    """Has a generator that no seed reaches."""

    def __init__(self):
        super().__init__()
        self.own = np.random.default_rng()

    def step(self, action):
        return super().step(action + self.own.normal())


class Shared(Walk):
    """Of one simulator in the process, which ends with the first environment that is closed."""

    runs = False

    def __init__(self):
        super().__init__()
        Shared.runs = True

    def step(self, action):
        assert Shared.runs
        return super().step(action)

    def close(self):
        Shared.runs = False


class Threaded(Walk):
    """Has a thread that only `close` ends."""

    def __init__(self):
        super().__init__()
        self.over = threading.Event()
        threading.Thread(target=self.over.wait).start()

    def close(self):
        self.over.set()


class Sides(gym.Env):
    """Images of noise, whose left (0) or right half (1) is brighter: that one is to be chosen."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, size=20, shape=None, gives=""):
        """Args: gives: what is not in the space: "float", "turned"."""
        self.observation_space = gym.spaces.Box(0, 255, shape or (size, size, 3), np.uint8)
        self.gives = gives

    def look(self):
        self.bright = int(self.np_random.integers(2))
        image = self.np_random.integers(0, 100, self.observation_space.shape, np.uint8)
        np.split(image, 2, axis=1)[self.bright][...] += 100
        return {"float": image.astype(float), "turned": image.T}.get(self.gives, image)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.look(), {}

    def step(self, action):
        self.t += 1
        rew = float(action == self.bright)
        return self.look(), rew, self.t == 20, False, {}


for env in (NotFinite, Uneven, Same, Broken, Walk, Moody, Tiring, Unseeded, Shared, Threaded, Sides):
    gym.register(f"{env.__name__}-v0", env)


def wrong_network(name, obs_dim, outputs):
    """For --network: a network with too many outputs."""
    import torch

    return torch.nn.Linear(obs_dim, 7)


def noisy_network(name, obs_dim, outputs):
    """For --network: outputs that depend on chance."""
    import torch

    class Noisy(torch.nn.Linear):
        def forward(self, obs):
            return super().forward(obs) + torch.randn(outputs)

    return Noisy(obs_dim, outputs)


def centred_network(name, obs_dim, outputs):
    """For --network: outputs of a row that depend on the other rows."""
    import torch

    class Centred(torch.nn.Linear):
        def forward(self, obs):
            out = super().forward(obs)
            return out - out.mean(0)

    return Centred(obs_dim, outputs)
