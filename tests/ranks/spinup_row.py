"""Rank 0 alone reads the current row, amid it, as programs do that keep the best policy."""

import sys

from mpi_util_spinup.logx import EpochLogger
from mpi_util_spinup.mpi_tools import mpi_fork, num_procs, proc_id

mpi_fork(int(sys.argv[1]))
logger = EpochLogger()
logger.store(EpRet=proc_id(), EpLen=3)
logger.log_tabular("EpRet")
if proc_id() == 0:
    assert logger.log_current_row["AverageEpRet"] == (num_procs() - 1) / 2
logger.log_tabular("EpLen", average_only=True)
logger.dump_tabular()
assert logger.log_current_row == {}
