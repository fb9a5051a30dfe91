"""Whether an environment repeats an episode, whatever was played before; in any process, alone."""

import contextlib
import copy
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays import tree
from ..errors import MpiUtilError
from ..ranks.seeding import keep_random_states

_PART_S, _USED_S = 0.2, 1.0  # at most, for what is played after one reset, and in the used environment
_RESETS = 9  # Gymnasium's BipedalWalker-v3 differs after 2 resets, BipedalWalkerHardcore-v3 after 8


def check_replay(
    make_env: Callable[[], Any], seed: int = 0, n_steps: int = 30, fix: str = "make a new one for each episode"
) -> None:
    """Plays the beginning of an episode several times, and raises if it is not always the same. Not collective.

    It is played, with the same random actions, in a new environment, again in that one after other episodes, and in
    another new one. Both are closed. `random`, NumPy and torch draw afterwards what they would have drawn.

    Args:
        make_env: makes an environment with Gymnasium's `reset(seed=)`, `step`, `close` and `action_space`.
        seed: of the episode and its actions. n_steps: at most; fewer if they take more than 0.2 s.
        fix: what the message advises if only a used environment differs.

    Raises:
        MpiUtilError: one line: which step is the first that differed (0: the reset), in which environment, what to do.
            What the environment itself raises.
    """
    put_back = keep_random_states(seed)
    try:
        with contextlib.closing(make_env()) as env:
            end = time.monotonic() + _USED_S
            first, _, *again = [_play(env, s, n_steps) for s in (seed, seed + 1, seed)]
            while len(again) < _RESETS and time.monotonic() < end:
                again.append(_play(env, seed, 2))
        with contextlib.closing(make_env()) as env:
            in_new = _play(env, seed, n_steps)
    finally:
        put_back()
    what = "plays the same episode differently from step"
    for trace, which, why in (
        (in_new, "a second new environment", "what is random in it must come from reset(seed=)"),
        *((trace, "a used environment", f"it keeps something over reset; {fix}") for trace in again),
    ):
        if differs := [k for k, (here, there) in enumerate(zip(first, trace)) if here != there]:
            raise MpiUtilError(f"{which} {what} {differs[0]} on: {why}")


def _play(env: Any, seed: int, n_steps: int) -> list[bytes]:
    """Digests of what reset gives, and each step, to the end of the episode, of `n_steps` or of the time."""
    space, end = copy.deepcopy(env.action_space), time.monotonic() + _PART_S  # the run may draw from its own
    space.seed(seed)
    trace = [_digest(env.reset(seed=seed)[0])]
    while len(trace) <= n_steps and time.monotonic() < end:
        *result, _ = env.step(space.sample())
        trace.append(_digest(result))
        if any(result[2:]):
            break
    return trace


def _digest(result: Any) -> bytes:
    parts: list[Any] = []
    for _, leaf in tree.walk(result):
        array = np.asarray(leaf, object if isinstance(leaf, list) else None)
        parts += [array.dtype, array.shape, array.tolist() if array.dtype.hasobject else array.tobytes()]
    return tree.digest(*parts)
