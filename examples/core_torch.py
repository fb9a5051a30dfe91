"""Actor and critic for the torch programs of this folder."""

import itertools
import math
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Discrete, Space
from torch import nn
from torch.distributions import Categorical, Distribution, Independent, Normal


def mlp(sizes: list[int]) -> nn.Sequential:
    """Linear layers with tanh between them."""
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


class CategoricalActor(nn.Module):
    """A policy for Discrete actions."""

    def __init__(self, obs_dim: int, n_actions: int, hidden_sizes: list[int]):
        super().__init__()
        self.net = mlp([obs_dim, *hidden_sizes, n_actions])

    def forward(self, obs: torch.Tensor) -> Categorical:
        return Categorical(logits=self.net(obs))


class GaussianActor(nn.Module):
    """A policy for Box actions: a normal distribution whose deviations do not depend on the state."""

    def __init__(self, obs_dim: int, act_dim: int, hidden_sizes: list[int]):
        super().__init__()
        self.net = mlp([obs_dim, *hidden_sizes, act_dim])
        self.log_std = nn.Parameter(torch.full((act_dim,), -0.5))

    def forward(self, obs: torch.Tensor) -> Distribution:
        return Independent(Normal(self.net(obs), self.log_std.exp()), 1)


class Critic(nn.Module):
    """A state's value."""

    def __init__(self, obs_dim: int, hidden_sizes: list[int]):
        super().__init__()
        self.net = mlp([obs_dim, *hidden_sizes, 1])

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.net(obs)
        return values.squeeze(-1)


class ActorCritic(nn.Module):
    """pi(obs) is a distribution over actions, v(obs) a value."""

    def __init__(self, observation_space: Space[Any], action_space: Space[Any], hidden_sizes: list[int]):
        super().__init__()
        obs_dim = math.prod(observation_space.shape or ())
        self.pi: nn.Module
        if isinstance(action_space, Discrete):
            self.pi = CategoricalActor(obs_dim, int(action_space.n), hidden_sizes)
        else:
            self.pi = GaussianActor(obs_dim, math.prod(action_space.shape or ()), hidden_sizes)
        self.v = Critic(obs_dim, hidden_sizes)

    @torch.no_grad()
    def step(self, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A sampled action for one observation, the state's value, the action's log-probability."""
        x = torch.as_tensor(obs, dtype=torch.float32)
        pi = self.pi(x)
        act = pi.sample()
        return act.numpy()[()], self.v(x).numpy(), pi.log_prob(act).numpy()  # [()]: a number, if it is one


def count_vars(module: nn.Module) -> int:
    """Number of parameters."""
    return sum(p.numel() for p in module.parameters())
