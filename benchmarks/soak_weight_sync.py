"""weight_sync under random operations, kills, stops and replacements: nothing hangs, mixes versions or stays behind.

    python -m benchmarks.soak_weight_sync

A sequence is one sender with 1 to 4 workers and random options (what a dead worker means, whether it waits): it
sends to all or some, acknowledged or not, and meanwhile workers are killed, stopped and continued, end in
order, or are replaced. Each worker looks at its weights between any two steps, under `frozen()`: all their values must
be those of one version, and versions must never go back. Between processes; and between ranks, where the kill of a rank
ends the job, so that it is the last thing of a job.
"""

import argparse
import contextlib
import functools
import multiprocessing
import os
import random
import re
import signal
import sys
import threading
import time
from typing import Any

import numpy as np

import mpi_util
from benchmarks import soak
from mpi_util_weight_sync import MPIWeightSyncScheme, MultiProcessWeightSyncScheme, WeightSyncScheme

GOAL = 2000
A_JOB = 25  # sequences
RANKS = 4
TIMEOUT_S = 30.0  # of each call: what takes so long hangs
MIXED = 3  # exit status of a worker that has seen what must not be
SHAPES = {"small": (7,), "large": (300_000,), "none": (0, 3)}
EXPECTED = (mpi_util.WorkerLeftError, mpi_util.SyncTimeoutError)  # of a worker that was killed, or is stopped


