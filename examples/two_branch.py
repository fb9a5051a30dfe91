"""A network of one's own for train.py: positions and velocities each have a branch, whose features are joined.

    python train.py Hopper-v5 --nprocs 2 --network examples.two_branch:network

train.py calls the function for the policy and for the value function, on every process.
"""

import torch
from torch import nn


class TwoBranch(nn.Module):
    """Maps observations (N, obs_dim) to (N, outputs)."""

    def __init__(self, obs_dim: int, outputs: int, width: int = 32):
        super().__init__()
        self.split = obs_dim // 2  # MuJoCo's observations have positions first
        self.positions = nn.Sequential(nn.Linear(self.split, width), nn.Tanh())
        self.velocities = nn.Sequential(nn.Linear(obs_dim - self.split, width), nn.Tanh())
        self.joined = nn.Sequential(nn.Linear(2 * width, 2 * width), nn.Tanh())
        self.last = nn.Linear(2 * width, outputs)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Args: obs: float32 (N, obs_dim), scaled. Returns: float32 (N, outputs)."""
        branches = self.positions(obs[:, : self.split]), self.velocities(obs[:, self.split :])
        outputs: torch.Tensor = self.last(self.joined(torch.cat(branches, 1)))
        return outputs


def network(name: str, obs_dim: int, outputs: int) -> nn.Module:
    """The network `name`, "policy" or "value"."""
    module = TwoBranch(obs_dim, outputs)
    if name == "policy":  # first actions near the middle of their range
        nn.init.normal_(module.last.weight, std=0.01)
        nn.init.zeros_(module.last.bias)
    return module
