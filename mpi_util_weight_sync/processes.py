"""The scheme between the processes of one machine; the sender's process makes it, and each worker gets a copy."""

import os
from typing import Any

from .scheme import WeightSyncScheme


class MultiProcessWeightSyncScheme(WeightSyncScheme):
    """Weights from one process to others of its machine, started in any way: spawn, fork, forkserver.

    The scheme itself is given to the workers, after `init_on_sender` and before they start; what travels with it is an
    address with a key. The bytes of an update are written once, into shared memory. Arguments: `WeightSyncScheme`.
    An example: docs/weight_sync.md.
    """

    def __getstate__(self) -> dict[str, Any]:
        here = {"_sender": None, "_receiver": None, "_context": None, "_connected": False, "_closed": False}
        return vars(self) | here

    def _start_role(self, call: str) -> None:
        if self._sender is not None and self._address.pid != os.getpid():  # forked from the sender's process
            vars(self).update(self.__getstate__())
        super()._start_role(call)
