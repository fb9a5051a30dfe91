"""Two ranks gather and broadcast 62 MB, and check it. Runs in ranks that `python -m mpi_util doctor` starts."""

import json

import numpy as np

from ..collectives.bcast import rank0_bcast_wts
from ..collectives.channel import channel_of
from ..collectives.gather import rank0_accum_batches
from ..collectives.reduce import all_sum
from ..launch.api import mpi_fork
from ..ranks.identity import rank

_ROWS = 15_500_000  # float32, 62 MB; each of them exact


def run() -> None:
    """Starts the ranks, of which rank 0 prints what was found as a JSON object."""
    mpi_fork(2, exit=True)
    channel = channel_of()
    size, whole = channel.size, np.arange(_ROWS, dtype=np.float32)
    mine = {"x": whole[rank() * _ROWS // size : (rank() + 1) * _ROWS // size]}
    weights = {"w": whole if rank() == 0 else np.full_like(whole, -1)}
    rank0_bcast_wts(weights)
    batch = rank0_accum_batches(mine)
    right = all_sum(int(np.array_equal(weights["w"], whole) and (rank() > 0 or np.array_equal(batch["x"], whole))))
    if rank() == 0:
        sharing = channel.machine.count(0)  # ranks that share memory
        found = {"bytes": whole.nbytes, "ranks": size, "right": int(right) == size, "sharing": sharing}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    run()
