"""What an environment that is an MPI program costs: a call to it, its ranks against workers, and its waiting.

    python -m benchmarks.simulators

A call: `step` of an environment that does nothing, on teams and through a process; beside it MPI's own calls between
ranks that busy-wait. Shares: steps per second of examples/kuramoto.py on rings of several lengths, by 1 and 2 workers
of one rank and by a team of two. Pausing: the CPU time of a solver that waits busily for its next action, during an
update of the worker's that takes some seconds.
"""

import argparse
import functools
import sys
import time
from typing import Any

import gymnasium as gym
import numpy as np
import psutil

import mpi_util
from benchmarks import record
from examples.kuramoto import ACTUATORS, make

MODULE = "benchmarks.simulators"
TEAM_US, PROCESS_US, PAUSED = 150.0, 300.0, 0.5  # targets; of the last: % of a core
WAIT_S = 3.0
LAUNCHERS = {
    "mpich": [f"{sys.prefix}/bin/mpiexec"],
    "openmpi": [str(record.OPEN_MPI.parents[1] / "bin" / "mpiexec"), "--allow-run-as-root", "--oversubscribe"],
}


class Nothing(gym.Env):
    """Steps in no time."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (8,))
    action_space = gym.spaces.Box(-1.0, 1.0, (4,))

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        return np.zeros(8, np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        return np.zeros(8, np.float32), 0.0, False, False, {}


def nothing(comm: Any) -> Nothing:
    """On every rank."""
    return Nothing()


class Polling(Nothing):
    """One rank of two; the other one is `solve`, which waits busily in MPI."""

    def __init__(self, world: Any):
        self.world = world

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.world.bcast(True)
        return super().step(action)

    def close(self) -> None:
        self.world.bcast(False)


def polling() -> Polling:
    """On rank 0 of COMM_WORLD."""
    from mpi4py import MPI

    return Polling(MPI.COMM_WORLD)


def solve() -> None:
    """The solver of Polling."""
    from mpi4py import MPI

    while MPI.COMM_WORLD.bcast(None):
        pass


def served(target: str) -> list[str]:
    """The command of an environment."""
    return [sys.executable, "-m", "mpi_util.serve", f"{MODULE}:{target}"]


def main() -> None:
    """Takes the alternatives in turn and saves what they measured."""
    parser = record.command_line(__doc__, repeats=5, mpi="mpich,openmpi")
    parser.add_argument("--calls", type=int, default=2000, help="of a sample (default: 2000)")
    parser.add_argument("--steps", type=int, default=100, help="of the flow, in a sample (default: 100)")
    sizes = "lengths of the ring, in units of 32 points (default: 1,64,512,4096)"
    parser.add_argument("--lengths", type=record.numbers, default=[1, 64, 512, 4096], help=sizes)
    parser.add_argument("--what", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--nprocs", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ranks_per_env", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        return part(args)
    samples, claims = {}, []
    for measure in (calls, shares, pauses):
        found, claimed = measure(args)
        samples |= found
        claims += claimed
    record.save(args, samples, claims, calls=args.calls, steps=args.steps, lengths=args.lengths)


def start(args: argparse.Namespace, what: str, mpi: str, n: int, k: int, *more: Any) -> Any:
    """A part's result."""
    given = ("--mpi", mpi, "--what", what, "--nprocs", n, "--ranks_per_env", k)
    given += ("--calls", args.calls, "--steps", args.steps)
    return record.run_part(MODULE, mpi, *given, *more)


def calls(args: argparse.Namespace) -> tuple[dict, list]:
    """Microseconds of a call."""
    ways: dict[str, Any] = {}
    for mpi in args.mpi:
        for k in (2, 4):
            ways[f"call to a team of {k}, {mpi}"] = functools.partial(start, args, "team", mpi, k, k)
            ways[f"bare bcast to {k}, {mpi}"] = functools.partial(start, args, "bare", mpi, k, 1)
        ways[f"call to a process, {mpi}"] = functools.partial(start, args, "process", mpi, 1, 1)
    found = record.in_turn(ways, args.repeats)
    samples = {name: {key: record.spread([s[key] for s in each]) for key in each[0]} for name, each in found.items()}
    claims = []
    for mpi in args.mpi:
        for name, most in (("a team of 2", TEAM_US), ("a team of 4", TEAM_US), ("a process", PROCESS_US)):
            us = samples[f"call to {name}, {mpi}"]["us"]["median"]
            claims.append(record.claim(f"a call to {name}, {mpi}, us", us, at_most=most))
    return samples, claims


