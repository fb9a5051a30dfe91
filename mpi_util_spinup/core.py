"""Networks of the algorithms, in torch, on every rank: a policy and a value function; and discounted sums."""

import itertools
import numbers
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical, Distribution, Normal

from mpi_util.errors import UsageError


def discount_cumsum(x: np.ndarray, discount: float) -> np.ndarray:
    """y[t] = x[t] + discount * y[t + 1], float64 (T,)."""
    y = np.array(x, np.float64)
    for t in range(len(y) - 2, -1, -1):
        y[t] += discount * y[t + 1]
    return y


def mlp(sizes: Sequence[int], activation: Any, output_activation: Any = nn.Identity) -> nn.Sequential:
    """Linear layers of these widths, the input's and the output's among them, each followed by an activation."""
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), activation())]
    return nn.Sequential(*layers[:-1], output_activation())


def log_prob(pi: Distribution, act: torch.Tensor) -> torch.Tensor:
    """Of actions; those of a Box have parts."""
    return pi.log_prob(act).sum(-1) if isinstance(pi, Normal) else pi.log_prob(act)


class Actor(nn.Module):
    """A policy: `forward` gives the distribution of the actions, and the log-probabilities of some."""

    _distribution: Any  # of an observation; each kind of policy defines it

    def forward(self, obs: torch.Tensor, act: torch.Tensor | None = None) -> tuple[Distribution, Any]:
        pi = self._distribution(obs)
        return pi, None if act is None else log_prob(pi, act)


class MLPCategoricalActor(Actor):
    """For Discrete actions."""

    def __init__(self, obs_dim: int, act_dim: int, hidden_sizes: Sequence[int], activation: Any):
        super().__init__()
        self.logits_net = mlp([obs_dim, *hidden_sizes, act_dim], activation)

    def _distribution(self, obs: torch.Tensor) -> Distribution:
        return Categorical(logits=self.logits_net(obs))


class MLPGaussianActor(Actor):
    """For Box actions, with standard deviations that do not depend on the state."""

    def __init__(self, obs_dim: int, act_dim: int, hidden_sizes: Sequence[int], activation: Any):
        super().__init__()
        self.log_std = nn.Parameter(torch.full((act_dim,), -0.5))
        self.mu_net = mlp([obs_dim, *hidden_sizes, act_dim], activation)

    def _distribution(self, obs: torch.Tensor) -> Distribution:
        return Normal(self.mu_net(obs), self.log_std.exp())


class MLPCritic(nn.Module):
    def __init__(self, obs_dim: int, hidden_sizes: Sequence[int], activation: Any):
        super().__init__()
        self.v_net = mlp([obs_dim, *hidden_sizes, 1], activation)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return torch.squeeze(self.v_net(obs), -1)


class MLPActorCritic(nn.Module):
    """Policy `pi` and value function `v` for these spaces."""

    def __init__(
        self, observation_space: Any, action_space: Any, hidden_sizes: Sequence[int] = (64, 64),
        activation: Any = nn.Tanh,
    ):  # fmt: skip
        super().__init__()
        widths = list(hidden_sizes) if isinstance(hidden_sizes, Iterable) else [0]
        if not all(isinstance(width, numbers.Integral) and width > 0 for width in widths):
            raise UsageError(f"hidden_sizes are the widths of the layers, such as [64,64]; got {hidden_sizes!r}")
        if not callable(activation):
            raise UsageError(f"activation is a class of torch.nn, such as torch.nn.Tanh; got {activation!r}")
        obs_dim = observation_space.shape[0]
        if hasattr(action_space, "n"):
            self.pi: Actor = MLPCategoricalActor(obs_dim, int(action_space.n), hidden_sizes, activation)
        else:
            self.pi = MLPGaussianActor(obs_dim, action_space.shape[0], hidden_sizes, activation)
        self.v = MLPCritic(obs_dim, hidden_sizes, activation)

    @torch.no_grad()
    def step(self, obs: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A drawn action for an observation, the state's value, the action's log-probability."""
        pi, _ = self.pi(obs)
        act = pi.sample()
        return act.numpy(), self.v(obs).numpy(), log_prob(pi, act).numpy()

    def act(self, obs: torch.Tensor) -> np.ndarray:
        """The drawn action alone."""
        return self.step(obs)[0]
