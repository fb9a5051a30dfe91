"""What `on_rank0` gives on rank 0 and elsewhere, used as programs use writers: on_rank0.py N [CALL]."""

import copy
import io
import json
import pickle
import sys

import numpy as np

import mpi_util

if mpi_util.mpi_fork(int(sys.argv[1])) == "parent":
    sys.exit()


class Run(io.StringIO):
    """Has what wandb's runs, tqdm's bars and TensorBoard's writers have."""

    def __init__(self, project, n=0):
        super().__init__()
        self.project, self.n, self.summary = project, n, {"best": 2.0, "steps": 1}

    def __iter__(self):
        return iter(range(3))

    def log(self, **values):
        return len(values)


made = mpi_util.on_rank0(Run, "p", n=4)
calls = {
    "gather": lambda: mpi_util.rank0_gather(made),
    "batch": lambda: mpi_util.rank0_accum_batches({"x": mpi_util.on_rank0(np.zeros, 3)}),
    "sum": lambda: mpi_util.all_sum(mpi_util.on_rank0(np.zeros, 3)),
    "class": lambda: mpi_util.on_rank0("runs/x"),
}
if len(sys.argv) > 2:
    calls[sys.argv[2]]()
with made as run:
    run.log(loss=1.0)
    run.n += 2
    run.summary["best"] = 3.0
    run.summary["steps"] += 1
    run.anything = made
try:
    passes = len(list(made))
except mpi_util.UsageError as error:
    passes = 0
    assert "loop over range(n)" in str(error)
seen = [bool(made), passes, f"{made.n}", f"{run.summary['best']:.1f}", run.n > 5, made.project == "p"]
if mpi_util.rank:
    assert seen == [False, 0, "<on rank 0 alone>", "<on rank 0 alone>", False, False], seen
    assert len(made) == 0 and 3 not in made and made.a.b["c"](1)[2] is made and made == run
    assert copy.copy(made) is made and copy.deepcopy([made])[0] is made
    assert "__init__" in dir(made) and isinstance(hash(made), int) and str(made) == repr(made) == "<on rank 0 alone>"
    assert made.__exit__(ValueError, ValueError(), None) is False
    del made.n, made["n"]
    for number in (int, float, complex, abs, range, round, np.asarray, json.dumps, pickle.dumps, lambda x: x + 1):
        try:
            number(made)
        except TypeError:
            continue
        raise AssertionError(f"{number} takes it")
else:
    assert seen == [True, 3, "6", "3.0", True, True] and run.summary == {"best": 3.0, "steps": 2}
print("well\n", end="", flush=True)
