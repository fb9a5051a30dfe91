"""Sender/receiver weight synchronisation, for workers that run at their own pace.

A sender owns the model; receivers are registered with it and get its weights when it sends them: all or some,
acknowledged or not. `docs/choosing.md` says when to take this and when `rank0_bcast_wts`.

    scheme.py        the two phases and the calls
    sender.py        its book-keeping: who has what, who has answered, who is gone
    receiver.py      what a worker does with what comes;  gate.py: `frozen()`
    recipe.py        the arguments of `init_on_sender`;   form.py: dict or TensorDict
    layout.py        a model's weights as one block of bytes, and back;  bits.py: bfloat16, checksum
    sharing.py       receivers without copies of their own
    section.py       blocks in shared memory;  wire.py: small messages;  hub.py, port.py: both ends
    multiprocess.py  processes of one machine
    mpi.py           ranks of an MPI job, on one machine or several
    relay.py         what passes on the weights on other machines
    torchrl.py       the same as a weight-sync backend of torchrl (optional)
"""

from .mpi import MPIWeightSyncScheme
from .multiprocess import MultiProcessWeightSyncScheme
from .scheme import WeightSyncScheme

__all__ = ["MPIWeightSyncScheme", "MultiProcessWeightSyncScheme", "WeightSyncScheme"]
