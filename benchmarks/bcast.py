"""Sending the weights to all ranks: rank0_bcast_wts against comm.Bcast and torch.distributed (gloo) per parameter.

    python -m benchmarks.bcast

Two Humanoid-v4 policies, 2x64 and Patrick Coady's sizes (3760, 799, 170: 4.6 million parameters), as torch module and
as dict of arrays. All ranks wait in the call already when rank 0 calls it, as after an update; timed from then
until the last rank has the weights (all processes of a machine read the same clock). Every alternative writes into the
same modules on the same ranks. The memcpy is one numpy.copyto of the same bytes by rank 0 while the others sleep.
"wake-up alone" is what the kernel takes: rank 0 writes a byte into the pipe of each rank, which sleeps until then.
"""

import argparse
import itertools
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import mpi_util
from benchmarks import record
from mpi_util.host.waiting import WakePipe
from policies.actor import parse_hid_list

OBS_DIM, ACT_DIM = 376, 17  # of Humanoid-v4
HIDDEN = {"2x64": (64, 64), "4.6 million": parse_hid_list("auto", OBS_DIM, ACT_DIM, "policy")}
OURS = ("rank0_bcast_wts, module", "rank0_bcast_wts, dict")
OTHERS = ("comm.Bcast", "torch.distributed gloo")
SETTLE_S = 0.02  # until the other ranks wait in the call


def main() -> None:
    """Starts a part for each policy, rank count and MPI library, and saves what they measured."""
    parser = record.command_line(__doc__, repeats=40, ranks="2,10", mpi="mpich,openmpi")
    parser.add_argument("--policy", choices=HIDDEN, help="only this one (default: both)")
    args = parser.parse_args()
    if args.part:
        return part(args)
    samples, claims = {}, []
    for name in [args.policy] if args.policy else HIDDEN:
        for mpi in args.mpi:
            for n in args.ranks:
                arguments = ("--policy", name, "--ranks", n, "--repeats", args.repeats)
                seconds = record.run_part("benchmarks.bcast", mpi, *arguments)
                found = {way: record.spread(values) for way, values in seconds.items()}
                samples[f"{name}, {mpi}, {n} ranks"] = found
                claims += claims_of(f"{name} policy to {n} ranks, {mpi}", n, {w: s["median"] for w, s in found.items()})
    record.save(args, samples, claims, unit="seconds")


def claims_of(what: str, n: int, median_s: dict[str, float]) -> list[dict[str, Any]]:
    """What is claimed of one policy on `n` ranks."""
    best_other = min(median_s[way] for way in OTHERS)
    most = 1.2 if "2x64" in what and n == 2 else 1.0
    ratios = [(way, median_s[way] / best_other) for way in OURS]
    found = [record.claim(f"{way}, {what}: time / best other", ratio, at_most=most) for way, ratio in ratios]
    if "million" in what:
        target = 2 * max(1.0, n / mpi_util.usable_cores())
        ratios = [(way, median_s[way] / median_s["memcpy"]) for way in OURS]
        found += [record.claim(f"{way}, {what}: time / memcpy", ratio, at_most=target) for way, ratio in ratios]
    return found


def part(args: argparse.Namespace) -> None:
    """Measures one policy on one number of ranks."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if mpi_util.mpi_fork(args.ranks[0]) == "parent":
        return
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    torch.set_num_threads(1)
    meet_at = f"file://{args.part}.rendezvous"
    dist.init_process_group("gloo", init_method=meet_at, rank=mpi_util.rank, world_size=mpi_util.nworkers)
    sizes = (OBS_DIM, *HIDDEN[args.policy], ACT_DIM)
    layers = [torch.nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
    module = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.Tanh())))
    params = [param.detach() for param in module.parameters()]
    views = {name: param.detach().numpy() for name, param in module.named_parameters()}

    def bcast_each() -> None:
        for view in views.values():
            MPI.COMM_WORLD.Bcast(view)

    def gloo_each() -> None:
        for param in params:
            dist.broadcast(param, 0)

    source = np.ones(sum(view.nbytes for view in views.values()), np.uint8)
    target = np.zeros_like(source)
    ours = (partial(mpi_util.rank0_bcast_wts, module), partial(mpi_util.rank0_bcast_wts, views))
    ways = dict(zip(OURS + OTHERS, (*ours, bcast_each, gloo_each)))
    alternatives = {way: partial(until_all_have_it, call, params) for way, call in ways.items()}
    alternatives["wake-up alone"] = partial(until_all_have_it, wake_up(), [])
    alternatives["memcpy"] = partial(clock_memcpy, target, source)
    seconds = record.in_turn(alternatives, args.repeats, warmup=3)
    dist.destroy_process_group()
    if mpi_util.rank == 0:
        record.write_part(args.part, seconds)


def until_all_have_it(bcast: Callable[[], Any], params: list[Any]) -> float:
    """Seconds from when rank 0 calls `bcast` until the last rank has its weights, which are new ones each time."""
    rank = mpi_util.rank
    for param in params:
        param.fill_(float(rank + 1))
    mpi_util.all_sum(0)
    if rank == 0:
        time.sleep(SETTLE_S)
    start = time.perf_counter()
    bcast()
    end = time.perf_counter()
    if any(param[..., -1].flatten()[-1] != 1.0 for param in params):
        raise RuntimeError(f"rank {rank} did not get rank 0's weights")
    times = mpi_util.all_accum_batches({"start": start, "end": end})
    return float(times["end"].max() - times["start"][0])


def wake_up() -> Callable[[], Any]:
    """Collective: a function that wakes the others on rank 0, and elsewhere sleeps until then."""
    pipe = WakePipe()
    ends = mpi_util.all_accum_batches({"pid": os.getpid(), "fd": pipe.write_fd})
    others = zip(ends["pid"][1:].tolist(), ends["fd"][1:].tolist())
    wakes = [WakePipe.open(*end) for end in others] if mpi_util.rank == 0 else []

    def call() -> None:
        for fd in wakes:
            WakePipe.wake(fd)
        if mpi_util.rank:
            pipe.sleep(60.0)

    return call


def clock_memcpy(target: np.ndarray, source: np.ndarray) -> float:
    """Seconds of one copy by rank 0, of bytes that were just written, while the others sleep in the next call."""
    seconds = None
    if mpi_util.rank == 0:
        source += 1
        time.sleep(SETTLE_S)
        start = time.perf_counter()
        np.copyto(target, source)
        seconds = time.perf_counter() - start
    return mpi_util.bcast(seconds)


if __name__ == "__main__":
    main()
