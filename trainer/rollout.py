"""Rollouts: steps an environment with the NumPy actor, and computes advantages. The bits do not depend on the rank.

Every episode has its own random streams, derived from the seed and the episode's key, so that it does not matter which
rank runs it, nor what that rank ran before. An episode can continue in another environment, in which its actions so
far are replayed: so segments are resumed, and so a failed environment is replaced.
"""

import contextlib
import itertools
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from policies.actor import Actor, Spec
from policies.returns import gae
from policies.scaler import Scaler
from trainer.config import Config
from trainer.control import Control, NotFinite
from trainer.environment import action_map, make_env

ENV_STREAM, NOISE_STREAM, EVAL_STREAM = 1, 2, 3
FIRST_ROWS = 256
NOISE_ROWS = 64
ATTEMPTS = 3  # of an episode whose environment fails, in a row
MOST_REPLAYED = 100_000  # steps; of a longer episode no actions are kept, so that endless ones do not fill the memory


@dataclass(frozen=True)
class Episode:
    """An episode so far: what it takes to continue it in another environment of its kind.

    Attributes:
        key: its number, or several; selects its random streams.
        length: number of steps so far. ret: float, sum of their rewards.
        obs: float32 (obs_dim,), the observation after them; None before the first step.
        acts, rews: actions, as the actor drew them, and float64 rewards, as many arrays as calls of Runner.run.
    """

    key: tuple[int, ...]
    length: int = 0
    ret: float = 0.0
    obs: np.ndarray | None = None
    acts: tuple[np.ndarray, ...] = ()
    rews: tuple[np.ndarray, ...] = ()

    @property
    def next(self) -> "Episode":
        """The episode after it, with a last number of one more."""
        return Episode((*self.key[:-1], self.key[-1] + 1))

    @property
    def name(self) -> str:
        """For messages: the key, such as 3/17."""
        return "/".join(map(str, self.key))

    def after(self, obs: np.ndarray, act: np.ndarray, rew: np.ndarray) -> "Episode":
        """The episode with more steps. Args: obs: the last observation, copied. act, rew: of these steps, kept."""
        length, ret = self.length + len(rew), self.ret + float(rew.sum())
        kept = length <= MOST_REPLAYED
        return Episode(self.key, length, ret, obs.copy(), (*self.acts, act) * kept, (*self.rews, rew) * kept)

    def pack(self, spec: Spec) -> dict[str, np.ndarray]:
        """Arrays for a checkpoint; those of several episodes may be concatenated. See `unpack`."""
        return {
            "episodes/at": np.array([[self.key[-1], self.length, sum(map(len, self.rews))]]),
            "episodes/ret": np.array([self.ret]),
            "episodes/obs": np.zeros((1, spec.obs_dim), np.float32) if self.obs is None else self.obs[None],
            "episodes/act": np.concatenate((empty_batch(spec)["act"], *self.acts)),
            "episodes/rew": np.concatenate((np.empty(0), *self.rews)),
        }

    @classmethod
    def unpack(cls, arrays: dict[str, np.ndarray], e: int) -> "Episode":
        """Episode (e, number), from the arrays of the episodes of environments 0, 1, ..."""
        at, ret, obs, *kept = (arrays[f"episodes/{name}"] for name in ("at", "ret", "obs", "act", "rew"))
        (number, length, n), end = map(int, at[e]), int(at[: e + 1, 2].sum())
        return cls((e, number), length, float(ret[e]), obs[e], *((rows[end - n : end],) for rows in kept))


