"""Sender/receiver weight synchronisation, for workers that run at their own pace.

A sender owns the model; receivers are registered with it and get its weights when it sends them: all or some,
acknowledged or not. `docs/choosing.md` says when to use this and when `rank0_bcast_wts`. May import `collectives` and
what that imports. Read first: scheme.py, then sender.py and receiver.py.

    scheme.py        the two phases and the calls; the scheme between processes of one machine
    sender.py        makes a version, delivers it, waits for the answers;  worker.py: the record of each worker
    receiver.py      applies what arrives, or points a torch module at it; `frozen()`
    layout.py        a model's weights by name, in a block of bytes and back;  extra.py: what else a torch module keeps
    publisher.py     writes a version into shared memory and announces it
    connection.py    the messages from there to a receiver and back, none of them a pickle (docs/security.md)
    mpi.py           the scheme between ranks, on one machine or several;  relay.py: forwarding between machines
    torchrl.py       the scheme in torchrl's collectors (optional)

A worker's record at the sender has one of four states (worker.py says what they and the events mean). `Worker.apply`
makes every change:

                STARTED            LEFT
        ABSENT ---------> READY ---------> LEFT
                           |
                           | DIED
                           v
                          DEAD

When another process replaces the worker, CONNECTED leads from LEFT and DEAD to ABSENT; a sender does not hear that from
a relay, but STARTED. ACK and ERROR change no state. An ABSENT worker whose process or rank has ended becomes DEAD.
"""

from .mpi import MPIWeightSyncScheme
from .scheme import MultiProcessWeightSyncScheme, WeightSyncScheme

__all__ = ["MPIWeightSyncScheme", "MultiProcessWeightSyncScheme", "WeightSyncScheme"]
