"""Corners of the scheme between ranks; rank 0 prints "well"."""

import sys

import numpy as np
from harness import fork

import mpi_util
from mpi_util_weight_sync import MPIWeightSyncScheme

fork()
rank, size = mpi_util.rank, mpi_util.nworkers
what = sys.argv[-1]


def two(senders):
    """Two schemes with sync=False, from these ranks."""
    schemes = [MPIWeightSyncScheme(sync=False, sender=sender) for sender in senders]
    models = [{"w": np.full(3, float(rank))} for _ in senders]
    for scheme, sender, model in zip(schemes, senders, models):
        if rank == sender:
            scheme.init_on_sender(model=model)
        else:
            scheme.init_on_receiver(model=model)
    for scheme in schemes:
        scheme.connect()
    for scheme, sender in list(zip(schemes, senders))[::-1]:
        if rank == sender:
            scheme.wait_async()
    mpi_util.all_sum(0)
    assert all((model["w"] == sender).all() for sender, model in zip(senders, models))
    for scheme in schemes:
        scheme.shutdown()


if what == "same sender":
    two([0, 0])
elif what == "both ways":
    two([0, 1])
elif what == "one, then a collective":
    scheme, mine = MPIWeightSyncScheme(sync=False), {"w": np.full(3, float(rank))}
    if rank == 0:
        scheme.init_on_sender(model=mine)
    else:
        scheme.init_on_receiver(model=mine)
    scheme.connect()  # on rank 0 it returns at once
    mpi_util.all_sum(0)
    assert (mine["w"] == 0).all()
    scheme.shutdown()
else:  # many
    for i in range(int(what)):
        scheme, mine = MPIWeightSyncScheme(), {"w": np.zeros(1)}
        scheme.shutdown()
        if i % 50 == 0:
            mpi_util.all_sum(0)
mpi_util.print0("well")