class Runner:
    """Steps one environment with the actor.

    A batch is a dict of arrays over T steps: obs float32 (T, obs_dim), unscaled; act float32 (T, act_dim) or int64
    (T,), as the actor drew them; adv and ret (TD(lambda) returns) float32 (T,), in scaled rewards; ep_ret float64 and
    ep_len int64, (1,) if the episode ended in it, else (0,); work float64 (1, 4): seconds that it took, seconds of
    sleep among these, and how often the core was given up and the environment made again.

    Attributes:
        episode: Episode that was started last, up to the end of the last run.
    """

    episode: Episode | None = None

    def __init__(self, env: gym.Env, actor: Actor, scaler: Scaler, config: Config, control: Control, greedy=False):
        """Args: env: of this runner alone. greedy: act deterministically, in episodes that training does not use."""
        self.env, self.actor, self.scaler, self.config, self.control = env, actor, scaler, config, control
        self.failures, self.restarts = 0, 0  # of the environment: in a row; in all
        self._act = (lambda obs, _: actor.mode(obs)) if greedy else actor.act
        self._stream = EVAL_STREAM if greedy else ENV_STREAM
        self._render = {"render_mode": env.render_mode} if env.render_mode else {}
        _, self.discrete, self.to_env = action_map(env.action_space)
        self._obs = self._rows(FIRST_ROWS)
        self._scaled = self._rows(FIRST_ROWS)
        self._work = np.zeros(4)

    def _rows(self, n: int) -> np.ndarray:
        return np.empty((n, self.actor.spec.obs_dim), np.float32)

    def start(self, episode: Episode) -> bool:
        """Begins an episode, or continues one by replay. Returns: False if the environment did something else then."""
        began = self._meter()
        self.episode, self.failures = episode, 0
        reached = self._reach()
        self._work += self._meter() - began
        return reached

    def _meter(self) -> np.ndarray:
        """What `work` counts: wall-clock seconds; of sleep of this thread; cores given up voluntarily; restarts."""
        now, cpu, waited = time.perf_counter(), time.thread_time(), 0.0
        with contextlib.suppress(OSError), open("/proc/thread-self/schedstat") as file:
            waited = int(file.read().split()[1]) * 1e-9  # runnable, without a core
        return np.array([now, now - cpu - waited, resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw, self.restarts])

    def _reach(self) -> bool:
        """Brings the environment to where the episode is, or a new one if it fails. Returns: as `start`."""
        while True:
            try:
                if self.env is None:
                    self.env = make_env(self.config.env, self.config.env_arguments | self._render, quiet=True)
                return self._replay()
            except (Exception, SystemExit) as error:
                self._try_again(error)

    def _replay(self) -> bool:
        """Resets the environment, and replays the episode so far. Returns: as `start`."""
        episode, rews, ended, seed = self.episode, [], False, self.config.seed
        seeds = [np.random.SeedSequence(seed, spawn_key=(kind, *episode.key)) for kind in (self._stream, NOISE_STREAM)]
        self._noise = self._draw(np.random.default_rng(seeds[1]))
        obs = self.env.reset(seed=int(seeds[0].generate_state(1)[0]))[0]
        for action in itertools.chain.from_iterable(act.tolist() if self.discrete else act for act in episode.acts):
            if ended:
                break
            next(self._noise)
            obs, rew, terminated, truncated, _ = self.env.step(self.to_env(action))
            rews.append(float(rew))
            ended = terminated or truncated
        self._obs[0] = obs
        same = rews == list(itertools.chain.from_iterable(episode.rews)) and np.array_equal(self._obs[0], episode.obs)
        return not episode.length or (same and len(rews) == episode.length and not ended)

    def _try_again(self, error: BaseException) -> None:
        """After a failure of the environment: a new one, in which the episode runs again; or raises the error."""
        self.failures += 1
        if self.config.on_env_error == "abort" or self.failures == ATTEMPTS:
            raise RuntimeError("the environment calls sys.exit") if isinstance(error, SystemExit) else error
        self.restarts += 1
        what = " ".join("".join(traceback.format_exception_only(error)).split())
        print(f"train.py: episode {self.episode.name}: {what:.300}; run again in a new environment", file=sys.stderr)
        with contextlib.suppress(Exception):
            self.env.close()
        self.env = None

    def _draw(self, rng: np.random.Generator) -> Iterator[Any]:
        while True:
            yield from self.actor.noise(rng, NOISE_ROWS)

    @np.errstate(over="ignore", invalid="ignore")  # what is not finite gets one line, and no warnings before it
    def run(self, n_steps: int | None = None, stop: Callable[[], bool] = lambda: False) -> tuple[dict | None, bool]:
        """Steps to the end of the episode, or for `n_steps`.

        Args:
            n_steps: most steps; None: the whole episode.
            stop: called before each step; True drops the episode.

        Returns:
            (batch, True if the episode ended). (None, False): it was dropped. (None, True): the environment failed, and
            the episode could not be replayed in a new one.

        Raises:
            NotFinite: an observation, action, reward or advantage is not finite; one line that says which.
        """
        began = self._meter()
        t, ended, terminated, acts, rews = 0, False, False, [], []
        step, choose, scale, to_env = self.env.step, self._act, self.scaler.scale, self.to_env
        while not ended and t != n_steps:
            if stop():
                return None, False
            if t + 2 > len(self._obs):
                self._obs, self._scaled = (np.concatenate([a, self._rows(len(a))]) for a in (self._obs, self._scaled))
                self._require_finite(self._obs[:t], acts, rews)  # it may never end
            acts.append(choose(scale(self._obs[t], self._scaled[t]), next(self._noise)))
            try:
                obs, rew, terminated, truncated, _ = step(to_env(acts[t]))
                self._obs[t + 1] = obs
                rews.append(float(rew))
            except (Exception, SystemExit) as error:
                self._require_finite(self._obs[: t + 1], acts, rews)  # what it failed of, perhaps
                self._try_again(error)
                if not self._reach():
                    return None, True
                t, acts, rews, step = 0, [], [], self.env.step
                continue
            t += 1
            ended = terminated or truncated
        batch = self._batch(t, acts, rews, ended, terminated)
        batch["work"], self._work, self.failures = (self._work + self._meter() - began)[None], np.zeros(4), 0
        return batch, ended

    def _batch(self, t: int, acts: list, rews: list[float], ended: bool, terminated: bool) -> dict[str, Any]:
        """The batch of the last `t` steps; the observation after them becomes the first one of the next batch."""
        act, rew = np.array(acts, np.int64 if self.discrete else np.float32), np.array(rews)
        self._require_finite(self._obs[: t + 1], act, rew)
        self.scaler.scale(self._obs[t], self._scaled[t])
        val = self.actor.value(self._scaled[: t + 1])
        last_val = 0.0 if terminated else float(val[t])
        adv = gae(rew * self.control.rew_scale[0], val[:t], last_val, self.config.gamma, self.config.lam)
        self._require_finite((), (), (), adv)
        self.episode = self.episode.after(self._obs[t], act, rew)
        batch = {
            "obs": self._obs[:t].copy(),
            "act": act,
            "adv": adv,
            "ret": adv + val[:t],  # TD(lambda) returns: less noisy targets than Monte Carlo returns
            "ep_ret": np.array([self.episode.ret] if ended else [], np.float64),
            "ep_len": np.array([self.episode.length] if ended else [], np.int64),
        }
        self._obs[0] = self._obs[t]
        return batch

    def _require_finite(self, obs: Any, act: Any, rew: Any, adv: Any = ()) -> None:
        """Raises NotFinite, which names the first number that is not finite. Args: since the last batch."""
        found = []
        for name, values in (("observation", obs), ("action", act), ("reward", rew), ("advantage", adv)):
            if not np.isfinite(values).all():
                at = tuple(np.argwhere(~np.isfinite(values))[0])
                found.append((at[0], name + f"[{at[-1]}]" * (len(at) > 1), np.asarray(values)[at]))
        if found:
            step, name, value = min(found, key=lambda place: place[0])  # of one step the first, which causes the others
            episode = self.episode
            raise NotFinite(f"episode {episode.name}, step {episode.length + step}: {name} is {value}")


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
        "work": np.empty((0, 4)),
    }
