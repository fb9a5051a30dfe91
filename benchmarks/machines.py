"""Collective calls between machines against plain MPI, and what an agreement costs rank 0 as ranks grow in number.

    python -m benchmarks.machines

The machines are network namespaces of this one (tests/cluster/hosts.sh: root, iproute2, openssh-server), so all share
its cores and its memory: figures of bandwidth are the kernel's, and ratios are what counts. Each sample is the time
from when the last rank begins until the last is done. rank0_accum_batches stands against Gatherv, rank0_bcast_wts
against Bcast, all_mean against Allreduce of the same bytes. train.py on two machines stands against itself on one.

MPI's own calls check nothing and spin. "MPI as promised" is the least that a program with mpi_util's promises pays for
the small ones, written in plain mpi4py: ranks ask and are answered before data count, by non-blocking calls, and wait
as mpi_util's do, by tests and sleeps. It has no target.

"Processor time" is rank 0's for one agreement of all ranks, which every collective call begins with, on ranks of this
machine that are told to behave as if on several (MPI_UTIL_MACHINES). Its law is fitted by least squares:
a + b x (other ranks of rank 0's machine) + c x (other leaders) + d x (ranks). With so few ranks d cannot
be told from the rest, so it is measured alone: rank 0's calculations for 10,000 ranks, whose messages are there.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import mpi_util
from benchmarks import record
from mpi_util.cluster.channel import ClusterChannel, Joined
from mpi_util.cluster.loaded import LoadedCode
from mpi_util.collectives.channel import Channel, channel_of
from mpi_util.collectives.messages import CALL, Messages, packed
from mpi_util.host.waiting import wait_until
from mpi_util.ranks import failure

HOSTS = record.ROOT / "tests" / "cluster" / "hosts.sh"
LAYOUTS = ("h1:2,h2:2", "h1:6,h2:6", "h1:2,h2:2,h3:2")
MOST = {  # of our time / MPI's
    "gather, 62 MB": 1.0,
    "gather, 8 kB a rank": 1.5,
    "broadcast, 0.12 MB": 1.5,
    "broadcast, 18 MB": 1.0,
    "average, 0.12 MB": 1.0,
    "average, 18 MB": 1.0,
}
AGREEMENTS = ((2, 1), (4, 1), (8, 1), (8, 2), (8, 8), (16, 2), (16, 4), (32, 4), (32, 16), (64, 8), (64, 32), (128, 16))
OWN_WORK = ((157, 157), (10_000, 157))  # ranks, machines
MOST_MS = {64: 0.5, 10_000: 10.0}
TRAINED_ON = "h1:2,h2:2"
ENV, EPISODES = "benchmarks.sleeping_env:Sleeping-v0", 80  # of 20 steps of 5 ms, in an iteration


def main() -> None:
    """Measures one layout of the ranks and one MPI library after the other, and saves it all."""
    parser = record.command_line(__doc__, repeats=15, mpi="mpich,openmpi")
    parser.add_argument("--hosts", nargs="+", default=LAYOUTS, help="ranks on each pretended host")
    parser.add_argument("--most", type=int, default=128, help="ranks of an agreement (default: 128)")
    parser.add_argument("--trained", type=int, default=5, help="runs of train.py for each layout (default: 5)")
    parser.add_argument("--pretended", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        return agreements(args) if args.pretended else calls(args)
    samples, claims = {}, []
    for layout in args.hosts:
        with Hosts(layout.count(":")) as hosts:
            for mpi in args.mpi:
                if layout == TRAINED_ON:
                    rates = record.in_turn(
                        {each: partial(hosts.train, mpi, each) for each in ("h1:4", layout)}, args.trained
                    )
                    one, two = (record.spread(found) for found in rates.values())
                    samples |= {f"train.py, steps per second, {k}, {mpi}": v for k, v in zip(rates, (one, two))}
                    text = f"train.py, sleeping environment, steps per second: {layout} / 4 ranks of one machine, {mpi}"
                    claims.append(record.claim(text, two["median"] / one["median"], at_least=0.95))
                options = ("--hosts", layout, "--repeats", args.repeats)
                seconds = hosts.run_part(mpi, "benchmarks.machines", *options)
                for what, most in MOST.items():
                    ours, theirs = (seconds[f"{what}, {which}"] for which in ("mpi_util", "MPI"))
                    ratio = float(np.median(ours) / np.median(theirs))
                    claims.append(record.claim(f"{what}, {layout}, {mpi}: time / MPI's", ratio, at_most=most))
                for name, values in seconds.items():
                    samples[f"{name}, {layout}, {mpi}"] = record.spread(values)
    costs = {}
    for n, machines in AGREEMENTS:
        if n <= args.most:
            os.environ["MPI_UTIL_MACHINES"] = str(machines)
            options = ("--pretended", n, "--repeats", args.repeats)
            ms = costs[n, machines] = record.run_part("benchmarks.machines", args.mpi[0], *options)
            samples[f"agreement, {n} ranks on {machines} machines: rank 0's processor time, ms"] = record.spread(ms)
            if n == 64 and machines == 8:
                claims.append(record.claim("agreement, 64 ranks on 8 machines, ms", np.median(ms), at_most=MOST_MS[n]))
    own = {key: own_work(*key, args.repeats) for key in OWN_WORK}
    samples |= {
        f"its calculations alone, {n:,} ranks on {k:,} machines, ms": record.spread(ms) for (n, k), ms in own.items()
    }
    law = fit({key: float(np.median(ms)) for key, ms in costs.items()}, per_rank(own))
    at = float(law @ terms(10_000, 157))
    claims.append(record.claim("agreement, 10,000 ranks on 157 machines by the law, ms", at, at_most=MOST_MS[10_000]))
    record.save(args, samples, claims, law_ms=dict(zip(("all", "member", "leader", "rank"), law.tolist())))


def own_work(n: int, machines: int, repeats: int) -> list[float]:
    """Processor time, in ms, of what rank 0 calculates in an agreement of `n` ranks; the messages are there already."""
    size = -(-n // machines)
    call_id = ("agreement", 1, failure.call_site())
    call = packed(CALL, (*call_id, None))

    class There(Messages):
        """Messages that need not be waited for, and go nowhere."""

        def next(self, awaited: Any, others: Any = (), end: float = 0) -> tuple[int, bytes]:
            source = next(iter(awaited))
            return source, arrived[source]

        def post_all(self, messages: Any, end: float = 0) -> None:
            return

    loaded = LoadedCode()  # compared at the first call, which is not counted

    class Rank0(ClusterChannel):
        """Its channel, without the others."""

        code = loaded

        def __init__(self) -> None:
            Channel.__init__(self)
            self.size, self.messages = n, There(0, n, None, None)
            self.others = {k: [*range(k, min(n, k + size))] for k in range(size, n, size)}
            self.below, self._spoiled = [*range(1, size)], False

    def of_machine(k: int) -> Any:
        joined = Joined.fromkeys(range(k, min(n, k + size)), call)
        joined.code = {}
        return packed(CALL, (*call_id, joined))

    arrived = {k: of_machine(k) for k in range(0, n, size)}
    arrived |= dict.fromkeys(range(1, size), call)
    found = []
    for _ in range(repeats + 1):
        channel = Rank0()
        start = time.process_time()
        channel.agree("agreement", lambda: None, lambda brought: brought)
        found.append((time.process_time() - start) * 1e3)
    return found[1:]


def per_rank(own: dict[tuple[int, int], list[float]]) -> float:
    """ms more for each rank more, of as many messages."""
    (few, few_ms), (many, many_ms) = ((n, float(np.median(ms))) for (n, _), ms in own.items())
    return (many_ms - few_ms) / (many - few)


def terms(n: int, machines: int) -> np.ndarray:
    """What the cost is linear in."""
    return np.array([1, -(-n // machines) - 1, machines - 1, n], float)


def fit(costs: dict[tuple[int, int], float], rank_ms: float) -> np.ndarray:
    """The law's coefficients, the last of them given: by least squares of relative errors, none of them negative."""
    rows = np.array([terms(*key) / ms for key, ms in costs.items()])
    rest = 1 - rows[:, -1] * rank_ms
    kept = np.ones(rows.shape[1] - 1, bool)
    found = np.zeros(len(kept))
    while kept.any():
        found[:] = 0
        found[kept] = np.linalg.lstsq(rows[:, :-1][:, kept], rest, rcond=None)[0]
        if (found >= 0).all():
            break
        kept &= found > 0
    return np.append(found, rank_ms)


