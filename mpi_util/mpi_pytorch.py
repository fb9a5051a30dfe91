"""Data-parallel PyTorch: every rank has the module and its share of the data, and gradients are averaged at each step.

    setup_pytorch_for_mpi()
    sync_params(module)
    ...
    loss.backward()
    mpi_avg_grads(module)
    optimizer.step()

The names are those of Spinning Up's `mpi_pytorch`. See `rank0_bcast_wts` for the other way, in which rank 0 updates.
All raise MissingFrameworkError if there is no torch. `comm` is a communicator; None: all ranks.
"""

import functools
from typing import Any

import numpy as np

from .arrays.frameworks import framework
from .collectives.averaging import Description, Summands, reduce
from .collectives.weights import rank0_bcast_wts
from .errors import BatchError
from .host import threads
from .host.cores import update_threads
from .launch.identity import Comm, local_size


def setup_pytorch_for_mpi() -> None:
    """Gives torch this rank's share of the cores of its machine, and no more, for good. Not collective.

    At least one thread, and at most what the user's OMP_NUM_THREADS or MKL_NUM_THREADS says. Without this call a rank
    has one thread, and rank 0 all cores after a gather.
    """
    framework("torch")
    threads.fix_torch(max(1, update_threads() // local_size()))


def sync_params(module: Any, *, comm: Comm = None) -> None:
    """Collective: `rank0_bcast_wts` of a torch module."""
    framework("torch")
    rank0_bcast_wts(module, comm=comm)


def mpi_avg_grads(module: Any, *, comm: Comm = None) -> None:
    """Collective: the gradient of each parameter becomes its mean over the ranks, the same bits on every rank.

    All gradients move as one block and are added up in rank order; 16-bit ones in float32. Those on a GPU go through
    pinned memory.

    Args: module: torch module after `backward`. A parameter without a gradient (None) on all ranks is passed over.
    Raises RankMismatchError on every rank: a parameter has a gradient on some ranks only, or the modules differ.
    """
    torch = framework("torch")
    with torch.no_grad():
        reduce("mpi_avg_grads", _Gradients(torch, module), divide=True, comm=comm)


class _Gradients(Summands):
    """The gradients of a module. Those of a GPU are copied to pinned memory, as one piece for each dtype.

    Attributes:
        _grads: in host memory, the gradients or their copies.
        _runs: of each piece the gradients, all of them as one tensor, and its copy. Empty if all are in host memory.
    """

    def __init__(self, torch: Any, module: Any):
        self._torch, self._module = torch, module

    def describe(self) -> Description:
        description: list[tuple[str, np.dtype | None, tuple[int, ...] | None]] = []
        self._grads, self._runs = list[Any](), list[tuple[list[Any], Any, Any]]()
        on_host = self.adds_up = True
        for name, parameter in self._module.named_parameters():
            if (grad := parameter.grad) is None:
                description.append((name, None, None))
                continue
            if grad.layout != self._torch.strided:
                raise BatchError(f"mpi_avg_grads: the gradient of '{name}' is sparse; use sparse=False")
            dtype, note = _sum_dtype(grad.dtype)
            if dtype is None:
                raise BatchError(f"mpi_avg_grads: the gradient of '{name}' is {grad.dtype}, which cannot be averaged")
            description.append((name + note, dtype, tuple(grad.shape)))
            on_host &= grad.is_cpu
            self.adds_up &= on_host and not note
            self._grads.append(grad)
        if not on_host:
            self._stage()
        return tuple(description)

    def _stage(self) -> None:
        kinds = [(grad.dtype, grad.device) for grad in self._grads]
        for kind in dict.fromkeys(kinds):
            numbers = [i for i, other in enumerate(kinds) if other == kind]
            run = [self._grads[i] for i in numbers]
            flat = self._torch.cat([grad.reshape(-1) for grad in run])
            pinned = self._torch.empty(flat.shape, dtype=flat.dtype, pin_memory=flat.is_cuda)
            pinned.copy_(flat, non_blocking=flat.is_cuda)
            self._runs.append((run, flat, pinned))
            for i, view in zip(numbers, self._torch._utils._unflatten_dense_tensors(pinned, run)):
                self._grads[i] = view
        self._synchronize()

    def _synchronize(self) -> None:
        for device in {flat.device for _, flat, _ in self._runs if flat.is_cuda}:
            self._torch.cuda.synchronize(device)

    def wrap(self, views: list[np.ndarray]) -> list[Any]:
        return [self._torch.from_numpy(view) for view in views]

    def write(self, views: list[Any]) -> None:
        if self._grads:
            self._torch._foreach_copy_(views, self._grads)

    def read(self, views: list[Any]) -> None:
        if self._grads:
            self._torch._foreach_copy_(self._grads, views)
        for run, flat, pinned in self._runs:
            flat.copy_(pinned, non_blocking=flat.is_cuda)
            self._torch._foreach_copy_(run, self._torch._utils._unflatten_dense_tensors(flat, run))
        self._synchronize()  # before the pinned memory is given up

    def add_up(self, ranks: list[list[Any]], own: int) -> None:
        """Straight into the gradients, in rank order; for two ranks that is either order."""
        torch = self._torch
        if not self._grads:
            return
        if len(ranks) > 2 and own:
            torch._foreach_copy_(self._grads, ranks[0])
        for other in [ranks[1 - own]] if len(ranks) == 2 else ranks[1:]:
            torch._foreach_add_(self._grads, other)
        torch._foreach_div_(self._grads, torch.tensor(float(len(ranks))))  # by a number it takes three times as long


@functools.cache
def _sum_dtype(dtype: Any) -> tuple[np.dtype | None, str]:
    """(dtype in which gradients of a torch dtype are added up, what a message says of it behind the name)."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return None, ""
    if dtype.itemsize < 4:
        return np.dtype("f4"), f" ({str(dtype).removeprefix('torch.')})"
    return framework("torch").empty(0, dtype=dtype).numpy().dtype, ""
