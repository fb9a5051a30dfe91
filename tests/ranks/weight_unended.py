"""The sender's program ends without shutdown(): its workers learn it."""

import time

import numpy as np
from harness import fork

import mpi_util
from mpi_util_weight_sync import MPIWeightSyncScheme

fork()
scheme, mine = MPIWeightSyncScheme(timeout=30), {"w": np.full(3, float(mpi_util.rank))}
if mpi_util.rank == 0:
    scheme.init_on_sender(model=mine)
    scheme.connect()
    scheme.send()
else:
    scheme.init_on_receiver(model=mine)
    scheme.connect()
    while not scheme.ended:
        time.sleep(0.01)
    assert (mine["w"] == 0).all()
print(f"well {mpi_util.rank}\n", end="", flush=True)
