"""EpochLogger on several ranks: statistics of unequal samples, the same errors on all."""

import json
import math
import sys
from pathlib import Path

import numpy as np
from harness import raises

import mpi_util
from mpi_util_spinup.logx import EpochLogger
from mpi_util_spinup.mpi_tools import mpi_fork, num_procs, proc_id

mpi_fork(int(sys.argv[1]))
folder = Path(sys.argv[2])
rank, size = proc_id(), num_procs()


def returns(k, epoch):
    """None on rank 0 of several in the first epoch, and none anywhere in the third."""
    n = 0 if epoch == 2 or (epoch == 0 and k == 0 and size > 1) else 3 * k + epoch + 1
    return np.random.default_rng((k, epoch)).normal(1e8, 1.0, n)


def values(k, epoch):
    return np.random.default_rng((k, epoch, 1)).normal(size=(5 + k, 2)).astype("f4")


def read():
    lines = [line.split("\t") for line in (folder / "progress.txt").read_text().splitlines()]
    return [dict(zip(lines[0], line)) for line in lines[1:]]


logger = EpochLogger(output_dir=folder, exp_name="try")
assert logger.output_dir == (str(folder) if rank == 0 else None)
logger.save_config({"logger": logger, "seed": 3})
for epoch in range(3):
    for ret in returns(rank, epoch):
        logger.store(EpRet=ret, EpLen=int(ret) % 100)
    logger.store(VVals=values(rank, epoch), Loss=np.float32(rank))
    logger.log_tabular("Epoch", epoch)
    logger.log_tabular("EpRet", with_min_and_max=True)
    logger.log_tabular("EpLen", average_only=True)
    logger.log_tabular("VVals")
    if epoch:
        logger.log_tabular("Late", 0.1 + epoch)
    logger.store(Loss=-100.0)
    assert logger.get_stats("Loss")[0] == ((size - 1) / 2 - 100.0) / 2
    logger.epoch_dict["Loss"] = []
    logger.dump_tabular()
    logger.store(EpRet=-1.0)  # stored after a row, so of the next one
    logger.epoch_dict["EpRet"] = []
logger.save_state({"itr": 3}, itr=3)
logger.sync()

if size > 1:
    key = "EpRet" if rank else "EpLen"
    raises(mpi_util.RankMismatchError, "rank 0: log_tabular(EpLen) at", lambda: logger.log_tabular(key))

    from mpi4py import MPI

    alone = EpochLogger(folder / f"rank{rank}", comm=MPI.COMM_SELF)  # each rank is rank 0 of its own communicator
    alone.store(X=[rank, rank + 2])
    alone.log_tabular("X")
    alone.dump_tabular()
    assert (folder / f"rank{rank}" / "progress.txt").read_text() == f"AverageX\tStdX\n{rank + 1}.0\t1.0\n"

if rank == 0:
    columns = (folder / "progress.txt").read_text().split("\n")[0].replace("\t", " ")
    assert columns == "Epoch AverageEpRet StdEpRet MaxEpRet MinEpRet EpLen AverageVVals StdVVals Late"
    for epoch, row in enumerate(read()):
        ret = np.concatenate([returns(k, epoch) for k in range(size)])
        vvals = np.concatenate([values(k, epoch).ravel() for k in range(size)]).astype("f8")
        assert row["Epoch"] == str(epoch)
        assert row["Late"] == ("" if epoch == 0 else repr(0.1 + epoch))
        assert np.allclose(
            [float(row["AverageVVals"]), float(row["StdVVals"])], [vvals.mean(), vvals.std()], rtol=1e-12
        )
        got = [float(row[f"{which}EpRet"]) for which in ("Average", "Std", "Min", "Max")]
        if not ret.size:
            assert all(map(math.isnan, got))
            continue
        assert np.allclose(got, [ret.mean(), ret.std(), ret.min(), ret.max()], rtol=1e-7, atol=0)
        assert math.isclose(float(row["EpLen"]), (ret.astype(int) % 100).mean())
    assert epoch == 2
    assert json.loads((folder / "config.json").read_text())["exp_name"] == "try"
    assert (folder / "vars3.pkl").exists()
