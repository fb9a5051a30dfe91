"""Stable-Baselines3's on-policy algorithms on N ranks; this runs in each of them. A program: examples/sb3_ppo.py.

Every rank has its own environments and a copy of the policy, so every rank loads torch. The ranks collect in parallel;
rank 0 gets all rows and calls SB3's `train()` with all cores; the other ranks get its weights. With one rank only SB3's
own code runs, and results are bit-identical to it.
"""

import contextlib
import copy
import functools
import inspect
import io
import itertools
import os
import pathlib
import warnings
from collections import Counter
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback, EventCallback, ProgressBarCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.save_util import open_path
from stable_baselines3.common.utils import get_device

import mpi_util
from mpi_util.collectives.pickles import pack, unpack
from mpi_util.errors import BatchError, UsageError
from mpi_util.ranks.state import state
from mpi_util.ranks.threads import Threads

Model = TypeVar("Model", bound=OnPolicyAlgorithm)
Model_co = TypeVar("Model_co", covariant=True)


class ParallelClass(Protocol[Model_co]):
    """What `parallel` returns: a subclass of the algorithm, with `divide`, whose `env` may be a function."""

    def __call__(self, policy: Any, env: Any, *args: Any, divide: bool = True, **settings: Any) -> Model_co: ...
    def load(self, path: Any, env: Any = None, *args: Any, **settings: Any) -> Model_co: ...


def parallel(algorithm: type[Model]) -> ParallelClass[Model]:
    """A subclass of an on-policy algorithm whose models collect on all ranks and train on rank 0. Not collective.

    What differs from the algorithm itself:
    - Every rank creates the model, with the same settings, and calls `learn` and `load`, which are collective. `save`
      and the logger write on rank 0, and return at once elsewhere.
    - env: also a function that returns an environment or a VecEnv, called on every rank; what it builds may depend on
      `mpi_util.rank`. All ranks have the same number of environments and the same spaces.
    - n_steps: of each environment, all ranks together: rows per rollout = n_steps * n_envs, as without mpi_util. The
      first ranks take the remainder. divide=False: n_steps of each rank. `model.n_steps` is that of all ranks.
    - seed: rank 0 uses it itself, so the first weights are SB3's; the others `mpi_util.rank_seed` of it, or of torch's.
    - device "auto": rank 0's accelerator; the other ranks use the CPU.
    - num_timesteps, the schedules and total_timesteps count the steps of all ranks.
    - Callbacks run on rank 0, and may be None elsewhere; one that returns False stops all ranks at the end of the
      rollout. A call of on_step stands for a step of every rank: divide `eval_freq` and `save_freq` by the number of
      ranks. `locals` is rank 0's own; in on_rollout_end `rollout_buffer` and `ep_info_buffer` hold what all ranks have
      collected.
    - `set_attr` and `env_method` of a callback's `training_env` act on rank 0's environments at once, and on those of
      the other ranks before their next rollout (`indices`: in each rank's own). Results and `get_attr` are rank 0's.
      Raises BatchError: the arguments cannot be pickled, as a lambda.
    - VecNormalize, and Gymnasium's NormalizeObservation and NormalizeReward are merged after each rollout, by
      `mpi_util.merge_moments`: with more than one rank those inside a DummyVecEnv become one too.

    Args: algorithm: PPO, A2C, TRPO, MaskablePPO, or another subclass of OnPolicyAlgorithm with a flat rollout buffer.
    Raises UsageError: it is off-policy or recurrent.
    """
    name = getattr(algorithm, "__name__", repr(algorithm))
    if not (inspect.isclass(algorithm) and issubclass(algorithm, OnPolicyAlgorithm)):
        raise UsageError(f"parallel({name}): the algorithm must be on-policy: PPO, A2C, TRPO, MaskablePPO")
    if any(base.__name__ == "RecurrentPPO" for base in algorithm.__mro__):
        raise UsageError(f"parallel({name}): recurrent policies train on sequences; use PPO with stacked frames")
    return cast(ParallelClass[Model], _subclass(algorithm))


