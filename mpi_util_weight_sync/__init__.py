"""Sender/receiver weight synchronisation, for workers that run at their own pace.

The sender's process owns the model. Receivers, each in a process of its own, are registered with it and get its weights
when it sends them: all or some, acknowledged or not. `docs/choosing.md` says when to use this and when
`rank0_bcast_wts`. Read first: scheme.py, then sender.py and receiver.py.

    both sides     scheme.py, mpi.py; layout.py, connection.py, sections.py; torchrl.py (optional)
    the sender's   sender.py, publisher.py
    a receiver's   receiver.py, readers_writer_lock.py

A version is one set of weights with a number: 1 for those of `connect`, then 2, 3, ... for each `send`. A receiver has
one version after the other, and may skip some. Its way to a receiver, and who wakes whom:

    sender       writes version 7 into a section, sends UPDATE on each worker's socket
    receiver     wakes, takes the section's lock (shared), copies the values, answers ACK
    sender       wakes by the answer on its socket; `send` returns when the last worker has answered

Between machines no rank is woken: both sides look at MPI with growing pauses, up to 10 ms.
"""

from .mpi import MPIWeightSyncScheme
from .scheme import MultiProcessWeightSyncScheme, WeightSyncScheme

__all__ = ["MPIWeightSyncScheme", "MultiProcessWeightSyncScheme", "WeightSyncScheme"]
