"""Spinning Up's on-policy algorithms in torch: `from mpi_util.spinup import ppo, vpg, trpo`, with its arguments.

Every rank collects and updates, with gradients averaged over the ranks. Read first: `algorithms`, which has them and
their buffer; `core` has the networks. `python -m mpi_util.run ppo --env CartPole-v1 --cpu 4` runs one, `python -m
mpi_util.test_policy FOLDER` plays what it has learned. May import torch, and Spinning Up's names of this package;
nothing else of it imports this.
"""

from .algorithms import PPOBuffer, VPGBuffer, ppo, trpo, vpg
from .core import MLPActorCritic

__all__ = ["MLPActorCritic", "PPOBuffer", "VPGBuffer", "ppo", "trpo", "vpg"]
