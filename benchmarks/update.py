"""Processor time of one whole update of the policy and the value function, with each framework.

    python -m benchmarks.update --before ../mpi_util-20a846f

The work of an iteration of benchmarks/end_to_end.py: 4000 rows, 10 epochs of 32 minibatches of 125 rows, two 2x64
networks, Humanoid-v4's sizes. --before is a checkout of commit 20a846f, whose learners in torch had their derivatives
written out; it runs with this interpreter. Each sample is the median of some updates in a fresh process, in turn.
"""

import subprocess
import sys
from functools import partial
from pathlib import Path

from benchmarks import record

UPDATES = 7
PROGRAM = """
import os, statistics, sys, time
import numpy as np
from policies.actor import Spec, init_params
from policies.hyper import Hyper
framework, updates, settings = sys.argv[1], int(sys.argv[2]), {"epochs": 10, "minibatches": 32, "kl_targ": 0.0}
spec = Spec(376, 17, False, (64, 64), (64, 64))
params = init_params(spec, np.random.default_rng(0))
if framework == "before":
    from policies.pytorch import Policy, SideBySide, ValueFunction
    made = spec, params, Hyper(**settings), 2
    learn = SideBySide(Policy(*made), ValueFunction(*made)).learn
else:
    import importlib
    from policies.learners import Learners
    learn = Learners(importlib.import_module(f"policies.{framework}"), spec, params, Hyper.of(**settings), 2).learn
rng = np.random.default_rng(0)
batch = [rng.standard_normal(shape, dtype=np.float32) for shape in ((4000, 376), (4000, 17), 4000, 4000)]
taken = []
def clocks():
    used = os.times()
    return np.array([time.process_time() + used.children_user + used.children_system, time.perf_counter()])
for _ in range(updates + 1):
    began = clocks()
    learn(*batch)
    taken.append(clocks() - began)
print(*map(statistics.median, zip(*taken[1:])))
"""


def main() -> None:
    """Takes the frameworks in turn, and saves what they measured."""
    parser = record.command_line(__doc__, repeats=5)
    parser.add_argument("--before", type=Path, help="checkout of the commit to compare with; none: no comparison")
    parser.add_argument("--frameworks", type=record.words, default=["numpy", "torch", "tf"])
    args = parser.parse_args()

    def seconds(framework: str) -> tuple[float, float]:
        folder = args.before if framework == "before" else record.ROOT
        command = [sys.executable, "-c", PROGRAM, framework, str(UPDATES)]
        environment = record.mpi_environment(args.mpi[0]) | {"OMP_NUM_THREADS": "2", "PYTHONPATH": str(folder)}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
        cpu, wall = map(float, done.stdout.split()[-2:])
        return cpu, wall

    names = [*args.frameworks, *(["before"] if args.before else [])]
    taken = record.in_turn({name: partial(seconds, name) for name in names}, args.repeats)
    found = {}
    for name, samples in taken.items():
        for kind, values in zip(("processor time", "wall-clock time"), zip(*samples)):
            found[f"{name}: {kind}"] = record.spread(values)
    claims = []
    if args.before:
        cpu = {name: found[f"{name}: processor time"]["median"] for name in ("numpy", "before")}
        text = "update, 320 minibatches of 125 rows of each network, numpy: processor time / torch by hand"
        claims.append(record.claim(text, cpu["numpy"] / cpu["before"], at_most=0.6))
    record.save(args, found, claims, unit="seconds")


if __name__ == "__main__":
    main()
