"""One experiment on 4 ranks: experiment_hosts.py DATA_DIR."""

import sys

import mpi_util
from mpi_util_spinup.run_utils import call_experiment


def experiment(logger_kwargs, seed):
    print(f"rank {mpi_util.rank} of {mpi_util.all_sum(1)}", flush=True)


if __name__ == "__main__":
    call_experiment("x", experiment, num_cpu=4, data_dir=sys.argv[1])
