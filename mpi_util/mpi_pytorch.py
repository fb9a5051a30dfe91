"""Data-parallel PyTorch: every rank has the module and its share of the data, and gradients are averaged at each step.

    setup_pytorch_for_mpi()
    sync_params(module)
    ...
    loss.backward()
    mpi_avg_grads(module)
    optimizer.step()

The names are those of Spinning Up's `mpi_pytorch`. See `rank0_bcast_wts` for the other way, in which rank 0 updates.
"""

from typing import Any

import numpy as np

from .arrays.frameworks import framework
from .collectives.averaging import Description, Views, reduce
from .collectives.weights import rank0_bcast_wts
from .errors import BatchError
from .host import threads
from .host.cores import usable_cores
from .launch.identity import Comm, local_size


def setup_pytorch_for_mpi() -> None:
    """Gives torch this rank's share of the cores of its machine, and no more, for good. Not collective.

    At least one thread, and at most what the user's OMP_NUM_THREADS or MKL_NUM_THREADS says. Without this call a rank
    has one thread, and rank 0 all cores after a gather.

    Raises:
        MissingFrameworkError: no torch.
    """
    framework("torch")
    threads.fix_torch(max(1, usable_cores() // local_size()))


def sync_params(module: Any, *, comm: Comm = None) -> None:
    """Collective: every rank's module gets rank 0's parameters and buffers, as one block.

    Args:
        module: torch module, on any device; alike on all ranks.
        comm: communicator; None: all ranks.

    Raises:
        RankMismatchError: on every rank, with the first name that differs, if the modules differ.
        MissingFrameworkError: no torch.
    """
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
    grads: list[Any] = []
    staged: _Staged | None = None

    def describe() -> Description:
        nonlocal staged
        description: list[tuple[str, np.dtype | None, tuple[int, ...] | None]] = []
        for name, parameter in module.named_parameters():
            grad = parameter.grad
            if grad is None:
                description.append((name, None, None))
                continue
            kind = _KINDS.get(grad.dtype) or _kind(torch, name, grad)
            description.append((name + kind.note, kind.dtype, tuple(grad.shape)))
            grads.append(grad)
        if any(grad.is_cuda for grad in grads):
            staged = _Staged(torch, grads)
        return tuple(description)

    def write(views: Views) -> None:
        if grads:
            torch._foreach_copy_(_tensors(torch, views), staged.on_host if staged else grads)

    def read(views: Views) -> None:
        if staged:
            torch._foreach_copy_(staged.on_host, _tensors(torch, views))
            staged.give_back()
        elif grads:
            torch._foreach_copy_(grads, _tensors(torch, views))

    def add_up(ranks: list[Views], own: int) -> None:
        """Straight into the gradients, in rank order; for two ranks that is either order."""
        if not grads:
            return
        if len(ranks) > 2 and own:
            torch._foreach_copy_(grads, _tensors(torch, ranks[0]))
        for other in [ranks[1 - own]] if len(ranks) == 2 else ranks[1:]:
            torch._foreach_add_(grads, _tensors(torch, other))
        torch._foreach_div_(grads, torch.tensor(float(len(ranks))))  # by a number it takes three times as long

    with torch.no_grad():
        reduce("mpi_avg_grads", describe, write, read, divide=True, comm=comm, add_up=add_up)


class _Kind:
    """How gradients of a dtype are added up.

    Attributes:
        dtype: in which they are.
        note: what a message says about it, behind the name.
    """

    def __init__(self, dtype: str, note: str = ""):
        self.dtype, self.note = np.dtype(dtype), note


_KINDS: dict[Any, _Kind] = {}  # by torch dtype


def _kind(torch: Any, name: str, grad: Any) -> _Kind:
    if grad.layout != torch.strided:
        raise BatchError(f"mpi_avg_grads: the gradient of '{name}' is sparse; use sparse=False")
    if not (grad.is_floating_point() or grad.is_complex()):
        raise BatchError(f"mpi_avg_grads: the gradient of '{name}' is {grad.dtype}, of which there is no mean")
    if grad.element_size() < 4:
        kind = _Kind("f4", f" ({str(grad.dtype).removeprefix('torch.')})")
    else:
        kind = _Kind(torch.empty(0, dtype=grad.dtype).numpy().dtype)
    _KINDS[grad.dtype] = kind
    return kind


def _tensors(torch: Any, views: Views) -> list[Any]:
    """The arrays as tensors."""
    if views.more is None:
        views.more = [torch.from_numpy(view) for view in views]
    return views.more


class _Staged:
    """Gradients of a GPU in pinned memory, to which and from which they move as one piece for each dtype.

    Attributes:
        on_host: tensors, one for each gradient.
    """

    def __init__(self, torch: Any, grads: list[Any]):
        self._grads, self._torch = grads, torch
        self.on_host = [torch.empty(0)] * len(grads)
        self._runs = []
        for kind in dict.fromkeys((grad.dtype, grad.device) for grad in grads):
            numbers = [i for i, grad in enumerate(grads) if (grad.dtype, grad.device) == kind]
            flat = torch.cat([grads[i].reshape(-1) for i in numbers])
            pinned = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            pinned.copy_(flat, non_blocking=True)
            self._runs.append((numbers, flat, pinned))
            for i, part in zip(numbers, pinned.split([grads[i].numel() for i in numbers])):
                self.on_host[i] = part.view(grads[i].shape)
        torch.cuda.synchronize()

    def give_back(self) -> None:
        """Copies what `on_host` now has to the gradients."""
        for numbers, flat, pinned in self._runs:
            flat.copy_(pinned, non_blocking=True)
            parts = flat.split([self._grads[i].numel() for i in numbers])
            self._torch._foreach_copy_(
                [self._grads[i] for i in numbers], [part.view(self._grads[i].shape) for i, part in zip(numbers, parts)]
            )
        self._torch.cuda.synchronize()  # before the pinned memory is given up
