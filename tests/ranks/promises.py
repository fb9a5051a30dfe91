"""A small program as a user writes it, on N ranks: promises.py N [HOW RANK]. That rank then fails as HOW says.

Rank 0 prints the weights after each update, and at the end, as JSON, what each waiting rank used of a core during the
last update, and how many cores rank 0 had for it.
"""

import json
import os
import signal
import sys
import time

import mpi_util

if mpi_util.mpi_fork(int(sys.argv[1])) == "parent":
    sys.exit()

import numpy as np

UPDATE_S = 1.0
how, who = (sys.argv[2], int(sys.argv[3])) if len(sys.argv) > 2 else ("", -1)
policy = {"weights": np.zeros((3, 5), np.float32)}
used = 0.0
for iteration in range(4):
    began, cpu = time.perf_counter(), time.process_time()
    mpi_util.rank0_bcast_wts(policy)
    used = (time.process_time() - cpu) / (time.perf_counter() - began)
    if mpi_util.rank == who and iteration == 2:
        if how == "raise":
            raise ValueError("a bug")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit()
    episodes, mine = mpi_util.deal(20), []
    for number in episodes:
        rng = np.random.default_rng(mpi_util.stream(1, iteration, number))
        noise = rng.normal(size=(rng.integers(1, 4), 3, 5)).astype(np.float32)
        mine.append({"noise": noise, "gain": np.tanh((policy["weights"] + noise).sum(axis=(1, 2)))})
    batch = mpi_util.rank0_accum_batches(mine, index=episodes.taken)
    if mpi_util.rank == 0:
        policy["weights"] += (batch["gain"][:, None, None] * batch["noise"]).mean(axis=0)
        print(iteration, policy["weights"].tobytes().hex(), flush=True)
        if not how and iteration == 2:
            time.sleep(UPDATE_S)
mine = {"used": np.array([used]), "cores": np.array([len(os.sched_getaffinity(0))])}
found = mpi_util.rank0_accum_batches(mine)
if mpi_util.rank == 0:
    print(json.dumps({"used": found["used"].tolist()[1:], "cores": int(found["cores"][0])}))
