"""Seeds a rank's process, and makes random streams that do not depend on which rank draws from them."""

import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import whole_number
from .identity import rank


def set_global_seeds(seed: int) -> None:
    """Seeds `random`, `numpy.random`, and torch and TensorFlow if they are loaded; `seed` >= 0. Not collective.

    Call it with `rank_seed(seed)` where every rank is to draw differently. A tf.Graph that is made afterwards has a
    seed of its own: call `tf.compat.v1.set_random_seed` inside it.
    """
    seed = whole_number("set_global_seeds: a seed", seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
    if "tensorflow" in sys.modules:
        if "keras" in sys.modules:  # what keras.random draws from
            sys.modules["keras"].utils.set_random_seed(seed % 2**32)
        tf = sys.modules["tensorflow"]  # or, where a program has put it there, tensorflow.compat.v1
        getattr(tf.random, "set_seed" if hasattr(tf.random, "set_seed") else "set_random_seed")(seed)


def rank_seed(seed: int) -> int:
    """A seed for this rank, 0 to 2**31 - 1, which differs between ranks and runs. Not collective.

    `seed + rank` does not: rank 1 of seed 1 would draw what rank 0 of seed 2 draws.

    Args: seed: of the run, 0 or more.
    """
    return seed_of(seed, rank())


def seed_of(seed: int, *key: int) -> int:
    """A seed for (seed, key), 0 to 2**31 - 1, the same on every rank and machine. Not collective.

    For what takes a whole number: `torch.manual_seed`, `env.reset(seed=...)`. Args: as `stream`.
    """
    return int(stream(seed, *key).generate_state(1)[0] >> 1)


def stream(seed: int, *key: int) -> np.random.SeedSequence:
    """The root of an independent random stream for (seed, key), the same on every rank and machine. Not collective.

        rng = np.random.default_rng(stream(seed, iteration, episode))

    Args: seed: of the run. key: what the stream is for, e.g. a purpose and the number of an episode.
    """
    numbers = [whole_number("stream: a key", k) for k in key]
    return np.random.SeedSequence(whole_number("stream: a seed", seed), spawn_key=numbers)


def keep_random_states(then: int) -> Callable[[], None]:
    """The function returned puts the states of `random`, `numpy.random` and torch back to what they are now.

    Args: then: with it that function seeds what has no state to be read: TensorFlow, and CUDA, or torch, not used yet.
    """
    kept: list[tuple[Callable[[Any], object], Any]] = [
        (random.setstate, random.getstate()), (np.random.set_state, np.random.get_state()),
    ]  # fmt: skip
    torch = sys.modules.get("torch")
    if torch is not None:
        kept.append((torch.set_rng_state, torch.get_rng_state()))
        if torch.cuda.is_initialized():
            kept.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
        else:  # torch.manual_seed also sets the seed with which CUDA begins, which would be the last rollout's
            kept.append((torch.cuda.manual_seed_all, torch.initial_seed()))

    def put_back() -> None:
        if torch is None or "tensorflow" in sys.modules:
            set_global_seeds(then)
        for put, value in kept:
            put(value)

    return put_back
