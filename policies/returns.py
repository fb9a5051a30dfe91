"""Discounted sums and advantages of one trajectory: pure functions, float64 inside, float32 out.

Time runs over t = 0 .. T-1. ``last_val`` is the value of the observation that follows the last step: 0 where the
episode terminated, the value function's estimate where it was truncated or cut at the end of a segment.
"""

import numpy as np


def discount(x, gamma):
    """Discounted sums of all that follows: y[t] = x[t] + gamma * y[t + 1].

    Args:
        x: numbers, shape (T,).
        gamma: discount of one step, in [0, 1].

    Returns:
        float32 (T,).
    """
    return np.array(_discount(np.asarray(x, np.float64), gamma, 0.0), np.float32)


def gae(rew, val, last_val, gamma, lam):
    """Generalised advantage estimates (Schulman et al. 2016, arXiv:1506.02438, equation 16).

    adv[t] = sum over k of (gamma * lam)^k * delta[t + k], delta[t] = rew[t] + gamma * val[t + 1] - val[t].

    Args:
        rew: rewards, shape (T,).
        val: values of the observations before each step, shape (T,).
        last_val: value after the last step; 0 where the episode terminated.
        gamma: discount of one step, in [0, 1].
        lam: weight of longer estimates, in [0, 1].

    Returns:
        float32 (T,).
    """
    val = np.append(np.asarray(val, np.float64), last_val)
    delta = np.asarray(rew, np.float64) + gamma * val[1:] - val[:-1]
    return np.array(_discount(delta, gamma * lam, 0.0), np.float32)


def _discount(x, gamma, last):
    """The recursion over Python floats: for a thousand steps faster than any NumPy form, and exact in its order."""
    sums = x.tolist()
    for t in range(len(sums) - 1, -1, -1):
        last = sums[t] + gamma * last
        sums[t] = last
    return sums
