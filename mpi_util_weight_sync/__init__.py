"""Sender/receiver weight synchronisation, for workers that run at their own pace.

The sender's process owns the model. Receivers, each in a process of its own, are registered with it and get its weights
when it sends them: all or some, acknowledged or not. `docs/choosing.md` says when to use this and when
`rank0_bcast_wts`. Read first: scheme.py, then sender.py and receiver.py.

    both sides           scheme.py        the two phases and the calls; the scheme between processes of one machine
                         mpi.py           the scheme between ranks, on one machine or several
                         layout.py        a model's weights by name, in a block of bytes and back
                         connection.py    the messages, none of them a pickle (docs/security.md), and the socket
                         mpi_messages.py  the same messages to and from other machines
                         sections.py      versioned blocks in shared memory
                         torchrl.py       the scheme in torchrl's collectors (optional)
    the sender's         sender.py        makes a version, has it published, waits for the answers
                         publisher.py     writes a version into shared memory and announces it
                         worker.py        the record of each worker
    a receiver's         subscriber.py    where the newest version is
                         receiver.py      applies it to the model, or points a torch module at it
                         readers_writer_lock.py  `frozen()`

A version is one set of weights with a number: 1 for those of `connect`, then 2, 3, ... for each `send`. A receiver has
one version at a time, and may skip some. Its way to a receiver, and who wakes whom:

    sender       writes version 7 into a section, sends UPDATE on each worker's socket
    receiver     wakes, takes the section's lock (shared), copies the values, answers ACK
    sender       wakes by the answer on its socket; `send` returns when the last worker has answered

Between machines no rank is woken: both sides look at MPI with growing pauses, up to 10 ms.
"""

from .mpi import MPIWeightSyncScheme
from .scheme import MultiProcessWeightSyncScheme, WeightSyncScheme

__all__ = ["MPIWeightSyncScheme", "MultiProcessWeightSyncScheme", "WeightSyncScheme"]
