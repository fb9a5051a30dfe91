"""Gymnasium environments as the policies need them: flat observations, and actions from -1 to 1."""

import contextlib
import importlib
import math
import os
import socket
import sys
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from trainer.config import Config

MOST_ACTIONS = 1024  # combinations of the parts of an action, each of which is one for the policy


def make_env(config: Config, quiet: bool, **more: Any) -> gym.Env:
    """A Gymnasium environment with flat observations; `module:Env-v0` imports the module first.

    Args: quiet: suppress its warnings, which are the same on every rank. more: keywords, besides those of `config`.

    Raises: ValueError: the environment is unknown, cannot be built, or its action space is not supported.
    """
    env_id = config.env
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is out of date")  # the version was chosen, for comparison with others
        if quiet:
            warnings.simplefilter("ignore")
            gym.logger.min_level = gym.logger.ERROR
        if ":" in env_id + config.env_wrappers and "" not in sys.path:
            sys.path.append("")  # a module of the user's folder
        try:
            env = gym.make(env_id, disable_env_checker=True, **config.env_arguments | more)
        except (gym.error.Error, ImportError, TypeError, AttributeError, ValueError, OSError) as error:
            raise ValueError(f"cannot make environment {env_id!r}: {' '.join(str(error).split())}") from None
        for name in filter(None, config.env_wrappers.split(",")):
            env = _function(name)(env)
    space = env.action_space
    continuous = isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating)
    if not (continuous or 0 < _n_joint(space) <= MOST_ACTIONS):
        fits = (
            f"Box (floating point), Discrete, or MultiDiscrete and MultiBinary of {MOST_ACTIONS} combinations at most"
        )
        raise ValueError(f"{env_id}: actions are {space}; a policy needs {fits}")
    space = env.observation_space
    if not (isinstance(space, gym.spaces.Box) and len(space.shape) == 1):
        env = gym.wrappers.FlattenObservation(env)
        if isinstance(space, gym.spaces.Box) and len(space.shape) > 1 and not quiet:
            n = env.observation_space.shape[0]
            flat = f"observations of shape {space.shape} are flattened to {n} numbers"
            print(f"train.py: {flat}; there is no network for images here")
    return env


def make_shown_env(config: Config, quiet: bool = True) -> gym.Env:
    """As `make_env`, in a window. Raises: ValueError: none can be opened, or what draws in it is missing."""
    if not display_works():
        instead = "`train.py --watch RUN_DIR --video FILE` records"
        raise ValueError(f"no window can be opened here: there is no display; {instead}")
    env = make_env(config, quiet, render_mode="human")
    try:
        env.reset(seed=0)
    except gym.error.Error as error:  # pygame is not installed
        raise ValueError(f"cannot show {config.env}: {' '.join(str(error).split())}") from None
    return env


def display_works() -> bool:
    """True if a window can be opened: without this question some libraries abort the process."""
    if os.environ.get("WAYLAND_DISPLAY") or sys.platform == "darwin":
        return True
    host, _, number = os.environ.get("DISPLAY", "").partition(":")
    if host or not number:
        return bool(host)  # of another machine, by ssh
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as server:
        server.connect(f"/tmp/.X11-unix/X{number.split('.')[0]}")  # noqa: S108  # X's own place
        return True
    return False


def _function(name: str) -> Callable[[Any], Any]:
    """What `module:function` names. Raises ValueError: one line: there is no such function."""
    module, _, function = name.strip().partition(":")
    try:
        found: Callable[[Any], Any] = getattr(importlib.import_module(module), function)
        return found
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--env_wrappers {name}: {error}; give module:function, which takes an environment") from None


def _n_joint(space: Any) -> int:
    """Number of different actions; 0: they cannot be counted."""
    if isinstance(space, gym.spaces.Discrete):
        return int(space.n)
    if isinstance(space, gym.spaces.MultiDiscrete):
        return math.prod(space.nvec.ravel().tolist())
    return 2 ** math.prod(space.shape) if isinstance(space, gym.spaces.MultiBinary) else 0


def action_map(space: Any) -> tuple[int, bool, Callable[[Any], Any]]:
    """(components or number of actions, discrete?, function from an actor's action to the environment's).

    A Box with finite bounds is rescaled to bounds -1 and 1, to which the actor's Gaussian is clipped.
    """
    if isinstance(space, gym.spaces.Discrete):
        start = int(space.start)
        return int(space.n), True, (lambda action: action + start) if start else (lambda action: action)
    if n := _n_joint(space):  # each combination is an action
        nvec = space.nvec.ravel() if isinstance(space, gym.spaces.MultiDiscrete) else np.full(math.prod(space.shape), 2)
        start = getattr(space, "start", 0)
        table = np.array(np.unravel_index(np.arange(n), nvec)).T.reshape(n, *space.shape)
        return n, True, (start + table).astype(space.dtype).__getitem__
    low, high = (np.asarray(bound, np.float64).ravel() for bound in (space.low, space.high))
    size, shape, dtype = low.size, space.shape, space.dtype
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        return size, False, lambda action: action.reshape(shape).astype(dtype)
    middle, half = ((high + low) / 2).astype(np.float32), ((high - low) / 2).astype(np.float32)
    low, high = low.astype(np.float32), high.astype(np.float32)
    is_plain = shape == (size,) and dtype == np.float32

    def to_env(action: np.ndarray) -> np.ndarray:
        scaled = action * half
        scaled += middle
        scaled.clip(low, high, out=scaled)  # np.maximum and np.minimum use AVX-512, which slows what follows it
        return scaled if is_plain else scaled.reshape(shape).astype(dtype, copy=False)

    return size, False, to_env