@functools.cache
def _subclass(algorithm: Any) -> Any:
    if issubclass(algorithm, _Parallel):
        return algorithm
    members = {"__doc__": algorithm.__doc__, "__module__": __name__}
    return type(algorithm)(algorithm.__name__, (_Parallel, algorithm), members)  # the name is in SB3's warnings


class _Parallel(OnPolicyAlgorithm):
    """Overrides of OnPolicyAlgorithm. SB3 calls `collect_rollouts` and `train` in turn, on every rank."""

    _calls: list[np.ndarray] | None = None  # within `learn`: what the environments of other ranks are to repeat, packed

    def __init__(self, policy: Any, env: Any, *args: Any, divide: bool = True, **settings: Any):
        if not divide:
            default = inspect.signature(super().__init__).parameters["n_steps"].default
            settings["n_steps"] = mpi_util.nworkers * settings.get("n_steps", default)
        with warnings.catch_warnings():
            if mpi_util.rank:
                warnings.simplefilter("ignore")  # rank 0 shows them
                settings |= {"verbose": 0} if "verbose" in settings else {}
                if settings.get("device", "auto") == "auto" and get_device("auto").type != "cpu":
                    settings["device"] = "cpu"
            super().__init__(policy, _made(env), *args, **settings)

    def _setup_model(self) -> None:
        if self.n_steps < mpi_util.nworkers:
            raise UsageError(f"n_steps={self.n_steps} is less than a step for each of {mpi_util.nworkers} ranks")
        if mpi_util.rank == 0:
            # as SB3: with another number of threads the first weights differ in the last bit
            state(Threads).switch(True, of_any_size=True)
        super()._setup_model()
        if mpi_util.nworkers > 1:
            self._own_buffer = copy.copy(self.rollout_buffer)
            self._own_buffer.buffer_size = len(mpi_util.share(self.n_steps))  # the next reset() allocates its arrays

    def set_random_seed(self, seed: int | None = None) -> None:
        own = seed
        if mpi_util.rank:  # also where the program itself has seeded torch and its environments, alike on all ranks
            own = mpi_util.rank_seed(torch.initial_seed() % 2**31 if seed is None else seed)
        with contextlib.suppress(*[NotImplementedError] * (seed is None)):  # environments that take no seed
            super().set_random_seed(own)

    def set_logger(self, logger: Logger) -> None:
        super().set_logger(Logger(None, []) if mpi_util.rank else logger)

    def set_env(self, env: Any, force_reset: bool = True) -> None:
        super().set_env(_made(env), force_reset)

    def learn(self, *args: Any, **settings: Any) -> Any:
        """Collective: trains, with SB3's arguments. All ranks get the final weights, num_timesteps and _n_updates."""
        self._calls = [] if mpi_util.nworkers > 1 else None
        super().learn(*args, **settings)
        if mpi_util.nworkers > 1:
            self._send()
            self._n_updates = mpi_util.bcast(self._n_updates)
            self._calls = None
        return self

    def get_env(self) -> Any:
        return self.env if mpi_util.rank or self._calls is None else _EnvOfAllRanks(self)

    def _send(self) -> None:
        """Collective: the other ranks get the weights, and call of `env` what callbacks did of their `training_env`."""
        mpi_util.rank0_bcast_wts(self.policy)
        calls, self._calls = self._calls, []
        for call in mpi_util.bcast(calls) or ():
            if mpi_util.rank:
                name, args, settings = unpack(call)
                getattr(self.env, name)(*args, **settings)

    def _setup_learn(self, *args: Any, **settings: Any) -> tuple[int, BaseCallback]:
        if mpi_util.rank:
            self.set_logger(Logger(None, []))
        if mpi_util.nworkers > 1:
            if len({*(n := mpi_util.all_accum_batches([self.n_envs]))}) > 1:
                raise UsageError(f"all ranks must have the same number of environments; they have {n}, rank by rank")
            _check_monitors(self.env)
            self._has_moments = False
            with contextlib.suppress(BatchError):
                mpi_util.merge_moments(self.env)  # before the reset: a state that all ranks have loaded counts once
                self._has_moments = True
        return super()._setup_learn(*args, **settings)

    def _init_callback(self, callback: Any, progress_bar: bool = False) -> BaseCallback:
        if mpi_util.rank:
            return super()._init_callback(None)
        whole = super()._init_callback(callback, progress_bar)
        for part in _parts(whole):
            if type(part) is ProgressBarCallback:
                part.__class__ = _ProgressBar
        return whole

    def collect_rollouts(self, env: Any, callback: Any, rollout_buffer: Any, n_rollout_steps: int, *more: Any) -> bool:
        """Collective: runs this rank's steps; rank 0 then has all ranks' rows. False if rank 0's callback stops all."""
        if mpi_util.nworkers == 1:
            state(Threads).switch(True, of_any_size=True)
            return super().collect_rollouts(env, callback, rollout_buffer, n_rollout_steps, *more)
        callback.on_rollout_start()
        self._send()  # after the callback, which may have changed the weights
        steps, episodes = _Steps(self, callback), [copy.copy(b) for b in (self.ep_info_buffer, self.ep_success_buffer)]
        self._ended: list[tuple[int, Any, Any]] = []  # (num_timesteps, infos, dones) of steps at which episodes ended
        with mpi_util.during("rollout"):
            own = self._own_buffer
            going = super().collect_rollouts(env, steps, own, own.buffer_size, *more)
        stopped, taken = mpi_util.all_sum(np.array([not going, steps.n_calls * env.num_envs]))
        self.num_timesteps = steps.start + int(taken)
        for part in _parts(callback):  # at a stop other ranks have taken more steps than it has seen
            part.num_timesteps = self.num_timesteps
        all_ended = mpi_util.rank0_gather(self._ended)
        if mpi_util.rank == 0:  # fills its buffers as if it had all environments, in the order of steps
            self.ep_info_buffer, self.ep_success_buffer = episodes
            for _, infos, dones in sorted(itertools.chain(*all_ended), key=lambda ended: ended[0]):
                super()._update_info_buffer(infos, dones)
        if self._has_moments:
            mpi_util.merge_moments(env)
        if stopped:
            return False
        rows = mpi_util.rank0_accum_batches(_rows(own))  # the last call: rank 0 has all cores until the next one
        if mpi_util.rank == 0:
            size = len(rows["advantages"])
            fields = {"buffer_size": size, "n_envs": 1, "pos": size, "full": True, "generator_ready": False}
            vars(rollout_buffer).update(rows | fields)
            callback.update_locals({"rollout_buffer": rollout_buffer})
        callback.on_rollout_end()
        return True

    def _update_info_buffer(self, infos: list[dict[str, Any]], dones: np.ndarray | None = None) -> None:
        super()._update_info_buffer(infos, dones)
        if mpi_util.nworkers > 1 and np.any(dones):
            kept = [{key: info[key] for key in ("episode", "is_success") if key in info} for info in infos]
            self._ended.append((self.num_timesteps, kept, dones))

    def train(self) -> None:
        """SB3's update, on rank 0; the others continue to the next collective call and sleep there."""
        if mpi_util.rank == 0:
            with mpi_util.during("update"):
                super().train()

    def save(self, path: Any, *args: Any, **settings: Any) -> None:
        """Not collective. Saves on rank 0 (to an open file on every rank). Readers must wait for that, as `load`."""
        if mpi_util.rank == 0 or not isinstance(path, (str, pathlib.Path)):
            super().save(path, *args, **settings)

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_own_buffer", "_ended", "_has_moments", "_calls"]

    @classmethod
    def load(cls, path: Any, env: Any = None, *args: Any, **settings: Any) -> Any:
        """Collective: every rank gets the model that rank 0 reads. Args: SB3's; env: also a function."""
        if mpi_util.nworkers > 1:
            found: Any = mpi_util.bcast(_read(path) if mpi_util.rank == 0 else None)
            if isinstance(found, Exception):
                raise found
            path = io.BytesIO(found)
        if mpi_util.rank:
            settings["custom_objects"] = {**(settings.get("custom_objects") or {}), "verbose": 0}
        return super().load(path, _made(env), *args, **settings)


