"""mpi_util: run a batch reinforcement-learning program on N processes by adding about ten lines.

All ranks collect rollouts; `rank0_accum_batches` gathers them to rank 0; rank 0 alone updates, with the whole machine,
because the others sleep; `rank0_bcast_wts` sends the weights back. Importing this starts no MPI and loads no framework.

The rooms (folders, and files at the top): each imports only what is above it in this list, and a folder's `__init__`
says which file to read first.

    errors           the errors of the package
    host/            one machine: shared memory, waiting and waking, cores and threads, files; does not use MPI
    launch/          starts the ranks, watches them, ends them together, says which one failed and why
    arrays/          nested batches and models as named arrays; adapters/: one module per framework
    program/         what a rank calls alone: printing, seeding, timing, signals, TensorFlow's set-up
    collectives/     what ranks do together: gather, broadcast, reduce, average, deal
    mpi_tools, mpi_pytorch, mpi_tf    Spinning Up's names for these
    integrations/ *  other libraries' programs on N ranks: Stable-Baselines3
    weight_sync/ *   sender and receivers of weights for workers that keep running
    runs/ *          loggers, saved models, experiments, grids, curves; names in logx *, run_utils *,
                     serialization_utils *, plot *
    spinup/ *        Spinning Up's algorithms in torch; run * is their command line, test_policy * plays their policies

A project that copies this folder may delete what is marked *; runs/ only together with the names in it and spinup/.
docs/architecture.md of the repository has the drawing, one iteration's data, and where to change what.
"""

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from . import tensorflow_setup as _tensorflow_setup
from .cluster.hosts import nslots
from .collectives.dealing import deal, share
from .collectives.gather import all_accum_batches, rank0_accum_batches, rank0_gather
from .collectives.moments import merge_moments
from .collectives.reductions import all_mean, all_sum
from .collectives.weights import all_avg_wts, bcast, chksum, rank0_bcast_wts
from .errors import (
    BatchError,
    HostError,
    LaunchError,
    MissingFrameworkError,
    MpiUtilError,
    RankLeftError,
    RankMismatchError,
    SyncTimeoutError,
    UsageError,
    WeightsError,
    WorkerError,
    WorkerLeftError,
)
from .host.cores import usable_cores
from .launch.api import mpi_fork
from .ranks import identity as _identity
from .ranks import records as _records
from .ranks.console import Phases, msg, print0, steps_sec, timeit
from .ranks.failure import during, fail
from .ranks.records import saved
from .ranks.seeding import rank_seed, set_global_seeds, stream
from .ranks.signals import StopRequest
from .ranks.watchdog import watchdog
from .tensorflow_setup import setup_tensorflow_for_mpi

__version__ = "0.1.0"

rank: int
nworkers: int
restarts: int  # how often mpi_fork has started this program again after a failure
last_saved: Any  # what `saved` was given last before that, or None
tf_config: Any  # a tf.compat.v1.ConfigProto

__all__ = [
    "BatchError", "HostError", "LaunchError", "MissingFrameworkError", "MpiUtilError", "Phases", "RankLeftError",
    "RankMismatchError", "StopRequest", "SyncTimeoutError", "UsageError", "WeightsError", "WorkerError",
    "WorkerLeftError", "all_accum_batches", "all_avg_wts", "all_mean", "all_sum", "bcast", "chksum", "deal",
    "during", "fail", "last_saved", "merge_moments", "mpi_fork", "msg", "nslots", "nworkers", "print0", "rank",
    "rank0_accum_batches", "rank0_bcast_wts", "rank0_gather", "rank_seed", "restarts", "saved", "set_global_seeds",
    "setup_tensorflow_for_mpi", "share", "steps_sec", "stream", "timeit", "usable_cores", "watchdog",
]  # fmt: skip
if "tensorflow" in sys.modules:  # else a star import would load it
    __all__ += ["tf_config"]


_OF_2017 = ("accum_batches", "mpitype", "pt_to_pt_bcast", "set_wt")  # not for new programs

if not TYPE_CHECKING:  # a type checker would take every misspelt name for one of these

    def __getattr__(name: str) -> Any:
        """What is right whenever it is read: `rank` and `nworkers` before and after MPI starts, or without."""
        if name in ("rank", "nworkers"):
            return getattr(_identity, name)()
        if name in ("restarts", "last_saved"):
            return getattr(_records, name)()
        if name == "tf_config":
            return _tensorflow_setup.tf_config()
        if name in _OF_2017 and importlib.util.find_spec(f"{__name__}.compat_2017"):
            return getattr(importlib.import_module(f"{__name__}.compat_2017"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
