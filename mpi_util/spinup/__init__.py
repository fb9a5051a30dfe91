"""Spinning Up's on-policy algorithms in torch: `from mpi_util.spinup import ppo, vpg, trpo`, with its arguments.

Every rank collects and updates, with gradients averaged over the ranks. `algorithms` has them and their buffer, `core`
the networks. `python -m mpi_util.run ppo --env CartPole-v1 --cpu 4` runs one, `python -m mpi_util.test_policy FOLDER`
plays what it has learned. Imports torch; nothing else of mpi_util imports this.
"""

from .algorithms import PPOBuffer, VPGBuffer, ppo, trpo, vpg
from .core import MLPActorCritic

__all__ = ["MLPActorCritic", "PPOBuffer", "VPGBuffer", "ppo", "trpo", "vpg"]
