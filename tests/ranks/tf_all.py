"""The checks of tf_eager.py and tf_session.py in one program: TensorFlow takes seconds to load.

What traces graphs takes long too: functions named `once_...` are called for the world only.
"""

import os

from harness import fork, raises, run_checks

fork()

import mpi_util  # noqa: E402

mpi_util.setup_tensorflow_for_mpi()

import tensorflow as tf  # noqa: E402
import tf_eager  # noqa: E402
import tf_session  # noqa: E402

from mpi_util.arrays.adapters import tensorflow_setup  # noqa: E402

cores = mpi_util.usable_cores()
pools = cores, cores if mpi_util.rank == 0 else 1
threading = tf.config.threading
assert (threading.get_intra_op_parallelism_threads(), threading.get_inter_op_parallelism_threads()) == pools
config = mpi_util.tf_config
assert (config.intra_op_parallelism_threads, config.inter_op_parallelism_threads) == pools
assert config.gpu_options.allow_growth and not config.gpu_options.per_process_gpu_memory_fraction
os.environ["MPI_UTIL_GPU_PCT"] = "0.25"
assert mpi_util.tf_config.gpu_options.per_process_gpu_memory_fraction == 0.25
assert not mpi_util.tf_config.gpu_options.allow_growth

checks = {f"{module.__name__}.{name}": item for module in (tf_eager, tf_session) for name, item in vars(module).items()}
for name, check in checks.items():
    if name.partition(".")[2].startswith("once_"):
        check(None, mpi_util.rank, mpi_util.nworkers)
run_checks({name.partition(".")[2] + name: check for name, check in checks.items()})

tensorflow_setup.pool_threads = lambda: (cores + 1, 1)
raises(mpi_util.UsageError, "has started already", mpi_util.setup_tensorflow_for_mpi)
