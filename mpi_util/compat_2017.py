"""What programs for the mpi_util of 2017 call besides the names that are still in use."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .arrays.adapters.tf1 import slots
from .collectives.bcast import bcast


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


def pt_to_pt_bcast(x: Any) -> Any:
    """Collective: `bcast`, which was slower than messages from rank to rank under one MPI of that time."""
    return bcast(x)


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
