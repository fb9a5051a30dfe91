"""Rollouts: steps an environment with the NumPy actor, and computes advantages. The bits do not depend on the rank.

Every episode has its own random streams, derived from the seed and the episode's key, so that it does not matter which
rank runs it, nor what that rank ran before. An episode can continue in another environment, in which its actions so
far are replayed: so segments are resumed, and so a failed environment is replaced.
"""

import contextlib
import itertools
import sys
import time
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import ArrayLike

from policies import actor as built_in
from policies.actor import Actor, Spec
from policies.mlp import aligned
from policies.scaler import Scaler
from trainer.config import Config
from trainer.control import BadData, Control
from trainer.environment import action_map, make_env

ENV_STREAM, NOISE_STREAM, EVAL_STREAM = 1, 2, 3
FIRST_ROWS, NOISE_ROWS = 256, 32
STOP_S = 1e-3  # seconds between two questions whether to stop; a longer step delays the next one
ATTEMPTS = 3  # of an episode whose environment fails, in a row
MOST_REPLAYED = 100_000  # steps; of a longer episode no actions are kept, so that endless ones do not fill the memory

QUIETLY = partial(np.errstate, over="ignore", invalid="ignore")  # what is not finite gets one line, not warnings too
Steps = Generator[np.ndarray, np.ndarray, Any]


@dataclass(frozen=True)
class Episode:
    """An episode so far: what it takes to continue it in another environment of its kind."""

    key: tuple[int, ...]  # its number, or several; selects its random streams
    length: int = 0  # number of steps so far
    ret: float = 0.0  # sum of their rewards
    obs: np.ndarray | None = None  # Spec.obs_dtype (obs_dim,), the observation after them; None before the first step
    acts: tuple[np.ndarray, ...] = ()  # as the actor drew them, as many arrays as calls of Runner.run
    rews: tuple[np.ndarray, ...] = ()  # float64, as many arrays as acts

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
            "episodes/obs": np.zeros((1, spec.obs_dim), spec.obs_dtype) if self.obs is None else self.obs[None],
            "episodes/act": np.concatenate((empty_batch(spec)["act"], *self.acts)),
            "episodes/rew": np.concatenate((np.empty(0), *self.rews)),
        }

    @classmethod
    def unpack(cls, arrays: dict[str, np.ndarray], e: int) -> "Episode":
        """Episode (e, number), from the arrays of the episodes of environments 0, 1, ..."""
        at, ret, obs, *kept = (arrays[f"episodes/{name}"] for name in ("at", "ret", "obs", "act", "rew"))
        (number, length, n), end = map(int, at[e]), int(at[: e + 1, 2].sum())
        return cls((e, number), length, float(ret[e]), obs[e], *((rows[end - n : end],) for rows in kept))


def networks(spec: Spec) -> ModuleType:
    """The module with `Actor` and `init_params`, which raise ValueError, one line, if a user's networks do not fit."""
    if spec.network:
        from policies.torch import modules  # here, as only such networks need torch

        return modules
    return built_in


