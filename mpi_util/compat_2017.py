"""The mpi_util of 2017, for programs written for it: its names and its keywords. Runs in every rank.

    import mpi_util.compat_2017 as mpi_util

Has everything that `mpi_util` has. Its functions that are not in today's API (`accum_batches`, `set_wt`, ...) are found
in `mpi_util` itself too, so a program that uses no keyword of 2017 needs no change. Delete this file if you have no
such program, and arrays/adapters/tf1.py if you have no tf.compat.v1 session: nothing else uses them.
"""

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .arrays.adapters import slots
from .collectives import bcast as _bcast  # `bcast` is a name of mpi_util too
from .collectives import gather
from .ranks import console, seeding


def _with_keywords(function: Callable[..., Any], **of_2017: str) -> Callable[..., Any]:
    """The function, which also takes its arguments by the keywords of 2017. Args: of_2017: today's name of each."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{of_2017.get(key, key): value for key, value in kwargs.items()})

    return call


rank0_accum_batches = _with_keywords(gather.rank0_accum_batches, segins="batch")
all_accum_batches = _with_keywords(gather.all_accum_batches, segs="batch")
rank0_bcast_wts = _with_keywords(_bcast.rank0_bcast_wts, sess="model")
all_avg_wts = _with_keywords(_bcast.all_avg_wts, sess="model")
chksum = _with_keywords(_bcast.chksum, sess="model")
steps_sec = _with_keywords(console.steps_sec, stepcnt="n_steps")
chksum_keras = _bcast.chksum
pt_to_pt_bcast = _bcast.bcast
set_global_seeds = _with_keywords(seeding.set_global_seeds, i="seed")


def accum_batches(segs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Joins batches by key: lists end to end, arrays along their rows; single numbers are left out. Not collective."""
    joined: dict[str, Any] = {}
    for key in segs[0]:
        parts = [seg[key] for seg in segs]
        if isinstance(parts[0], list):
            joined[key] = [item for part in parts for item in part]
        elif np.ndim(parts[0]):
            joined[key] = np.concatenate(parts)
    return joined


def rank0_bcast_wts_keras(model: Any, label: str = "") -> None:
    """Collective: `rank0_bcast_wts` of a Keras model, with all its weights. Args: label: not used."""
    _bcast.rank0_bcast_wts(model)


def set_wt(sess: Any, graph: Any, var: Any, val: Any) -> None:
    """Sets a variable of a tf.compat.v1 session. Not collective. Nothing is added to the graph."""
    slot = next(slot for slot in slots(sess, graph) if slot.name == var.name.partition(":")[0])
    slot.write(np.asarray(val, slot.dtype))
    if slot.flush:
        slot.flush()


def mpitype(typ: Any) -> Any:
    """MPI's type for float64 and float32; None for others."""
    from mpi4py import MPI

    return {np.dtype(np.float64): MPI.DOUBLE, np.dtype(np.float32): MPI.FLOAT}.get(np.dtype(typ))


def __getattr__(name: str) -> Any:
    """What is not of 2017 alone, such as `rank` and `nworkers`, which are right whenever they are read."""
    return getattr(importlib.import_module(__package__ or ""), name)
