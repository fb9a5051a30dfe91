"""TensorFlow's threads and GPU memory, set in a rank's process so that several ranks can share a machine."""

import ctypes
import os
from typing import Any

from ...errors import MpiUtilError, UsageError
from . import framework

_POOLS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")  # set by the user, or when the ranks start
_LOCAL_NUMBERS = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")  # of hydra, Open MPI, Slurm


def tf_config() -> Any:
    """A new tf.compat.v1.ConfigProto for a rank's session; read it as `mpi_util.tf_config`.

    GPU memory: what `mpi_fork(n, gpu_pct=...)` allows to each rank, else as much as it comes to need. Threads: as for
    `setup_tensorflow_for_mpi`. Raises MissingFrameworkError: no TensorFlow; UsageError: gpu_pct is not between 0 and 1.
    """
    tf = framework("tensorflow")
    share, (intra, inter) = gpu_share(), pool_threads()
    gpu = tf.compat.v1.GPUOptions(per_process_gpu_memory_fraction=share, allow_growth=not share)
    pools = {"intra_op_parallelism_threads": intra, "inter_op_parallelism_threads": inter}
    return tf.compat.v1.ConfigProto(gpu_options=gpu, **pools)


def setup_tensorflow_for_mpi(gpu_pct: float = 0.0) -> None:
    """Prepares TensorFlow 2 on this rank. Call it after `mpi_fork` and before the first TensorFlow operation.

    Threads: for one operation as many on each rank as rank 0 has cores, or last bits would differ from rank to rank;
    operations run beside each other on rank 0 alone. TF_NUM_INTRAOP_THREADS and TF_NUM_INTEROP_THREADS win. GPU: the
    rank sees one, its own; ranks of one machine take them in turn. On a machine without a GPU only the threads are set.

    Args:
        gpu_pct: share of that GPU's memory that the rank may use, 0 to 1. 0: what `mpi_fork` was given, and if that is
            0 too, as much as it comes to need.

    Raises:
        MissingFrameworkError: TensorFlow is not installed.
        UsageError: gpu_pct is not between 0 and 1, or TensorFlow has started already.
        MpiUtilError: the size of the GPU's memory is not known.
    """
    share, (intra, inter) = gpu_share(gpu_pct), pool_threads()
    tf = framework("tensorflow")
    try:
        tf.config.threading.set_intra_op_parallelism_threads(intra)
        tf.config.threading.set_inter_op_parallelism_threads(inter)
        if gpus := tf.config.list_physical_devices("GPU"):
            gpu = gpus[ordinal := own_gpu(len(gpus))]
            tf.config.set_visible_devices([gpu], gpu.device_type)
            if share:
                device = tf.config.LogicalDeviceConfiguration(memory_limit=int(share * _gpu_memory_mb(ordinal)))
                tf.config.set_logical_device_configuration(gpu, [device])
            else:
                tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError as error:
        wrong = f"TensorFlow has started already; call this before its first operation ({error})"
        raise UsageError(f"setup_tensorflow_for_mpi: {wrong}") from None


def gpu_share(gpu_pct: float = 0.0) -> float:
    """`gpu_pct`, or if that is 0 what `mpi_fork` was given. Raises UsageError if it is not between 0 and 1."""
    share = float(gpu_pct or os.environ.get("MPI_UTIL_GPU_PCT", 0))
    if not 0 <= share <= 1:
        raise UsageError(f"gpu_pct is a share of the GPU's memory, from 0 (no limit) to 1; got {share:g}")
    return share


def pool_threads() -> tuple[int, int]:
    """Threads in TensorFlow's pools: for one operation, and for several at once; 0: TensorFlow decides."""
    intra, inter = (int(given) if (given := os.environ.get(name, "")).isdecimal() else 0 for name in _POOLS)
    return intra, inter


def own_gpu(n_gpus: int) -> int:
    """Index of the GPU that this rank uses, by its number on its machine, as the launcher says."""
    return int(next(filter(None, map(os.environ.get, _LOCAL_NUMBERS)), "0")) % n_gpus


def _gpu_memory_mb(ordinal: int) -> int:
    """Memory of a CUDA device in MiB. TensorFlow knows it only once it has started, when no limit can be set."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise MpiUtilError("gpu_pct needs a GPU with a CUDA driver; without it, use 0") from None
    device, nbytes = ctypes.c_int(), ctypes.c_size_t()
    failed = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), ordinal)
    if failed := failed or cuda.cuDeviceTotalMem_v2(ctypes.byref(nbytes), device):
        raise MpiUtilError(f"gpu_pct: the CUDA driver does not give the memory size of GPU {ordinal} (error {failed})")
    return nbytes.value >> 20
