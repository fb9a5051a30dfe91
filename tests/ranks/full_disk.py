"""A program with a Logger whose disk is full for a while, or to its end: full_disk.py N FOLDER recovers|stays."""

import resource
import sys
from pathlib import Path

import mpi_util
from mpi_util_spinup.logx import EpochLogger

n, folder, way = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
if mpi_util.mpi_fork(n) == "parent":
    sys.exit(0)


def limit(n_bytes):
    """From now on no file of rank 0 can become longer, as if the disk were full."""
    if mpi_util.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, resource.RLIM_INFINITY))


def row(i, **more):
    logger.store(Ret=[i, mpi_util.rank])
    logger.log_tabular("Epoch", i)
    logger.log_tabular("Ret")
    for key, value in more.items():
        logger.log_tabular(key, value)
    logger.dump_tabular()


logger = EpochLogger(folder)
logger.save_config({"n": n})
if mpi_util.rank == 0:
    import torch

    logger.setup_pytorch_saver(torch.nn.Linear(100, 100))
row(1)
logger.save_state({"i": 1})
limit((folder / "progress.txt").stat().st_size + 10 if mpi_util.rank == 0 else 0)  # half a row has room
row(2, New=0.5)
logger.sync()
logger.save_state({"i": 2})
row(3)
logger.sync()
logger.save_state({"i": 3})
if way == "recovers":
    limit(resource.RLIM_INFINITY)
    row(4)
    logger.save_state({"i": 4})
print(f"rank {mpi_util.rank} is done", flush=True)
