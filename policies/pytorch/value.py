"""The value learner: least squares on returns."""

import numpy as np
import torch

from policies.learners import finite_floats
from policies.minibatches import VALUE_STREAM, n_minibatches, stream
from policies.pytorch.batches import shuffled, to_tensor
from policies.pytorch.learner import Learner
from policies.share import ALONE, Part

VAR_FLOOR = 1e-12  # constant targets have no variance to explain


class ValueFunction(Learner):
    """Estimates the return that follows an observation."""

    def __init__(self, spec, params, config, threads=1, device="cpu", share=ALONE):
        """Copies the value function's parameters.

        Args:
            spec: policies.actor.Spec.
            params: dict of float32 arrays as policies.actor.init_params returns.
            config: policies.hyper.Hyper.
            threads: most torch threads to use in a fit.
            device: torch device.
            share: of the learners that share the batch, as policies.share.Alone.

        Raises:
            ValueError: config.algo is unknown, or the parameters do not fit `spec`.
        """
        hyper = config.resolve()
        super().__init__("value", spec, params, hyper, threads, device, share, hyper.max_grad_norm)
        self._obs_dim = spec.obs_dim
        self._last_obs = torch.empty((0, spec.obs_dim), device=self.device)
        self._last_ret = torch.empty(0, device=self.device)
        self._last_part = Part.whole(0)

    def fit(self, obs, ret, logger, part=None):
        """One fit on one batch, and on the batch before it where the algorithm replays that.

        Collective among the learners that share the batch: each passes its own rows; the log is of the whole batch.

        Args:
            obs: float32 (N, obs_dim), scaled.
            ret: float32 (N,), targets: discounted sums of rewards, or advantages plus values (TD(lambda) returns).
            logger: has ``log(dict)``. It gets LossV (mean squared error on this batch after the fit, squared unit of
                the targets) and ExplainedVar (before the fit: 1 is perfect, 0 no better than a constant).
            part: policies.share.Part, which rows of the whole batch these are; None: all.

        Raises:
            ValueError: an array has another shape than the above, or a minibatch fewer rows than there are learners.
            FloatingPointError: a number in the batch, the loss or its gradient is not finite; nothing was changed.
        """
        hyper = self.hyper
        part = Part.whole(len(obs)) if part is None else part
        all_part = part.followed_by(self._last_part)
        n_parts = n_minibatches(hyper, all_part.total, self.share.n_learners)
        with self.updating(part.total):
            obs = to_tensor(obs, (len(part), self._obs_dim), torch.float32, self.device)
            ret = to_tensor(ret, (len(part),), torch.float32, self.device)
            self.require_finite(obs=obs, ret=ret)
            _, (error_std, ret_std) = self.moments(part, self._predict(obs).sub_(ret), ret)
            all_obs, all_ret = obs, ret
            if hyper.vf_replay:
                all_obs, all_ret = torch.cat((obs, self._last_obs)), torch.cat((ret, self._last_ret))
            rng = stream(hyper.seed, VALUE_STREAM, self.updates)
            for _ in range(hyper.vf_epochs):
                for rows, n in shuffled(rng, all_part, n_parts, self.device):
                    error = self._predict(all_obs.index_select(0, rows)).sub_(all_ret.index_select(0, rows))
                    self.net.backward(error.mul_(2.0 / n).unsqueeze(1))
                    self.step(hyper.vf_lr * self.lr_scale)
            (loss,) = self.means(part, self._predict(obs).sub_(ret).square_().mean())
            log = finite_floats({"ExplainedVar": 1.0 - error_std**2 / (ret_std**2 + VAR_FLOOR), "LossV": loss})
        if hyper.vf_replay:
            self._last_obs, self._last_ret, self._last_part = obs, ret, part
        logger.log(log)

    def rows_per_step(self, n_rows):
        """As Learner.rows_per_step; rows that are replayed count."""
        n_rows += self._last_part.total
        return n_rows // n_minibatches(self.hyper, n_rows, self.share.n_learners)

    def _predict(self, obs):
        """Values. Args: obs: float32 (N, obs_dim) tensor. Returns: float32 (N,) tensor, new."""
        return self.net.forward(obs).squeeze(1)

    def state(self):
        """Collective among the learners: as Learner.state, with the whole batch to replay."""
        arrays, scalars = super().state()
        part, owner = self._last_part, np.full(len(self._last_part), self.share.index)
        arrays["value/last_obs"] = part.collect(self.share, self._last_obs.cpu().numpy())
        arrays["value/last_ret"] = part.collect(self.share, self._last_ret.cpu().numpy())
        arrays["value/last_owner"] = part.collect(self.share, owner)
        return arrays, scalars

    def load_state(self, arrays, scalars):
        """As Learner.load_state; each learner takes its rows of the batch to replay."""
        super().load_state(arrays, scalars)
        self._last_part = Part.of_owners(self.share, arrays["value/last_owner"])
        rows = self._last_part.rows
        self._last_obs = torch.tensor(arrays["value/last_obs"][rows], device=self.device)
        self._last_ret = torch.tensor(arrays["value/last_ret"][rows], device=self.device)
