"""Spinning Up's names on mpi_util, for people who come from there: `spinup.utils.X` becomes `mpi_util_spinup.X`.

`mpi_tools`, `mpi_pytorch`, `mpi_tf`, `logx`, `run_utils`, `serialization_utils`, `plot` and the algorithms keep their
names and arguments: `from mpi_util_spinup import ppo, vpg, trpo`. Every rank collects and updates, with gradients
averaged over the ranks. `python -m mpi_util_spinup.run ppo --env CartPole-v1 --cpu 4` runs one, `python -m
mpi_util_spinup.play_policy FOLDER` plays what it has learned. Read first: algorithms.py, logger.py, experiment.py.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .algorithms import PPOBuffer, VPGBuffer, ppo, trpo, vpg
    from .core import MLPActorCritic

__all__ = ["MLPActorCritic", "PPOBuffer", "VPGBuffer", "ppo", "trpo", "vpg"]


def __getattr__(name: str) -> Any:
    """The algorithms, which need torch; the other modules do not."""
    if name in __all__:
        from . import algorithms, core

        return getattr(core if name == "MLPActorCritic" else algorithms, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
