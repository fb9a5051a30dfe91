"""mpi_util: run a batch reinforcement-learning program on N processes by adding about ten lines.

All ranks collect rollouts, and rank 0 alone updates, with the whole machine, because the others sleep. `collect` (or
`rollouts`) sends the weights, plays and gathers; it is made of `rank0_bcast_wts`, `deal` and `rank0_accum_batches`.

Importing this starts no MPI and loads no framework; most of its names are loaded when they are first read.
The `__init__` of a folder says what it does, in whose process it runs and which file to read first. The repository's
docs/architecture.md says what imports what, what a copy may leave out, and where to change what.
"""

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

# isort: off
from .errors import (
    BatchError, HostError, LaunchError, MissingFrameworkError, MpiUtilError, RankLeftError, RankMismatchError,
    SimulatorError, SyncTimeoutError, UsageError, WeightsError, WorkerError, WorkerLeftError,
)  # fmt: skip

# isort: on
from .host.cores import usable_cores
from .ranks.console import Phases, msg, on_rank0, print0, steps_sec, timeit
from .ranks.failure import during, fail
from .ranks.records import saved
from .ranks.signals import StopRequest

if TYPE_CHECKING:
    from .arrays.adapters.tensorflow_setup import setup_tensorflow_for_mpi
    from .collectives.bcast import all_avg_wts, bcast, chksum, rank0_bcast_wts
    from .collectives.collecting import Collected, Rollout, collect, rollouts
    from .collectives.deal import deal, share
    from .collectives.gather import all_accum_batches, rank0_accum_batches, rank0_gather
    from .collectives.moments import merge_moments
    from .collectives.reduce import all_mean, all_sum
    from .doctor.replay import check_replay
    from .launch.api import mpi_fork, nslots
    from .ranks.seeding import rank_seed, seed_of, set_global_seeds, stream
    from .ranks.watchdog import watchdog
    from .simulators.environment import simulator
    from .simulators.process import solver

__version__ = "0.1.0"

rank: int
nworkers: int
restarts: int  # how often mpi_fork has started this program again after a failure
last_saved: Any  # what `saved` was given last before that, or None
collected: "Collected"  # what collect and rollouts have brought to rank 0 so far
tf_config: Any  # a tf.compat.v1.ConfigProto
weights_version: int  # how often weights have been sent to all ranks: by rank0_bcast_wts, all_avg_wts, collect

__all__ = [
    "BatchError", "Collected", "HostError", "LaunchError", "MissingFrameworkError", "MpiUtilError", "Phases",
    "RankLeftError", "RankMismatchError", "Rollout", "SimulatorError", "StopRequest", "SyncTimeoutError",
    "UsageError", "WeightsError", "WorkerError", "WorkerLeftError", "all_accum_batches", "all_avg_wts", "all_mean",
    "all_sum", "bcast", "chksum", "collect", "collected", "deal", "during", "fail", "last_saved", "merge_moments",
    "mpi_fork", "msg", "nslots", "nworkers", "on_rank0", "print0", "rank", "rank0_accum_batches", "rank0_bcast_wts",
    "rank0_gather", "rank_seed", "restarts", "rollouts", "saved", "seed_of", "set_global_seeds",
    "setup_tensorflow_for_mpi", "share", "steps_sec", "stream", "timeit", "usable_cores", "watchdog", "weights_version",
]  # fmt: skip
if importlib.util.find_spec(".doctor", __name__):  # a copy may lack it
    __all__ += ["check_replay"]
if importlib.util.find_spec(".simulators", __name__):
    __all__ += ["simulator", "solver"]
if "tensorflow" in sys.modules:  # else a star import would load it
    __all__ += ["tf_config"]

_LOADED_WHEN_READ = {
    "collectives.bcast": ["all_avg_wts", "bcast", "chksum", "rank0_bcast_wts"],
    "collectives.collecting": ["Collected", "Rollout", "collect", "rollouts"],
    "collectives.deal": ["deal", "share"],
    "collectives.gather": ["all_accum_batches", "rank0_accum_batches", "rank0_gather"],
    "collectives.moments": ["merge_moments"],
    "collectives.reduce": ["all_mean", "all_sum"],
    "compat_2017": [  # not for new programs
        "accum_batches", "chksum_keras", "mpitype", "pt_to_pt_bcast", "rank0_bcast_wts_keras", "set_wt",
    ],
    "doctor.replay": ["check_replay"],
    "launch.api": ["mpi_fork", "nslots"],
    "ranks.seeding": ["rank_seed", "seed_of", "set_global_seeds", "stream"],  # with NumPy, which may be missing
    "ranks.watchdog": ["watchdog"],
    "simulators.environment": ["simulator"],
    "simulators.process": ["solver"],
    "arrays.adapters.tensorflow_setup": ["setup_tensorflow_for_mpi"],
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _LOADED_WHEN_READ.items() for name in names}
# What these functions return is right whenever it is read: before and after MPI starts, or without it.
_CALLED_WHEN_READ = {
    "rank": "ranks.identity", "nworkers": "ranks.identity", "restarts": "ranks.records", "last_saved": "ranks.records",
    "collected": "collectives.collecting", "tf_config": "arrays.adapters.tensorflow_setup",
    "weights_version": "collectives.bcast",
}  # fmt: skip


if not TYPE_CHECKING:  # a type checker would take every misspelt name for one of these

    def __getattr__(name: str) -> Any:
        """The names of the two tables. AttributeError: there is none of this name, or its file was deleted."""
        if name in _CALLED_WHEN_READ:
            return getattr(importlib.import_module(f"{__name__}.{_CALLED_WHEN_READ[name]}"), name)()
        module = f"{__name__}.{_MODULE_OF.get(name)}"
        try:
            if name in _MODULE_OF:
                return globals().setdefault(name, getattr(importlib.import_module(module), name))
        except ModuleNotFoundError as error:
            if not module.startswith(error.name or module):  # it needs a package that is not installed
                raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