class _Steps(EventCallback):
    """Wraps the callback during a rollout: num_timesteps grows by one step of every rank at once."""

    model: Any

    def __init__(self, model: Any, callback: BaseCallback):
        super().__init__()
        self.model, self.callback = model, callback  # given to EventCallback, it would be the callback's parent
        self.start = model.num_timesteps

    def _on_step(self) -> bool:
        steps = min(self.n_calls * mpi_util.nworkers, self.model.n_steps)  # some ranks may have no last step
        self.model.num_timesteps = self.start + steps * self.model.n_envs
        return self._on_event()


class _EnvOfAllRanks:
    """Rank 0's environments as callbacks get them, which notes what they call. It passes for their VecEnv's class."""

    __class__: Any = property(lambda self: type(self._model.env))

    def __init__(self, model: _Parallel):
        vars(self)["_model"] = model

    def __getattr__(self, name: str) -> Any:
        if name == "_model" or name.startswith("__"):  # of a copy that is being made
            raise AttributeError(name)
        found = getattr(self._model.env, name)
        return functools.partial(self._noted, name, found) if name in ("set_attr", "env_method") else found

    def _noted(self, name: str, call: Any, *args: Any, **settings: Any) -> Any:
        if self._model._calls is not None:
            self._model._calls.append(pack(f"training_env.{name}", [name, args, settings]))
        return call(*args, **settings)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model.env, name, value)


