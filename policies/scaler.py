"""Running normalisation: observations of zero mean and unit variance, returns of unit variance.

The state is a dict of arrays that is broadcast with the weights: rank 0 updates it once per iteration, and every rank
scales with the same bits.
"""

import numpy as np

from policies.actor import Spec
from policies.data_parallel import ALONE, Array, LearnerGroup

CLIP = 10.0  # in standard deviations: keeps a first contact force or a fall from saturating the networks
BOUNDS = np.array(-CLIP, np.float32), np.array(CLIP, np.float32)  # which NumPy would make of numbers at each step
VAR_FLOOR = 1e-8  # an observation that never changed scales to 0, not to infinity


class Scaler:
    """Running mean and variance of observations, or of other rows."""

    def __init__(self, obs_dim: int, name: str = "scaler"):
        self.name = name
        self.arrays: dict[str, Array] = {  # modified in place, never rebound
            f"{name}/mean": np.zeros(obs_dim, np.float32),  # what `scale` uses
            f"{name}/scale": np.ones(obs_dim, np.float32),
            f"{name}/run_mean": np.zeros(obs_dim),  # so far
            f"{name}/run_m2": np.zeros(obs_dim),  # sum of squared deviations so far
            f"{name}/count": np.zeros(1),  # number of rows so far
        }
        self.mean, self.factor = self.arrays[f"{name}/mean"], self.arrays[f"{name}/scale"]

    def update(self, obs: Array, group: LearnerGroup = ALONE) -> None:
        """Merges a batch into the running moments (Chan, Golub, LeVeque 1979: pairwise merge of two samples).

        Args: obs: float32 or float64 (N, obs_dim), unscaled, finite. group: the learners; merged in their order.
        """
        parts = np.zeros((group.n_learners, 1 + 2 * obs.shape[1]))
        if len(obs):
            # Deviations from the first row keep their digits where the mean is far from 0.
            deviation = obs - obs[0].astype(np.float64)
            offset = deviation.mean(axis=0)
            deviation -= offset
            m2 = np.einsum("ij,ij->j", deviation, deviation)
            parts[group.index] = np.concatenate(([len(obs)], offset + obs[0], m2))
        parts = group.sum(parts)  # size, means and sums of squared deviations of each learner's rows; the others' are 0
        mean, run_m2, count = (self.arrays[f"{self.name}/{key}"] for key in ("run_mean", "run_m2", "count"))
        for n, moments in zip(parts[:, 0], parts[:, 1:]):
            if n:
                part_mean, part_m2 = np.split(moments, 2)
                total = count[0] + n
                delta = part_mean - mean
                run_m2 += part_m2 + np.square(delta) * (count[0] * n / total)
                mean += delta * (n / total)
                count[0] = total
        if count[0]:
            self.mean[:] = mean
            self.factor[:] = 1.0 / np.sqrt(run_m2 / count[0] + VAR_FLOOR)

    def scale(self, obs: Array, out: Array | None = None) -> Array:
        """Normalises observations elementwise, so a row's bits are the same alone and in any batch.

        Args: obs: float32 or float64, (obs_dim,) or (N, obs_dim). out: float32, to write into; None: a new array.
        Returns: float32, the shape of `obs`, within +-10.
        """
        if out is None:
            out = np.empty(obs.shape, np.float32)
        np.subtract(obs, self.mean, out, casting="same_kind")
        np.multiply(out, self.factor, out)
        return out.clip(*BOUNDS, out=out)


class Pixels(Scaler):
    """Of images: less their mean, in units of the range 0 to 255.

    Without the mean, the background is most of what a network sees: of the policy's first convolution on Pong's images
    9 of 10 units gave 0 for all of them after 40,000 steps, and soon all; with it 2 of 10.
    """

    def __init__(self, obs_dim: int):
        mean, total = np.zeros(obs_dim, np.float32), np.zeros(obs_dim)  # the second one exact
        self.arrays = {"scaler/mean": mean, "scaler/sum": total, "scaler/count": np.zeros(1)}
        self.mean, self.factor = self.arrays["scaler/mean"], np.array(1.0 / 255.0, np.float32)

    def update(self, obs: Array, group: LearnerGroup = ALONE) -> None:
        """Takes a batch into the mean. Args: obs: uint8 (N, obs_dim). group: as of Scaler."""
        total, count = self.arrays["scaler/sum"], self.arrays["scaler/count"]
        total += group.sum(obs.sum(axis=0, dtype=np.uint32).astype(np.float64))
        count += group.sum(np.array([len(obs)], np.float64))
        np.divide(total, max(count[0], 1.0), out=self.mean, casting="same_kind")


def scaler_for(spec: Spec) -> Scaler:
    """What scales the observations of these networks."""
    return Pixels(spec.obs_dim) if spec.image else Scaler(spec.obs_dim)
