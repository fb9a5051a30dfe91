"""Two ranks gather and broadcast 62 MB, and check it. Runs in ranks that `python -m mpi_util doctor` starts."""

import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from ..collectives.bcast import rank0_bcast_wts
from ..collectives.channel import channel_of
from ..collectives.gather import rank0_accum_batches
from ..collectives.reduce import all_sum
from ..launch.api import mpi_fork
from ..ranks.identity import rank
from ..ranks.state import state
from ..ranks.threads import Threads

_ROWS = 15_500_000  # float32, 62 MB; each of them exact
_REPEATS = 5


def run() -> None:
    """Starts the ranks, of which rank 0 prints what was found as a JSON object."""
    mpi_fork(2, exit=True)
    channel = channel_of()
    size, whole = channel.size, np.arange(_ROWS, dtype=np.float32)
    mine = {"x": whole[rank() * _ROWS // size : (rank() + 1) * _ROWS // size]}
    weights = {"w": whole if rank() == 0 else np.full_like(whole, -1)}
    batch: dict[str, np.ndarray] = {}
    copied = whole[: 0 if rank() else None]  # by rank 0 alone
    calls: dict[str, Callable[[], object]] = {
        "memcpy": partial(np.copyto, np.empty_like(copied), copied),
        "gather": lambda: batch.update(rank0_accum_batches(mine)),
        "bcast": partial(rank0_bcast_wts, weights),
    }
    seconds = {name: statistics.median(_clock(call) for _ in range(_REPEATS)) for name, call in calls.items()}
    right = all_sum(int(np.array_equal(weights["w"], whole) and (rank() > 0 or np.array_equal(batch["x"], whole))))
    rank0_accum_batches(mine)
    if rank() == 0:
        found = dict(seconds=seconds, bytes=whole.nbytes, ranks=size, right=int(right) == size)
        pools = state(Threads).pools.items()  # by library
        found["threads"] = {os.path.basename(path): pool.get() for path, pool in pools if pool.ours}  # else the user's
        found["sharing"] = channel.machine.count(0)  # ranks that share memory
        print(json.dumps(found), flush=True)


def _clock(call: Callable[[], object]) -> float:
    """Seconds on this rank, from when all are ready."""
    all_sum(0)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    run()