class Runner:
    """Steps one environment with the actor.

    A batch is a dict of arrays over T steps: obs float32 (T, obs_dim), unscaled; act float32 (T, act_dim) or int64
    (T,), as the actor drew them; adv and ret (TD(lambda) returns) float32 (T,), in scaled rewards; ep_ret float64 and
    ep_len int64, (1,) if the episode ended in it, else (0,); work float64 (1, 2): seconds, which the caller adds, and
    how often the environment was made again.
    """

    episode: Episode | None = None  # which was started last, up to the end of the last run

    def __init__(
        self, env: gym.Env, actor: Actor, scaler: Scaler, config: Config, control: Control, training: bool = True,
        greedy: bool = False,
    ):  # fmt: skip
        """Makes a runner that has not started.

        Args: env: of this runner alone. greedy: act deterministically. training: False: in episodes that training does
            not use; batches have ep_ret, ep_len and work alone.
        """
        self.env, self.actor, self.scaler, self.config, self.control = env, actor, scaler, config, control
        self.training = training
        self.failures, self.restarts = 0, 0  # of the environment: in a row; since the last batch
        self._choose = (lambda out, _: actor.mode(out)) if greedy else actor.sample
        self._stream = ENV_STREAM if training else EVAL_STREAM
        self._render = {"render_mode": env.render_mode} if env.render_mode else {}
        _, self.discrete, self.to_env = action_map(env.action_space)
        self._obs, self._scaled = self._rows(FIRST_ROWS)

    def _rows(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Room for `n` observations, and for the same scaled."""
        spec = self.actor.spec
        return aligned((n, spec.obs_dim), spec.obs_dtype), aligned((n, spec.obs_dim))

    def start(self, episode: Episode) -> bool:
        """Begins an episode, or continues one by replay. Returns: False if the environment did something else then."""
        self.episode, self.failures = episode, 0
        if self.config.fresh_env:
            self.close()
        return self._reach()

    def _reach(self) -> bool:
        """Brings the environment to where the episode is, or a new one if it fails. Returns: as `start`."""
        while True:
            try:
                if self.env is None:
                    self.env = make_env(self.config, quiet=True, **self._render)
                return self._replay()
            except (Exception, SystemExit) as error:
                self._try_again(error)

    def _replay(self) -> bool:
        """Resets the environment, and replays the episode so far. Returns: as `start`."""
        episode, rews, ended, seed = self.episode, [], False, self.config.seed
        seeds = [np.random.SeedSequence(seed, spawn_key=(kind, *episode.key)) for kind in (self._stream, NOISE_STREAM)]
        rng = np.random.default_rng(seeds[1])
        self._noise = itertools.chain.from_iterable(self.actor.noise(rng, NOISE_ROWS) for _ in itertools.count())
        obs = self._fitting(self.env.reset(seed=int(seeds[0].generate_state(1)[0]))[0])
        for action in itertools.chain.from_iterable(act.tolist() if self.discrete else act for act in episode.acts):
            if ended:
                break
            next(self._noise)
            obs, rew, terminated, truncated, _ = self.env.step(self.to_env(action))
            rews.append(_number(rew))
            ended = terminated or truncated
        self._obs[0] = obs
        if not episode.length:
            return True
        same = rews == list(itertools.chain.from_iterable(episode.rews)) and np.array_equal(self._obs[0], episode.obs)
        return same and len(rews) == episode.length and not ended

    def _fitting(self, obs: Any) -> Any:
        """The observation. Raises BadData: it has another shape than its space; NumPy would make some fit."""
        if np.shape(obs) != (self.actor.spec.obs_dim,):
            raise BadData(f"an observation has shape {np.shape(obs)}; its space {self.env.observation_space!s:.200}")
        return obs

    def _try_again(self, error: BaseException) -> None:
        """After a failure of the environment: a new one, in which the episode runs again; or raises the error."""
        self.failures += 1
        if self.config.on_env_error == "abort" or self.failures == ATTEMPTS:
            raise RuntimeError("the environment calls sys.exit") if isinstance(error, SystemExit) else error
        self.restarts += 1
        what = " ".join("".join(traceback.format_exception_only(error)).split())
        print(f"train.py: episode {self.episode.name}: {what:.300}; run again in a new environment", file=sys.stderr)
        self.close()

    def close(self) -> None:
        """Ends the environment; `start` makes a new one."""
        with contextlib.suppress(Exception):
            self.env.close()
        self.env = None

    def run(self, n_steps: int | None = None, stop: Callable[[], bool] = lambda: False) -> Any:
        """Steps to the end of the episode, or `n_steps` at most. Args: stop: as of `alone`; True drops the episode.

        Returns: (batch, True if the episode ended). (None, False): it was dropped. (None, True): the environment
            failed, and the episode could not be replayed in a new one.
        Raises: BadData: an observation, action, reward or advantage is not finite; one line that says which.
        """
        return alone(self.steps(n_steps), self.actor, stop) or (None, False)

    def steps(self, n_steps: int | None = None) -> Steps:
        """As `run`; gives each scaled observation, float32 (obs_dim,), and takes what the policy makes of it."""
        t, first, ended, terminated = 0, 0, False, False  # row 0 of `obs` is that of step `first`
        acts: list[Any] = []
        rews: list[float] = []
        step, choose, scale, to_env = self.env.step, self._choose, self.scaler.scale, self.to_env
        obs, scaled, shape = self._obs, self._scaled, (self.actor.spec.obs_dim,)
        while not ended and t != n_steps:
            row = t - first
            if row + 2 > len(obs):
                self._require_finite(obs[:row], acts, rews, first=first)  # it may never end
                if self.training:
                    self._obs, self._scaled = self._rows(2 * len(obs))
                    self._obs[: len(obs)], self._scaled[: len(obs)] = obs, scaled
                    obs, scaled = self._obs, self._scaled
                else:  # the rows before this one serve no more
                    obs[0], first, row = obs[row], t, 0
            acts.append(choose((yield scale(obs[row], scaled[row])), next(self._noise)))
            try:
                new, rew, terminated, truncated, _ = step(to_env(acts[t]))
                obs[row + 1] = new if new.__class__ is np.ndarray and new.shape == shape else self._fitting(new)
                rews.append(rew if rew.__class__ is float else _number(rew))
            except (Exception, SystemExit) as error:
                self._require_finite(obs[: row + 1], acts, rews, first=first)  # what it failed of, perhaps
                self._try_again(error)
                if not self._reach():
                    return None, True
                t, first, acts, rews, step = 0, 0, [], [], self.env.step
                continue
            t += 1
            ended = terminated or truncated
        act, rew_all = np.array(acts, np.int64 if self.discrete else np.float32), np.array(rews)
        self._require_finite(obs[: t - first + 1], act, rew_all, first=first)
        batch = self._to_learn_from(act, rew_all, terminated) if self.training else {}
        return batch | self._results(obs[t - first], act, rew_all, ended), ended

    def _to_learn_from(self, act: np.ndarray, rew: np.ndarray, terminated: bool) -> dict[str, Any]:
        """What an update needs of the last steps."""
        t = len(rew)
        self.scaler.scale(self._obs[t], self._scaled[t])
        val = self.actor.value(self._scaled[: t + 1])
        last_val = 0.0 if terminated else float(val[t])
        adv = gae(rew * self.control.rew_scale[0], val[:t], last_val, float(self.control.gamma[0]), self.config.lam)
        self._require_finite((), (), (), adv)
        ret = adv + val[:t]  # TD(lambda) returns: less noisy targets than Monte Carlo returns
        batch = {"obs": self._obs[:t].copy(), "act": act, "adv": adv, "ret": ret}
        if self.config.overlap:
            batch["logp"] = self.actor.logp(self._scaled[:t], act)
        return batch

    def _results(self, obs: np.ndarray, act: np.ndarray, rew: np.ndarray, ended: bool) -> dict[str, Any]:
        """Adds steps to the episode. Args: obs: after them, which becomes the first one of the next batch."""
        self.episode, self.failures = self.episode.after(obs, act, rew), 0
        results = {
            "ep_ret": np.array([self.episode.ret] if ended else [], np.float64),
            "ep_len": np.array([self.episode.length] if ended else [], np.int64),
            "work": np.array([[0.0, self.restarts]]),
        }
        self.restarts = 0
        self._obs[0] = obs
        return results

    def _require_finite(self, obs: Any, act: Any, rew: Any, adv: Any = (), first: int = 0) -> None:
        """Raises BadData, which names the first number that is not finite.

        Args: of the steps since the last batch. first: step of `obs[0]`; actions and rewards before it are checked.
        """
        found = []
        for name, values in ("observation", obs), ("action", act[first:]), ("reward", rew[first:]), ("advantage", adv):
            if not np.isfinite(values).all():
                at = tuple(np.argwhere(~np.isfinite(values))[0])
                found.append((at[0], name + f"[{at[-1]}]" * (len(at) > 1), np.asarray(values)[at]))
        if found:
            step, name, value = min(found, key=lambda place: place[0])  # of one step the first, which causes the others
            episode = self.episode
            raise BadData(f"episode {episode.name}, step {episode.length + first + step}: {name} is {value}")


def _number(rew: Any) -> float:
    try:
        return float(rew)
    except (TypeError, ValueError):
        raise BadData(f"a reward is {rew!r:.80}, of class {type(rew).__name__}; it must be a number") from None


def alone(steps: Steps, actor: Actor, stop: Callable[[], bool]) -> Any:
    """Steps one environment. Returns: as `steps`; None: `stop`, called before a step and every few ms, was True."""
    due = 0.0
    with QUIETLY():
        try:
            row = next(steps)
            while True:
                if time.perf_counter() > due:
                    if stop():
                        return None
                    due = time.perf_counter() + STOP_S
                row = steps.send(actor.output(row))
        except StopIteration as done:
            return done.value


def together(steps: dict[int, Steps], actor: Actor, stop: Callable[[], bool], during: Callable[[int], Any]) -> None:
    """Steps several environments in turn, with the outputs of `Actor.outputs`, until all have ended or `stop` is True.

    Args: during: a context for the steps of an environment, which is given.
    """
    outs: dict[int, Any] = dict.fromkeys(steps)  # what begins a generator is None
    with QUIETLY():
        while outs and not stop():
            rows = {}
            for e, out in outs.items():
                with during(e), contextlib.suppress(StopIteration):
                    rows[e] = steps[e].send(out)
            outs = dict(zip(rows, actor.outputs(list(rows.values()))))


def gae(rew: ArrayLike, val: ArrayLike, last_val: float, gamma: float, lam: float) -> np.ndarray:
    """Generalised advantage estimates (Schulman et al. 2016, arXiv:1506.02438, equation 16), in float64 inside.

    adv[t] = sum over k of (gamma * lam)^k * delta[t + k], delta[t] = rew[t] + gamma * val[t + 1] - val[t].

    Args:
        rew, val: shape (T,): rewards, and values of the observations before each step.
        last_val: value of the observation after the last step: 0 where the episode terminated, the estimate where it
            was truncated or cut at the end of a segment.
        gamma, lam: discount of one step, and weight of longer estimates, in [0, 1].
    Returns: float32 (T,).
    """
    val = np.append(np.asarray(val, np.float64), last_val)
    delta = np.asarray(rew, np.float64) + gamma * val[1:] - val[:-1]
    # over Python floats: for a thousand steps faster than any NumPy form, and exact in its order
    adv, rate, last = delta.tolist(), gamma * lam, 0.0
    for t in range(len(adv) - 1, -1, -1):
        adv[t] = last = adv[t] + rate * last
    return np.array(adv, np.float32)


def empty_batch(spec: Spec) -> dict[str, np.ndarray]:
    """A batch like Runner's, of no steps."""
    none = np.empty(0, np.float32)
    return {
        "obs": np.empty((0, spec.obs_dim), spec.obs_dtype),
        "act": np.empty(0, np.int64) if spec.discrete else np.empty((0, spec.act_dim), np.float32),
        "adv": none, "ret": none,
        "ep_ret": np.empty(0), "ep_len": np.empty(0, np.int64), "work": np.empty((0, 2)),
    }  # fmt: skip