class Hosts:
    """Pretended hosts h1, h2, ... as long as the context lasts."""

    def __init__(self, n: int):
        self._n = n

    def __enter__(self) -> "Hosts":
        self._folder = tempfile.TemporaryDirectory(dir="/tmp")
        seen = [
            self._folder.name,
            *(str(path) for path in (record.ROOT, sys.prefix) if Path("/tmp") in Path(path).parents),
        ]
        self._environment = {"HOSTS_DIR": f"{self._folder.name}/hosts", "KEEP": " ".join(seen)}
        self._call(os.environ, "up", self._n)
        return self

    def __exit__(self, *_: object) -> None:
        self._call(os.environ, "down")
        self._folder.cleanup()

    def run_part(self, mpi: str, program: str, *arguments: Any) -> Any:
        """`record.run_part` on h1."""
        path = Path(self._folder.name) / "part.json"
        command = (sys.executable, "-m", program, *arguments, "--part", path)
        self._call(record.mpi_environment(mpi), "on", "h1", *command)
        return json.loads(path.read_text())

    def train(self, mpi: str, layout: str) -> float:
        """Environment steps per second of train.py."""
        run_folder = Path(self._folder.name) / "run"
        limits = ("-b", EPISODES, "-n", 6 * EPISODES)
        command = (sys.executable, "train.py", ENV, "--hosts", layout, *limits, "--run_dir", run_folder)
        self._call(record.mpi_environment(mpi), "on", "h1", *command)
        rows = record.progress(run_folder)
        shutil.rmtree(run_folder)
        return record.steps_per_s(rows)

    def _call(self, environment: Any, *words: Any) -> None:
        command = ["bash", str(HOSTS), *map(str, words)]
        if subprocess.run(command, env={**environment, **self._environment}, cwd=record.ROOT).returncode:
            sys.exit(f"failed: {shlex.join(command)}")


