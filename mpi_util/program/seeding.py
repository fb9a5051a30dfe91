"""Random streams that do not depend on which rank draws from them, and the seeding of a whole process."""

import random
import sys

import numpy as np

from ..launch.identity import rank
from .old_names import renamed


@renamed(i="seed")
def set_global_seeds(seed: int) -> None:
    """Seeds `random`, `numpy.random`, and torch and TensorFlow if they are loaded; `seed` >= 0. Not collective.

    Call it with `rank_seed(seed)` where every rank is to draw differently. A tf.Graph that is made afterwards has a
    seed of its own: call `tf.compat.v1.set_random_seed` inside it.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
    if "tensorflow" in sys.modules:
        tf = sys.modules["tensorflow"]  # or, where a program has put it there, tensorflow.compat.v1
        getattr(tf.random, "set_seed" if hasattr(tf.random, "set_seed") else "set_random_seed")(seed)


def rank_seed(seed: int) -> int:
    """A seed for this rank, 0 to 2**31 - 1: another one for each rank and for each run's `seed` >= 0. Not collective.

    `seed + rank` is not: rank 1 of seed 1 would draw what rank 0 of seed 2 draws.
    """
    return int(stream(seed, rank()).generate_state(1)[0] >> 1)


def stream(seed: int, *key: int) -> np.random.SeedSequence:
    """The root of an independent random stream for (seed, key), the same on every rank and machine. Not collective.

        rng = np.random.default_rng(stream(seed, iteration, episode))

    Args: seed: of the run. key: what the stream is for, e.g. a purpose and the number of an episode.
    """
    return np.random.SeedSequence(seed, spawn_key=key)
