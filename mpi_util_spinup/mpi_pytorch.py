"""Data-parallel PyTorch on every rank, with averaged gradients: `spinup.utils.mpi_pytorch`.

`examples/adopt_ppo_torch.py` is a program with these. All raise MissingFrameworkError if there is no torch. `comm` is a
communicator; None: all ranks.
"""

import os
from typing import Any

from mpi_util.arrays.adapters import framework
from mpi_util.collectives.bcast import rank0_bcast_wts
from mpi_util.collectives.reduce import Arrays, average
from mpi_util.errors import BatchError, UsageError
from mpi_util.host.cores import update_threads
from mpi_util.ranks import threads
from mpi_util.ranks.identity import Comm, number_in, nworkers


def setup_pytorch_for_mpi() -> None:
    """Gives torch for good this rank's part of the cores of its machine. Not collective.

    It has at least one thread, and at most as many as the user's OMP_NUM_THREADS or MKL_NUM_THREADS. Without this call
    a rank has one thread, and rank 0 has all cores after a gather.
    """
    torch = framework("torch")
    on_this_machine = number_in("MPI_LOCALNRANKS", number_in("OMPI_COMM_WORLD_LOCAL_SIZE", nworkers()))
    ours = os.environ.get(threads.OURS, "").split()
    limits = [os.environ.get(name, "") for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name not in ours]
    n = max(1, update_threads() // on_this_machine)
    torch.set_num_threads(min([n, *(int(limit) for limit in limits if limit.isdecimal() and int(limit))]))


def sync_params(module: Any, *, comm: Comm = None) -> None:
    """Collective: `rank0_bcast_wts` of a torch module, or of anything else with `parameters()`."""
    framework("torch")
    whole = hasattr(module, "state_dict") or not hasattr(module, "parameters")
    rank0_bcast_wts(module if whole else list(module.parameters()), comm=comm)


def mpi_avg_grads(module: Any, *, comm: Comm = None) -> None:
    """Collective: the gradient of each parameter becomes its mean over the ranks, the same bits on every rank.

    All gradients move as one block and are added up in rank order; 16-bit ones in float32. Those on a GPU go through
    pinned memory. A parameter without a gradient (None) on all ranks is passed over.

    Raises RankMismatchError on every rank: a parameter has a gradient on some ranks only, or the modules differ.
    """
    torch = framework("torch")
    if not hasattr(module, "named_parameters"):
        raise UsageError(f"mpi_avg_grads takes a torch module, whose parameters have gradients; got {module!r:.80}")
    copied: list[tuple[Any, Any]] = []  # (gradient without a NumPy view, its values in host memory)

    def make() -> Arrays:
        arrays: Arrays = {}
        for name, parameter in module.named_parameters():
            if (grad := parameter.grad) is None:
                arrays[name] = None
                continue
            try:
                arrays[name] = grad.numpy()  # a view of its memory
            except (TypeError, RuntimeError):  # on a GPU, or of a dtype that NumPy lacks
                if grad.layout != torch.strided:
                    raise BatchError(f"mpi_avg_grads: the gradient of '{name}' is sparse; use sparse=False") from None
                grad = parameter.grad = grad.resolve_conj().resolve_neg()
                name += f" ({str(grad.dtype).removeprefix('torch.')})" * (grad.dtype.itemsize < 4)
                wide = torch.float32 if grad.dtype.itemsize < 4 else grad.dtype
                copied.append((grad, torch.empty(grad.shape, dtype=wide, pin_memory=grad.is_cuda).copy_(grad)))
                arrays[name] = copied[-1][1].numpy()
        return arrays

    with torch.no_grad():
        average("mpi_avg_grads", make, comm=comm)
        for grad, values in copied:
            grad.copy_(values)
