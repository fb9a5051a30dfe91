"""Running observation scale, so that the networks see inputs of zero mean and unit variance.

The state is a dict of arrays that travels with the weights: rank 0 updates it once per iteration, every rank scales
with the same bits.
"""

import numpy as np

CLIP = 10.0  # in standard deviations: keeps a first contact force or a fall from saturating the networks
VAR_FLOOR = 1e-8  # an observation that never changed scales to 0, not to infinity


class Scaler:
    """Running mean and variance of observations.

    Attributes:
        arrays: dict of str to array, modified in place, never rebound.
            ``scaler/mean``, ``scaler/scale``: float32 (obs_dim,), what `scale` uses; 0 and 1 before the first update.
            ``scaler/run_mean``, ``scaler/run_m2``: float64 (obs_dim,), mean and sum of squared deviations so far.
            ``scaler/count``: float64 (1,), number of observations so far.
    """

    def __init__(self, obs_dim):
        """Args: obs_dim: length of one observation."""
        self.arrays = {
            "scaler/mean": np.zeros(obs_dim, np.float32),
            "scaler/scale": np.ones(obs_dim, np.float32),
            "scaler/run_mean": np.zeros(obs_dim),
            "scaler/run_m2": np.zeros(obs_dim),
            "scaler/count": np.zeros(1),
        }

    def update(self, obs):
        """Takes a batch into the running moments (Chan, Golub, LeVeque 1979: pairwise merge of two samples).

        Args:
            obs: unscaled observations, float32 or float64 (N, obs_dim). No rows: nothing changes.

        Raises:
            FloatingPointError: an observation is not finite; the state is as before.
        """
        n = len(obs)
        if n == 0:
            return
        # Deviations from the first row keep their digits where the mean is far from 0.
        with np.errstate(invalid="ignore"):
            deviation = obs - obs[0].astype(np.float64)
            offset = deviation.mean(axis=0)
            deviation -= offset
            m2 = np.einsum("ij,ij->j", deviation, deviation)
        if not np.isfinite(m2).all():
            bad = int(np.flatnonzero(~np.isfinite(m2))[0])
            raise FloatingPointError(f"observation component {bad} is not finite")
        mean, run_m2, count = (self.arrays[f"scaler/{key}"] for key in ("run_mean", "run_m2", "count"))
        total = count[0] + n
        delta = offset + obs[0] - mean
        run_m2 += m2 + np.square(delta) * (count[0] * n / total)
        mean += delta * (n / total)
        count[0] = total
        self.arrays["scaler/mean"][:] = mean
        self.arrays["scaler/scale"][:] = 1.0 / np.sqrt(run_m2 / total + VAR_FLOOR)

    def scale(self, obs, out=None):
        """Scales observations; element by element, so a row's bits are the same alone and in any batch.

        Args:
            obs: unscaled, float32 or float64, shape (obs_dim,) or (N, obs_dim).
            out: float32 of the same shape to write into; by default a new array.

        Returns:
            float32, the shape of `obs`, within +-10.
        """
        if out is None:
            out = np.empty(obs.shape, np.float32)
        np.subtract(obs, self.arrays["scaler/mean"], out=out, casting="same_kind")
        np.multiply(out, self.arrays["scaler/scale"], out=out)
        return out.clip(-CLIP, CLIP, out=out)