class _ProgressBar(ProgressBarCallback):  # counts the steps of all ranks
    def _on_step(self) -> bool:
        self.pbar.update(self.num_timesteps - self.model._num_timesteps_at_start - self.pbar.n)
        return True


def _parts(callback: Any) -> list[Any]:
    """A callback, and those of a list of callbacks."""
    return [callback, *(part for one in getattr(callback, "callbacks", ()) for part in _parts(one))]


def _made(env: Any) -> Any:
    return env() if callable(env) else env  # environments are not callable


def _check_monitors(env: Any) -> None:
    """Collective: raises UsageError if ranks write the same Monitor file: they would overwrite each other's lines."""
    files, inside = dict[int, str](), [env]
    for one in inside:  # which grows; each is in it once, as some hold a thing under two names, or each other
        members: Any = getattr(one, "__dict__", {})
        if hasattr(writer := members.get("results_writer"), "file_handler"):
            files[id(writer)] = os.path.realpath(writer.file_handler.name)
        held = members.get("venv"), members.get("env"), *(e if isinstance(e := members.get("envs"), list) else ())
        inside += [thing for thing in held if not any(thing is other for other in inside)]
    for path, n in Counter(mpi_util.all_accum_batches([*files.values()])).items():
        if n > 1:
            ways = "Monitor(env, f'logs/{mpi_util.rank}'), or make_vec_env(..., start_index=mpi_util.rank * n_envs)"
            what = f"{n} environments write the Monitor file {path}; each needs its own, on every rank"
            raise UsageError(f"{what}: {ways}")


def _rows(buffer: Any) -> dict[str, Any]:
    """Every array of a rollout buffer, shape (buffer_size, n_envs, ...), as (buffer_size * n_envs, 1, ...)."""
    found: dict[str, Any] = {}
    shape = (buffer.buffer_size, buffer.n_envs)
    for name, value in vars(buffer).items():
        arrays = value if isinstance(value, dict) else {"": value}
        if all(isinstance(a, np.ndarray) and a.shape[:2] == shape for a in arrays.values()):
            # in the order of SB3's swap_and_flatten
            rows = {key: a.swapaxes(0, 1).reshape(-1, 1, *a.shape[2:]) for key, a in arrays.items()}
            found[name] = rows if isinstance(value, dict) else rows[""]
    return found


def _read(path: Any) -> bytes | Exception:  # the error is to be raised on every rank
    try:
        return open_path(path, "r", suffix="zip").read()
    except Exception as error:
        return error
