"""Rollouts: steps an environment with the NumPy actor, and computes advantages. The bits do not depend on the rank.

Every episode has its own random streams, derived from the seed and the episode's key, so that it does not matter which
rank runs it, nor what that rank ran before.
"""

import contextlib
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np

from policies.actor import Actor, Spec
from policies.returns import gae
from policies.scaler import Scaler
from trainer.environment import action_map

ENV_STREAM, NOISE_STREAM, EVAL_STREAM = 1, 2, 3
FIRST_ROWS = 256
NOISE_ROWS = 64


def _clock() -> np.ndarray:
    """Wall-clock seconds; seconds of sleep of this thread; number of times that it gave up its core voluntarily."""
    now, cpu, waited = time.perf_counter(), time.thread_time(), 0.0
    with contextlib.suppress(OSError), open("/proc/thread-self/schedstat") as file:
        waited = int(file.read().split()[1]) * 1e-9  # runnable, without a core
    return np.array([now, now - cpu - waited, resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw])


class Runner:
    """Steps one environment with the actor.

    A batch is a dict of arrays over T steps: obs float32 (T, obs_dim), unscaled; act float32 (T, act_dim) or int64
    (T,), as the actor drew them; adv and ret (TD(lambda) returns) float32 (T,), in scaled rewards; ep_ret float64 and
    ep_len int64, (1,) if the episode ended in it, else (0,); work float64 (1, 3): seconds that it took, seconds of
    sleep among these, and number of times that the core was given up.
    """

    def __init__(
        self,
        env: gym.Env,
        actor: Actor,
        scaler: Scaler,
        rew_scale: np.ndarray,
        seed: int,
        gamma: float,
        lam: float,
        greedy: bool = False,
    ):
        """A runner.

        Args:
            rew_scale: (1,), factor of the rewards; may change between calls of `run`.
            seed: of the run.
            gamma, lam: as policies.returns.gae takes them.
            greedy: act deterministically, in episodes that training does not use.
        """
        self.env, self.actor, self.scaler = env, actor, scaler
        self._act = (lambda obs, _: actor.mode(obs)) if greedy else actor.act
        self._env_stream = EVAL_STREAM if greedy else ENV_STREAM
        self.seed, self.gamma, self.lam = seed, gamma, lam
        self.rew_scale = rew_scale
        _, self.discrete, self.to_env = action_map(env.action_space)
        self._obs = self._rows(FIRST_ROWS)
        self._scaled = self._rows(FIRST_ROWS)
        self._acts: list = []
        self._rews: list[float] = []
        self._work = np.zeros(3)

    def _rows(self, n: int) -> np.ndarray:
        return np.empty((n, self.actor.spec.obs_dim), np.float32)

    def start(self, *key: int) -> None:
        """Starts an episode. Args: key: its number, or several; selects its random streams."""
        began = _clock()
        kinds = (self._env_stream, NOISE_STREAM)
        seeds = [np.random.SeedSequence(self.seed, spawn_key=(kind, *key)) for kind in kinds]
        self._obs[0] = self.env.reset(seed=int(seeds[0].generate_state(1)[0]))[0]
        self._noise = self._draw(np.random.default_rng(seeds[1]))
        self.name = "/".join(map(str, key))
        self.ep_ret, self.ep_len = 0.0, 0
        self._work += _clock() - began

    def _draw(self, rng: np.random.Generator) -> Iterator[Any]:
        while True:
            yield from self.actor.noise(rng, NOISE_ROWS)

    def run(self, n_steps: int | None = None, stop: Callable[[], bool] = lambda: False) -> tuple[dict | None, bool]:
        """Steps to the end of the episode, or for `n_steps`.

        Args:
            n_steps: most steps; None: the whole episode.
            stop: called before each step; True drops the episode.

        Returns:
            (batch, True if the episode ended); the batch is None if it was dropped.

        Raises:
            FloatingPointError: a reward or observation is not finite.
        """
        began = _clock()
        t, ended, terminated = 0, False, False
        self._acts.clear()
        self._rews.clear()
        step, act, scale, to_env = self.env.step, self._act, self.scaler.scale, self.to_env
        while not ended and t != n_steps:
            if stop():
                return None, False
            if t + 2 > len(self._obs):
                self._grow()
            action = act(scale(self._obs[t], self._scaled[t]), next(self._noise))
            obs, rew, terminated, truncated, _ = step(to_env(action))
            t += 1
            self._obs[t] = obs
            self._acts.append(action)
            self._rews.append(float(rew))
            ended = terminated or truncated
        batch = self._batch(t, ended, terminated)
        batch["work"], self._work = (self._work + _clock() - began)[None], np.zeros(3)
        return batch, ended

    def _grow(self) -> None:
        for name in ("_obs", "_scaled"):
            setattr(self, name, np.concatenate([getattr(self, name), self._rows(len(self._obs))]))

    def _batch(self, t: int, ended: bool, terminated: bool) -> dict[str, Any]:
        """The batch of the last `t` steps; the observation after them becomes the first one of the next batch."""
        rew = np.array(self._rews)
        if not (np.isfinite(rew).all() and np.isfinite(self._obs[: t + 1]).all()):
            what = "reward" if not np.isfinite(rew).all() else "observation"
            at = self.ep_len + int(np.argmin(np.isfinite(rew)) if what == "reward" else 0)
            raise FloatingPointError(f"episode {self.name} has a {what} that is not finite (from step {at} on)")
        self.ep_ret += float(rew.sum())
        self.ep_len += t
        self.scaler.scale(self._obs[t], self._scaled[t])
        val = self.actor.value(self._scaled[: t + 1])
        last_val = 0.0 if terminated else float(val[t])
        rew *= self.rew_scale[0]
        adv = gae(rew, val[:t], last_val, self.gamma, self.lam)
        batch = {
            "obs": self._obs[:t].copy(),
            "act": np.array(self._acts, np.int64 if self.discrete else np.float32),
            "adv": adv,
            "ret": adv + val[:t],  # TD(lambda) returns: less noisy targets than Monte Carlo returns
            "ep_ret": np.array([self.ep_ret] if ended else [], np.float64),
            "ep_len": np.array([self.ep_len] if ended else [], np.int64),
        }
        self._obs[0] = self._obs[t]
        return batch


def empty_batch(spec: Spec) -> dict[str, np.ndarray]:
    """A batch like Runner's, of no steps."""
    none = np.empty(0, np.float32)
    return {
        "obs": np.empty((0, spec.obs_dim), np.float32),
        "act": np.empty(0, np.int64) if spec.discrete else np.empty((0, spec.act_dim), np.float32),
        "adv": none,
        "ret": none,
        "ep_ret": np.empty(0),
        "ep_len": np.empty(0, np.int64),
        "work": np.empty((0, 3)),
    }