def main() -> None:
    """Jobs of 25 sequences, between processes and between ranks in turn."""
    parser = soak.command_line(__doc__, repeats=GOAL)
    parser.add_argument("--sequences", type=int, default=A_JOB, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        return (processes if str(args.part) == "processes" else ranks)(args.case, args.sequences)

    def case(group: str, number: int) -> tuple[int, dict[str, float]]:
        words = ["--part", group.split()[0], "--case", number, "--sequences", args.sequences]
        killed = number % 2 == 0 and group != "processes"
        with soak.box() as box:
            command = [sys.executable, "-m", "benchmarks.soak_weight_sync", *words]
            machines = {"MPI_UTIL_MACHINES": "2"} if number % 3 == 2 else {}
            box.run(command, group.split()[-1], 20 * TIMEOUT_S, 137 if killed else 0, **machines)
        return args.sequences, {}

    groups = ["processes", *(f"ranks {mpi}" for mpi in args.mpi)]
    claims = functools.partial(soak.count_claims, "random sequences of weight_sync", GOAL)
    soak.soak(args, groups, case, lambda done, failures, _: claims(done, failures))


def model(value: float) -> dict[str, Any]:
    return {name: np.full(shape, value, "f4") for name, shape in SHAPES.items()} | {
        "n": np.array(int(value)),
        "last": np.array(0),
    }


def fill(weights: dict[str, Any], value: float, last: bool = False) -> None:
    for name, array in weights.items():
        array[...] = value if name != "last" else last


def check(scheme: WeightSyncScheme, weights: dict[str, Any], seen: int) -> int:
    """The version of the weights, which must be whole and not older than `seen`. The sender's values are versions."""
    with scheme.frozen() as version:
        values = {float(v) for name in ("small", "large", "n") for v in (weights[name].min(), weights[name].max())}
    if values != {version} or version < seen:
        raise RuntimeError(f"version {version} after {seen}, values {values}")
    return version


def follow(scheme: WeightSyncScheme, rng: random.Random, index: int | None, stop: Any, background: bool) -> None:
    """A worker: looks at its weights until it is told to stop, or the sender has gone."""
    weights, seen = model(-1), 0
    scheme.init_on_receiver(model_id="policy", worker_idx=index, model=weights)
    with scheme, contextlib.suppress(mpi_util.WorkerLeftError):
        scheme.connect(background=background)
        while not stop() and not weights["last"] and scheme.failure is None:
            if not background:
                scheme.receive(rng.uniform(0, 0.02))
            seen = check(scheme, weights, seen)
            time.sleep(rng.uniform(0, 0.003))


def send(scheme: WeightSyncScheme, weights: dict[str, Any], rng: random.Random, workers: list[int]) -> None:
    """One operation of the sender."""
    fill(weights, float(scheme.version + 1))
    how = rng.choice(("all", "some", "async", "async", "wait"))
    if how == "wait":
        scheme.wait_async(TIMEOUT_S)
    elif how == "async":
        scheme.send_async()
    else:
        scheme.send(worker_ids=None if how == "all" else rng.sample(workers, rng.randint(1, len(workers))))


def send_to_stopped(pid: int, scheme: WeightSyncScheme, weights: dict[str, Any], rng: random.Random) -> None:
    """Sends while a worker is stopped."""
    fill(weights, float(scheme.version + 1))
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(rng.uniform(0, 0.2), os.kill, (pid, signal.SIGCONT))
    timer.start()
    try:
        with contextlib.suppress(*EXPECTED):
            scheme.send_async() if rng.random() < 0.5 else scheme.send(timeout=0.05)
    finally:
        timer.join()


# ---- between processes


def worker(scheme: WeightSyncScheme, seed: str, index: int, ends: Any) -> None:
    rng = random.Random(seed)
    try:
        follow(scheme, rng, index, lambda: ends.value, rng.random() < 0.6)
    except RuntimeError as error:
        print(f"worker {index}: {error}", file=sys.stderr, flush=True)
        os._exit(MIXED)


def processes(case: int, n: int) -> None:
    """Some sequences in this process, one after the other."""
    for number in range(n):
        sequence(random.Random(f"{case} {number}"))
        if left := multiprocessing.active_children():
            sys.exit(f"sequence {number}: left {left}")
    time.sleep(0.1)
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that folder itself, which was open
            if "memfd:mpi_util" in (link := os.readlink(f"/proc/self/fd/{fd}")):
                sys.exit(f"left {link}")


def sequence(rng: random.Random) -> None:
    """One sender, its workers, and what happens to them."""
    n, drop = rng.randint(1, 4), rng.random() < 0.5
    options = {"on_dead": "drop" if drop else "raise", "sync": rng.random() < 0.7}
    scheme = MultiProcessWeightSyncScheme(timeout=TIMEOUT_S, **options)
    weights = model(1)
    scheme.init_on_sender(model_id="policy", model=weights, num_workers=n)
    context = multiprocessing.get_context("fork")
    crew: dict[int, tuple[Any, Any]] = {}

    def start(index: int) -> None:
        ends = context.RawValue("b")  # an Event has a lock, which a process that is killed may hold
        crew[index] = context.Process(target=worker, args=(scheme, str(rng.random()), index, ends)), ends
        crew[index][0].start()

    for index in range(n):
        start(index)
    scheme.connect()
    struck: set[int] = set()  # killed, or told to end; who takes their place may not have connected yet
    for _ in range(rng.randint(1, 12)):
        index = rng.randrange(n)
        process, ends = crew[index]
        what = rng.choice(("send", "send", "send", "kill", "stop", "end", "replace"))
        began = time.monotonic()
        try:
            if what == "send":
                send(scheme, weights, rng, list(range(n)))
            elif what == "kill":
                struck.add(index)
                process.kill()
            elif what == "end":
                struck.add(index)
                ends.value = 1
            elif what == "stop" and process.is_alive():
                send_to_stopped(process.pid, scheme, weights, rng)
            elif what == "replace" and index in struck:
                process.kill()  # one that waits for its first weights does so until the next send
                process.join()
                start(index)
        except mpi_util.WorkerLeftError:
            if not struck:
                raise
        except mpi_util.SyncTimeoutError as error:  # nobody knows of one that ended before it connected, or was seen
            absent = {int(index) for index in re.findall(r"worker (\d+) has not connected", str(error))}
            if not absent <= struck or "has version" in str(error):
                raise
            for index in absent:
                crew[index][0].kill()
                crew[index][0].join()
                start(index)
            continue
        if time.monotonic() - began >= TIMEOUT_S:
            raise RuntimeError(f"{what} took {time.monotonic() - began:.0f} s")
    if rng.random() < 0.5:
        for _, ends in crew.values():
            ends.value = 1
    scheme.shutdown()
    for index, (process, ends) in crew.items():
        ends.value = 1  # the end of the sender is no failure
        process.join(TIMEOUT_S)
        if process.is_alive():
            raise RuntimeError(f"worker {index} does not end")
        if process.exitcode == MIXED or (process.exitcode and index not in struck):
            raise RuntimeError(f"worker {index} ended with status {process.exitcode}")


# ---- between ranks


def ranks(case: int, n: int) -> None:
    """Some sequences, with another sender each; then, in every other job, one rank is killed."""
    if mpi_util.mpi_fork(RANKS) == "parent":
        return
    for number in range(n):
        rank_sequence(random.Random(f"{case} {number}"), f"{case} {number} {mpi_util.rank}")
    if case % 2 == 0:
        mpi_util.all_sum(0)
        if mpi_util.rank == random.Random(case).randrange(RANKS):
            os.kill(os.getpid(), signal.SIGKILL)
        with MPIWeightSyncScheme(timeout=TIMEOUT_S) as scheme:
            if mpi_util.rank == 0:
                scheme.init_on_sender(model=model(1))
            else:
                scheme.init_on_receiver(model=model(0))
            scheme.connect()
        time.sleep(TIMEOUT_S)  # the job has ended by then


def rank_sequence(rng: random.Random, own_seed: str) -> None:
    """All ranks draw the same options, and each its own times."""
    rank, size, sender = mpi_util.rank, mpi_util.nworkers, rng.randrange(mpi_util.nworkers)
    options = {"sync": rng.random() < 0.7}
    pids = list(mpi_util.all_accum_batches({"pid": np.array([os.getpid()])})["pid"])
    scheme = MPIWeightSyncScheme(timeout=TIMEOUT_S, sender=sender, **options)
    own = random.Random(own_seed)
    if rank != sender:
        ends = time.monotonic() + own.uniform(0, 0.3) if own.random() < 0.3 else float("inf")
        follow(scheme, own, None, lambda: time.monotonic() > ends, own.random() < 0.6)
    else:
        weights, others = model(1), [pid for k, pid in enumerate(pids) if k != rank]
        with scheme:
            scheme.init_on_sender(model_id="policy", model=weights)
            scheme.connect()
            for _ in range(rng.randint(1, 12)):
                if rng.random() < 0.2:
                    pid = int(rng.choice(others))
                    send_to_stopped(pid, scheme, weights, rng)
                else:
                    with contextlib.suppress(mpi_util.WorkerLeftError):  # all, or those chosen, have ended in order
                        send(scheme, weights, rng, list(range(size - 1)))
            fill(weights, float(scheme.version + 1), last=True)
            with contextlib.suppress(mpi_util.WorkerLeftError):
                scheme.send()
                scheme.wait_async()
    if mpi_util.all_sum(1) != size:
        mpi_util.fail("wrong sum")


if __name__ == "__main__":
    main()
