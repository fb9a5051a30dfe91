"""Advantages of one trajectory: a pure function, float64 inside, float32 out."""

import numpy as np
from numpy.typing import ArrayLike


def gae(rew: ArrayLike, val: ArrayLike, last_val: float, gamma: float, lam: float) -> np.ndarray:
    """Generalised advantage estimates (Schulman et al. 2016, arXiv:1506.02438, equation 16).

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
