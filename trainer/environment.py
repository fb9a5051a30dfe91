"""Gymnasium environments as the policies need them: flat observations, and actions from -1 to 1."""

import sys
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np


def make_env(env_id: str, arguments: dict[str, Any], quiet: bool) -> gym.Env:
    """A Gymnasium environment with flat observations; `module:Env-v0` imports the module first.

    Args: arguments: keywords of the environment. quiet: suppress its warnings, which are the same on every rank.

    Raises: ValueError: the environment is unknown, cannot be built, or its action space is not supported.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is out of date")  # the version was chosen, for comparison with others
        if quiet:
            warnings.simplefilter("ignore")
            gym.logger.min_level = gym.logger.ERROR
        if ":" in env_id and "" not in sys.path:
            sys.path.append("")  # a module of the user's folder
        try:
            env = gym.make(env_id, disable_env_checker=True, **arguments)
        except (gym.error.Error, ImportError, TypeError, AttributeError, ValueError, OSError) as error:
            raise ValueError(f"cannot make environment {env_id!r}: {' '.join(str(error).split())}") from None
    space = env.action_space
    continuous = isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating)
    if not continuous and not isinstance(space, gym.spaces.Discrete):
        raise ValueError(f"{env_id}: actions are {space}; a policy needs Box (floating point) or Discrete ones")
    space = env.observation_space
    if not (isinstance(space, gym.spaces.Box) and len(space.shape) == 1):
        env = gym.wrappers.FlattenObservation(env)
    return env


def action_map(space: Any) -> tuple[int, bool, Callable[[Any], Any]]:
    """(components or number of actions, discrete?, function from an actor's action to the environment's).

    A Box with finite bounds is rescaled to bounds -1 and 1, to which the actor's Gaussian is clipped.
    """
    if isinstance(space, gym.spaces.Discrete):
        start = int(space.start)
        return int(space.n), True, (lambda action: action + start) if start else (lambda action: action)
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