def calls(args: argparse.Namespace) -> None:
    """Measures all calls on one layout of the ranks."""
    if mpi_util.mpi_fork(hosts=args.hosts[0]) == "parent":
        return
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    n, rank = comm.Get_size(), comm.Get_rank()
    ways: dict[str, Callable[[], Any]] = {}
    for what, nbytes in (("62 MB", 62_000_000 // n), ("8 kB a rank", 8_000)):
        own = np.full(nbytes // 4, rank, np.float32)
        all_of = np.empty(len(own) * n if rank == 0 else 0, np.float32)
        ways[f"gather, {what}, mpi_util"] = partial(mpi_util.rank0_accum_batches, {"obs": own})
        ways[f"gather, {what}, MPI"] = partial(comm.Gatherv, own, all_of if rank == 0 else None)
    channel = channel_of()
    ways["agreement, mpi_util"] = partial(channel.agree, "agreement", lambda: None, lambda brought: brought)
    for what, nbytes in (("0.12 MB", 120_000), ("18 MB", 18_000_000)):
        weights = np.zeros(nbytes // 4, np.float32)
        mean = np.empty_like(weights)
        ways[f"broadcast, {what}, mpi_util"] = partial(mpi_util.rank0_bcast_wts, {"w": weights})
        ways[f"broadcast, {what}, MPI"] = partial(comm.Bcast, weights)
        ways[f"average, {what}, mpi_util"] = partial(mpi_util.all_mean, weights)
        ways[f"average, {what}, MPI"] = partial(comm.Allreduce, weights, mean)
    ways |= as_promised(comm)
    seconds = record.in_turn({name: partial(timed, comm, way) for name, way in ways.items()}, args.repeats, warmup=3)
    if rank == 0:
        record.write_part(args.part, seconds)


def as_promised(comm: Any) -> dict[str, Callable[[], Any]]:
    """The small calls in plain mpi4py, where no rank sends or receives more than all know to fit, and none spins."""
    n, is_root = comm.Get_size(), comm.Get_rank() == 0
    digest, digests = np.zeros(32, np.uint8), np.empty(32 * n if is_root else 0, np.uint8)
    own, all_of = np.zeros(2_000, np.float32), np.empty(2_000 * n if is_root else 0, np.float32)
    weights = np.zeros(30_000, np.float32)
    mean = np.empty_like(weights)

    def in_turn(*begin: Callable[[], Any]) -> None:
        for each in begin:
            wait_until(each().Test)

    ask, answer = partial(comm.Igather, digest, digests if is_root else None), partial(comm.Ibcast, digest)
    found = {
        "gather, 8 kB a rank": (partial(comm.Igather, own, all_of if is_root else None), answer),
        "broadcast, 0.12 MB": (ask, partial(comm.Ibcast, weights)),
        "average, 0.12 MB": (partial(comm.Iallreduce, weights, mean),),  # with the digests in it
        "agreement": (ask, answer),
    }
    return {f"{what}, MPI as promised": partial(in_turn, *begin) for what, begin in found.items()}


def timed(comm: Any, call: Callable[[], Any]) -> float:
    """Seconds from when the last rank begins until the last is done; all read the same clock."""
    comm.Barrier()
    start = time.perf_counter()
    call()
    times = comm.allgather((start, time.perf_counter()))
    return max(end for _, end in times) - max(begun for begun, _ in times)


def agreements(args: argparse.Namespace) -> None:
    """Measures rank 0's processor time for one agreement, in ms."""
    if mpi_util.mpi_fork(args.pretended) == "parent":
        return
    channel, per_sample = channel_of(), 50
    found = []
    for _ in range(args.repeats + 1):
        start = time.process_time()
        for _ in range(per_sample):
            channel.agree("agreement", lambda: None, lambda brought: brought)
        found.append((time.process_time() - start) / per_sample * 1e3)
    if channel.rank == 0:
        record.write_part(args.part, found[1:])


if __name__ == "__main__":
    main()
