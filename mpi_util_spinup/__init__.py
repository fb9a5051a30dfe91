"""For programs written for Spinning Up: `spinup.utils.X` becomes `mpi_util_spinup.X`, with its names and arguments.

Every rank collects and updates, with gradients averaged over the ranks. `from mpi_util_spinup import ppo, vpg, trpo`;
`python -m mpi_util_spinup.run ppo --env CartPole-v1 --cpu 4` runs one, and `python -m mpi_util_spinup.play_policy
FOLDER --trust` (there: test_policy) plays what it has learned. Read first: algorithms.py, logx.py, run_utils.py.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .algorithms import MLPActorCritic, PPOBuffer, VPGBuffer, ppo, trpo, vpg

__all__ = ["MLPActorCritic", "PPOBuffer", "VPGBuffer", "ppo", "trpo", "vpg"]


def __getattr__(name: str) -> Any:
    """The algorithms, which need torch; the other modules do not."""
    if name in __all__:
        from . import algorithms

        return getattr(algorithms, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
