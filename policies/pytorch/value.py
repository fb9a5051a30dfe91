"""The value learner: least squares on discounted sums of rewards."""

import torch

from policies.pytorch.batches import VALUE_STREAM, n_minibatches, shuffled, stream, to_tensor
from policies.pytorch.learner import Learner, finite_floats

VAR_FLOOR = 1e-12  # targets that are all alike have no variance to explain


class ValueFunction(Learner):
    """Estimates the discounted sum of rewards that follows an observation."""

    def __init__(self, spec, params, config, threads=1, device="cpu"):
        """Copies the value function's parameters.

        Args:
            spec: policies.actor.Spec.
            params: dict of float32 arrays as policies.actor.init_params gives.
            config: policies.hyper.Hyper.
            threads: most torch threads to use in a fit.
            device: torch device.

        Raises:
            ValueError: config.algo is unknown, or the parameters do not fit `spec`.
        """
        hyper = config.resolve()
        super().__init__("value", spec, params, hyper, threads, device, hyper.max_grad_norm)
        self._obs_dim = spec.obs_dim
        self._last_obs = torch.empty((0, spec.obs_dim), device=self.device)
        self._last_ret = torch.empty(0, device=self.device)

    def fit(self, observes, disc_sum_rew, logger):
        """One fit on one batch, and on the batch before it where the algorithm replays that.

        Args:
            observes: float32 (N, obs_dim), scaled.
            disc_sum_rew: float32 (N,), targets: discounted sums of rewards, or advantages plus values (lambda-returns).
            logger: has ``log(dict)``. It gets LossV (mean squared error on this batch after the fit, squared unit of
                the targets) and ExplainedVar (before the fit: 1 is perfect, 0 no better than a constant).

        Raises:
            ValueError: an array has another shape than the above.
            FloatingPointError: a number in the batch, the loss or its gradient is not finite; nothing was changed.
        """
        hyper = self.hyper
        n_rows = len(observes) + len(self._last_ret)
        n_parts = n_minibatches(hyper, n_rows)
        with self.updating(len(observes)):
            obs = to_tensor(observes, (len(observes), self._obs_dim), torch.float32, self.device)
            ret = to_tensor(disc_sum_rew, (len(observes),), torch.float32, self.device)
            error = self._predict(obs).sub_(ret)
            log = {"ExplainedVar": 1.0 - error.var(correction=0) / (ret.var(correction=0) + VAR_FLOOR)}
            all_obs, all_ret = obs, ret
            if hyper.vf_replay:
                all_obs, all_ret = torch.cat((obs, self._last_obs)), torch.cat((ret, self._last_ret))
            rng = stream(hyper.seed, VALUE_STREAM, self.updates)
            for _ in range(hyper.vf_epochs):
                for rows in shuffled(rng, n_rows, n_parts, self.device):
                    error = self._predict(all_obs.index_select(0, rows)).sub_(all_ret.index_select(0, rows))
                    self.net.backward(error.mul_(2.0 / len(rows)).unsqueeze(1))
                    self.adam.step(hyper.vf_lr * self.lr_scale)
            log["LossV"] = self._predict(obs).sub_(ret).square_().mean()
            log = finite_floats(log)
        if hyper.vf_replay:
            self._last_obs, self._last_ret = obs, ret
        logger.log(log)

    def rows_per_step(self, n_rows):
        """As Learner.rows_per_step; rows that are replayed count."""
        n_rows += len(self._last_ret)
        return n_rows // n_minibatches(self.hyper, n_rows)

    def _predict(self, obs):
        """Values. Args: obs: float32 (N, obs_dim) tensor. Returns: float32 (N,) tensor, new."""
        return self.net.forward(obs).squeeze(1)

    def state(self):
        """As Learner.state, with the batch to replay."""
        arrays, scalars = super().state()
        arrays["value/last_obs"] = self._last_obs.cpu().numpy().copy()
        arrays["value/last_ret"] = self._last_ret.cpu().numpy().copy()
        return arrays, scalars

    def load_state(self, arrays, scalars):
        """As Learner.load_state, with the batch to replay."""
        super().load_state(arrays, scalars)
        self._last_obs = torch.tensor(arrays["value/last_obs"], device=self.device)
        self._last_ret = torch.tensor(arrays["value/last_ret"], device=self.device)
