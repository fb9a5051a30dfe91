"""Networks as torch modules, with torch's distributions, autograd and Adam."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.distributions import Categorical, Distribution, Normal
from torch.distributions import kl_divergence as torch_kl

from policies import backend
from policies.backend import ADAM, Array, Outcome, Rows
from policies.torch.modules import build, named_parameters


class Net(backend.Net):
    """See policies.backend.Net; its `module` is the built-in network or the user's, (N, obs_dim) -> (N, outputs)."""

    def build(self, device: str) -> None:
        try:
            probe = torch.zeros(1, device=device)
            self.device, _ = probe.device, probe.cpu()  # which fails on "meta"
        except (RuntimeError, AssertionError) as error:  # the second where torch was built without CUDA
            raise RuntimeError(str(error).splitlines()[0]) from None
        self.module = build(self.spec, self.name).to(self.device)
        named = named_parameters(self.module, self.name)
        if self.spec.network:
            deviations = {key: shape for key, shape in self.shapes.items() if key == "policy/log_std"}
            self.shapes = {key: tuple(parameter.shape) for key, parameter in named.items()} | deviations
        # All parameters are views of one vector, so that clipping and Adam take one tensor. The last ones are a
        # Gaussian's deviations, which have a step size of their own.
        self._vectors = [torch.zeros(self.n_params, device=self.device) for _ in range(3)]
        views = self.by_name(self._vectors[0])
        self._log_std = torch.nn.Parameter(views.get("policy/log_std", self._vectors[0][:0]))
        named["policy/log_std"] = self._log_std
        self._parameters = [named[key] for key in self.shapes]
        for parameter, view in zip(self._parameters, views.values()):
            parameter.data = view
        self._sizes = [self.n_params - self._log_std.numel(), self._log_std.numel()]
        self._parts = [torch.nn.Parameter(part) for part in self._vectors[0].split(self._sizes)]
        self._adam = torch.optim.Adam(
            [{"params": [part]} for part in self._parts],
            betas=(ADAM["beta1"], ADAM["beta2"]), eps=ADAM["eps"], fused=True,
        )  # fmt: skip
        for part, m, v in zip(self._parts, *(vector.split(self._sizes) for vector in self._vectors[1:])):
            self._adam.state[part] = {"step": torch.zeros((), device=self.device), "exp_avg": m, "exp_avg_sq": v}

    def vector(self, which: int = 0) -> Array:
        return self._vectors[which].to("cpu", copy=True).numpy()

    def set_vector(self, vector: Array, which: int = 0) -> None:
        self._vectors[which].copy_(torch.as_tensor(vector))

    def step(self, grad: Any, lr: float) -> None:
        grad = torch.as_tensor(grad, device=self.device)
        grad.mul_((self.hyper.max_grad_norm / torch.linalg.vector_norm(grad)).clamp_(max=1.0))
        for state in self._adam.state.values():  # Adam counts in tensors
            state["step"].fill_(self.steps)
        boosts = 1.0, self.hyper.log_std_lr
        for part, values, group, boost in zip(self._parts, grad.split(self._sizes), self._adam.param_groups, boosts):
            part.grad, group["lr"] = values, lr * boost
        self._adam.step()
        self.steps += 1

    def loss_gradient(self, rows: Rows, minibatch: Array, n: int) -> torch.Tensor:
        picked = torch.from_numpy(minibatch).to(self.device)
        return self.flat_gradient(self.loss(*(whole.index_select(0, picked) for whole in rows.fields)) / n)

    def loss(self, *fields: torch.Tensor) -> torch.Tensor:
        """Sum of the losses of some rows. Args: fields: of these."""
        raise NotImplementedError

    def flat_gradient(self, value: torch.Tensor, **how: Any) -> torch.Tensor:
        """Gradient by the parameters, (P,). Args: value: a number. how: as of torch.autograd.grad."""
        grads = torch.autograd.grad(value, self._parameters, materialize_grads=True, **how)
        return torch.cat([grad.reshape(-1) for grad in grads])

    def copied(self, array: Array, dtype: type = np.float32) -> torch.Tensor:
        return torch.tensor(np.ascontiguousarray(array, dtype), device=self.device)  # in memory that torch has aligned

    @contextmanager
    def using(self, threads: int) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


class PolicyNet(Net, backend.PolicyNet):
    def dist(self, obs: torch.Tensor) -> Distribution:
        """The policy's distributions of actions, or of their components. Args: obs: float32 (N, obs_dim)."""
        out = self.module(obs)
        if self.spec.discrete:
            return Categorical(logits=out, validate_args=False)
        return Normal(out, self._log_std.exp().expand_as(out), validate_args=False)

    def logp(self, dist: Distribution, act: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of actions, (N,). Torch's Independent, which sums them too, cannot do so without rows."""
        logp = dist.log_prob(act)
        return logp if self.spec.discrete else logp.sum(1)

    @torch.no_grad()
    def freeze(self, obs: torch.Tensor, act: torch.Tensor) -> tuple[Distribution, torch.Tensor]:
        old = self.dist(obs)
        return old, self.logp(old, act)

    def outcome(self, rows: Rows) -> Outcome:
        obs, act, adv, old_logp = rows.fields
        now = self.dist(obs)
        ratio = (self.logp(now, act) - old_logp).exp()
        kl = kl_divergence(rows.old, now)
        terms = torch.stack([kl.sum(), now.entropy().sum(), -(ratio * adv).sum()])
        clipped = ((ratio.detach() - 1.0).abs() > self.hyper.clip).sum()

        def gradient(*weights: float) -> torch.Tensor:
            return self.flat_gradient(terms @ torch.tensor(weights, device=self.device))

        return Outcome(torch.cat([terms.detach(), clipped[None]]).cpu().numpy().astype(np.float64), gradient)

    def loss(self, *fields: torch.Tensor) -> torch.Tensor:
        """See Net: -min(ratio * adv, clipped ratio * adv), less the entropy."""
        obs, act, adv, old_logp = fields
        now, clip = self.dist(obs), self.hyper.clip
        ratio = (self.logp(now, act) - old_logp).exp()
        loss = -torch.minimum(ratio * adv, ratio.clamp(1.0 - clip, 1.0 + clip) * adv).sum()
        return loss - self.hyper.ent_coef * now.entropy().sum() if self.hyper.ent_coef else loss

    def fisher(self, rows: Rows, n: int) -> Callable[[Array], torch.Tensor]:
        """See policies.backend.PolicyNet: by differentiating the divergence from the policy itself twice."""
        obs = rows.fields[0]
        with torch.no_grad():
            same = self.dist(obs)
        slope = self.flat_gradient(kl_divergence(same, self.dist(obs)).sum() / n, create_graph=True)

        def product(vector: Array) -> torch.Tensor:
            return self.flat_gradient(slope @ torch.as_tensor(vector, device=self.device), retain_graph=True)

        return product


def kl_divergence(old: Distribution, new: Distribution) -> torch.Tensor:
    """KL(old || new) of each row, or of its components. Torch's is infinite where a float32 probability rounds to 0."""
    if isinstance(old, Categorical) and isinstance(new, Categorical):
        return (old.probs * (old.logits - new.logits)).sum(-1)
    return torch_kl(old, new)


class ValueNet(Net, backend.ValueNet):
    @torch.no_grad()
    def values(self, rows: Rows) -> Array:
        return self.module(rows.fields[0])[:, 0].cpu().numpy()

    def loss(self, *fields: torch.Tensor) -> torch.Tensor:
        obs, ret = fields
        return (self.module(obs)[:, 0] - ret).square().sum()
