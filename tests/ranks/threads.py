"""Prints on each rank how many threads NumPy and torch have, and have used, in each part of a program's loop.

python threads.py N [before|after|late|late-set]: torch is imported above the fork, below it, or in the first update;
"-set": and the program calls torch.set_num_threads(1). Or tensorflow: with TensorFlow instead of torch.
"""

import functools
import json
import os
import sys
import time
from pathlib import Path

import numpy as np

import mpi_util

n, mode = int(sys.argv[1]), sys.argv[2]
if mode == "before":
    import torch
if mpi_util.mpi_fork(n) == "parent":
    sys.exit()
if mode.startswith("after"):
    import torch
if mode == "after-set":
    torch.set_num_threads(1)
if mode == "tensorflow":
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorflow as tf

MATRIX = np.random.default_rng(0).normal(size=(700, 700))


def times() -> dict[str, int]:
    """CPU ticks of each thread of this process."""
    ticks = {}
    for task in os.listdir("/proc/self/task"):
        fields = Path(f"/proc/self/task/{task}/stat").read_text().rpartition(")")[2].split()
        ticks[task] = int(fields[11]) + int(fields[12])
    return ticks


def busy(work) -> float:
    """How many threads have done the work: the CPU time of all over that of the busiest one."""
    work()
    time.sleep(0.15)  # OpenBLAS's threads look for work for some 50 ms before they sleep
    before = times()
    while True:
        work()
        used = [ticks - before.get(task, 0) for task, ticks in times().items()]
        if max(used) >= 20:  # of 10 ms
            return sum(used) / max(used)


def show(part: str) -> None:
    found = {"rank": mpi_util.rank, "part": part, "numpy": busy(lambda: MATRIX @ MATRIX)}
    if "torch" in sys.modules:
        matrix = sys.modules["torch"].from_numpy(MATRIX)
        found |= {"threads": sys.modules["torch"].get_num_threads(), "torch": busy(lambda: matrix @ matrix)}
    if "tensorflow" in sys.modules:
        tensor = tf.constant(MATRIX)
        found["tensorflow"] = busy(lambda: (tensor @ tensor).numpy())
        wide = [tf.constant(MATRIX[:n, :m], tf.float32) for n, m in ((376, 600), (600, 600), (600, 17))]
        found["row"] = mpi_util.chksum(functools.reduce(tf.matmul, wide, tf.ones((1, 376))).numpy())
    sys.stdout.write(json.dumps(found) + "\n")


weights = {"product": np.zeros((700, 700))}
for _ in range(2):
    mpi_util.rank0_bcast_wts(weights)
    mpi_util.rank0_gather("notes")
    mpi_util.share(4)
    show("collect")
    mpi_util.rank0_accum_batches({"x": np.zeros(3)})
    if mpi_util.rank:
        continue
    if mode == "late":
        import torch
    show("update")
    weights["product"][...] = MATRIX @ MATRIX  # in so many parts as there are threads
mpi_util.print0("checksum " + mpi_util.chksum(weights))
