"""Random streams that do not depend on which rank draws from them, and the seeding of a whole process."""

import random
import sys

import numpy as np


def set_global_seeds(seed: int) -> None:
    """Seeds `random`, `numpy.random`, and torch and TensorFlow if they are loaded. Not collective.

    Call it with `seed + rank` when every rank is to draw differently. A tf.Graph that is made afterwards has a seed of
    its own: call `tf.compat.v1.set_random_seed` inside it.

    Args:
        seed: not negative.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].random.set_seed(seed)


def stream(seed: int, *key: int) -> np.random.SeedSequence:
    """The root of an independent random stream for (seed, key), the same on every rank and machine.

    Args:
        seed: of the run.
        key: what the stream is for, e.g. a purpose and the number of an episode.
    """
    return np.random.SeedSequence(seed, spawn_key=key)
