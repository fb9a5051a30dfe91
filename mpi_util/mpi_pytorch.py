"""Data-parallel PyTorch: every rank has the module and its share of the data, and gradients are averaged at each step.

    setup_pytorch_for_mpi()
    sync_params(module)
    ...
    loss.backward()
    mpi_avg_grads(module)
    optimizer.step()

The names are those of Spinning Up's `mpi_pytorch`. See `rank0_bcast_wts` for the other way, in which rank 0 updates.
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

    Raises:
        MissingFrameworkError: no torch.
    """
    framework("torch")
    threads.fix_torch(max(1, update_threads() // local_size()))


def sync_params(module: Any, *, comm: Comm = None) -> None:
    """Collective: `rank0_bcast_wts` of a torch module. Raises MissingFrameworkError if there is no torch."""
    framework("torch")
    rank0_bcast_wts(module, comm=comm)


def mpi_avg_grads(module: Any, *, comm: Comm = None) -> None:
    """Collective: the gradient of each parameter becomes its mean over the ranks, the same bits on every rank.

    All gradients move as one block and are added up in rank order; 16-bit ones in float32. Those on a GPU go through
    pinned memory.

    Args:
        module: torch module after `backward`. A parameter without a gradient (None) on all ranks is passed over.
        comm: communicator; None: all ranks.

    Raises:
        RankMismatchError: on every rank, if a parameter has a gradient on some ranks only, or the modules differ.
        MissingFrameworkError: no torch.
    """
    torch = framework("torch")
    with torch.no_grad():
        reduce("mpi_avg_grads", _Gradients(torch, module), divide=True, comm=comm)


class _Gradients(Summands):
    """The gradients of a module. Those of a GPU are copied to host memory, and added up there."""

    def __init__(self, torch: Any, module: Any):
        self._torch, self._module = torch, module
        self._staged: _Staged | None = None

    def describe(self) -> Description:
        grads: list[Any] = []
        description: list[tuple[str, np.dtype | None, tuple[int, ...] | None]] = []
        on_host = in_place = True
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
            in_place &= not note
            grads.append(grad)
        if not on_host:
            self._staged = _Staged(self._torch, grads)
        self.adds_up = on_host and in_place
        self._grads = self._staged.on_host if self._staged else grads
        return tuple(description)

    def wrap(self, views: list[np.ndarray]) -> list[Any]:
        return [self._torch.from_numpy(view) for view in views]

    def write(self, views: list[Any]) -> None:
        if self._grads:
            self._torch._foreach_copy_(views, self._grads)

    def read(self, views: list[Any]) -> None:
        if self._grads:
            self._torch._foreach_copy_(self._grads, views)
        if self._staged:
            self._staged.give_back()

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


class _Staged:
    """Gradients of a GPU in pinned memory, to which and from which they move as one piece for each dtype.

    Attributes:
        on_host: tensors, one for each gradient.
    """

    def __init__(self, torch: Any, grads: list[Any]):
        self._torch = torch
        self.on_host = [torch.empty(0)] * len(grads)
        self._runs = []
        for kind in dict.fromkeys((grad.dtype, grad.device) for grad in grads):
            numbers = [i for i, grad in enumerate(grads) if (grad.dtype, grad.device) == kind]
            run = [grads[i] for i in numbers]
            flat = torch.cat([grad.reshape(-1) for grad in run])
            pinned = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=flat.is_cuda)
            pinned.copy_(flat, non_blocking=flat.is_cuda)
            self._runs.append((run, flat, pinned))
            for i, view in zip(numbers, _views(pinned, run)):
                self.on_host[i] = view
        self._synchronize()

    def give_back(self) -> None:
        """Copies what `on_host` now has to the gradients."""
        for run, flat, pinned in self._runs:
            flat.copy_(pinned, non_blocking=flat.is_cuda)
            self._torch._foreach_copy_(run, _views(flat, run))
        self._synchronize()  # before the pinned memory is given up

    def _synchronize(self) -> None:
        for device in {flat.device for _, flat, _ in self._runs if flat.is_cuda}:
            self._torch.cuda.synchronize(device)


def _views(flat: Any, grads: list[Any]) -> list[Any]:
    """The parts of a flat tensor in the shapes of these gradients."""
    return [part.view(grad.shape) for part, grad in zip(flat.split([grad.numel() for grad in grads]), grads)]