def shares(args: argparse.Namespace) -> tuple[dict, list]:
    """Steps per second of the flow, by workers and ranks of each."""
    shapes = {"1 worker x 1 rank": (1, 1), "2 workers x 1 rank": (2, 1), "1 worker x 2 ranks": (2, 2)}
    ways = {
        f"{points * 32} points, {shape}": functools.partial(start, args, "flow", args.mpi[0], n, k, "--lengths", points)
        for points in args.lengths
        for shape, (n, k) in shapes.items()
    }
    return {name: record.spread(rates) for name, rates in record.in_turn(ways, args.repeats).items()}, []


def pauses(args: argparse.Namespace) -> tuple[dict, list]:
    """The share of a core that a waiting solver takes."""
    ways = {
        f"{name} solver during an update, {mpi}": functools.partial(start, args, name, mpi, 1, 1)
        for mpi in args.mpi
        for name in ("paused", "running")
    }
    found = record.in_turn(ways, args.repeats)
    samples = {name: {"percent_of_a_core": record.spread(each)} for name, each in found.items()}
    claims = [
        record.claim(f"a {name}: CPU time, % of a core", max(each), at_most=PAUSED)
        for name, each in found.items()
        if name.startswith("paused")
    ]
    return samples, claims


def part(args: argparse.Namespace) -> None:
    """One sample."""
    if mpi_util.mpi_fork(args.nprocs, ranks_per_env=args.ranks_per_env) == "parent":
        return
    result = PARTS[args.what](args)
    if mpi_util.rank == 0:
        record.write_part(args.part, result)


def timed(call: Any, n: int) -> dict[str, float]:
    """Microseconds of a call, after some: the median of n, and what the fastest tenth takes at most."""
    for _ in range(n // 10):
        call()
    marks = [time.perf_counter()]
    for _ in range(n):
        call()
        marks.append(time.perf_counter())
    tenth, half = np.quantile(1e6 * np.diff(marks), [0.1, 0.5])
    return {"us": half, "fastest_tenth_us": tenth}


def of_calls(env: Any, n: int) -> dict[str, float]:
    """What `step` takes."""
    env.reset(seed=0)
    found = timed(functools.partial(env.step, np.zeros(4, np.float32)), n)
    env.close()
    return found


def bare(args: argparse.Namespace) -> dict[str, float]:
    """A broadcast of an action by mpi4py, and one to which all ranks answer."""
    from mpi4py import MPI

    comm, action = MPI.COMM_WORLD.Dup(), np.zeros(4, np.float32)

    def answered() -> None:
        comm.bcast(action)
        comm.gather(None)

    alone = timed(functools.partial(comm.bcast, action), args.calls)
    comm.Barrier()
    return alone | {f"answered_{key}": us for key, us in timed(answered, args.calls).items()}


def flow(args: argparse.Namespace) -> float:
    """Steps per second of all workers' flows together."""
    env = mpi_util.simulator(functools.partial(make, lengths=args.lengths[0]))
    env.reset(seed=mpi_util.rank)
    mpi_util.all_mean(np.zeros(1))
    start = time.perf_counter()
    for _ in range(args.steps):
        env.step(np.zeros(ACTUATORS))
    mpi_util.all_mean(np.zeros(1))
    seconds = time.perf_counter() - start
    return mpi_util.nworkers * args.steps / seconds


def waiting(args: argparse.Namespace, pause: bool) -> float:
    """% of a core that the processes of a simulator take, while it is not called."""
    (mpi,), busy = args.mpi, [sys.executable, "-c", f"from {MODULE} import solve; solve()"]
    command = [*LAUNCHERS[mpi], "-n", "1", *served("polling"), "--ranks", "1", ":", "-n", "1", *busy]
    if mpi == "openmpi":
        command = ["env", f"MPI4PY_LIBMPI={record.OPEN_MPI}", *command]
    env = mpi_util.simulator(command=command, pause=pause)
    env.reset(seed=0)
    env.step(np.zeros(4, np.float32))
    time.sleep(0.5)
    below = psutil.Process().children(recursive=True)

    def cpu_s() -> float:
        return sum(sum(p.cpu_times()[:2]) for p in below)

    before, start = cpu_s(), time.perf_counter()
    while time.perf_counter() - start < WAIT_S:  # an update
        pass
    share = 100 * (cpu_s() - before) / (time.perf_counter() - start)
    env.step(np.zeros(4, np.float32))
    env.close()
    return share


PARTS = {
    "team": lambda args: of_calls(mpi_util.simulator(nothing), args.calls),
    "process": lambda args: of_calls(mpi_util.simulator(command=served("nothing")), args.calls),
    "bare": bare,
    "flow": flow,
    "paused": lambda args: waiting(args, True),
    "running": lambda args: waiting(args, False),
}

if __name__ == "__main__":
    main()
