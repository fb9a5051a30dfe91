"""What waiting costs: the CPU time of ranks that wait for rank 0's update, and how much they slow it down.

    python -m benchmarks.idle

Rank 0 makes full-batch Adam steps in torch on all cores, for about 5 s, while the other ranks wait in rank0_bcast_wts.
In turn with it the same steps alone: one process, as many threads, no MPI. For contrast also with the others in a
blocking comm.Bcast, with fewer steps, because some MPI libraries then need a hundred times as long.
"""

import argparse
import time
from functools import partial
from typing import Any

import numpy as np

import mpi_util
from benchmarks import record

ROWS, OBS_DIM, HIDDEN, ACT_DIM = 4000, 376, 64, 17
WAYS = ("alone", "rank0_bcast_wts", "comm.Bcast")


def main() -> None:
    """Takes the alternatives in turn, each in processes of its own, and saves what they measured."""
    parser = record.command_line(__doc__, repeats=5, ranks="2,10", mpi="mpich,openmpi")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of the update alone (default: 5)")
    contrast = "share of it while others are in comm.Bcast (default: 0.05; 0: leave that out)"
    parser.add_argument("--contrast", type=float, default=0.05, help=contrast)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help="of the update (default: as many as take --seconds alone)")
    args = parser.parse_args()
    if args.part:
        return part(args)

    def run(way: str, mpi: str, n: int, steps: int) -> dict[str, Any]:
        found = record.run_part("benchmarks.idle", mpi, "--way", way, "--ranks", n, "--steps", steps)
        return found | {"ms_per_step": 1e3 * found["update_s"] / steps}

    steps = args.steps or max(10, round(1e3 * args.seconds / run("alone", "mpich", 1, 100)["ms_per_step"]))
    alternatives = {"alone": partial(run, "alone", "mpich", 1, steps)}
    lengths = {"rank0_bcast_wts": 1.0} | ({"comm.Bcast": args.contrast} if args.contrast else {})
    for way, share in lengths.items():
        for mpi in args.mpi:
            for n in args.ranks:
                alternatives[f"{way}, {mpi}, {n} ranks"] = partial(run, way, mpi, n, max(1, round(share * steps)))
    found = record.in_turn(alternatives, args.repeats)
    samples, claims = {}, []
    for name, parts in found.items():
        samples[name] = {"update_ms_per_step": record.spread([p["ms_per_step"] for p in parts])}
        shares = [share for p in parts for share in p["cpu_shares"]]
        if shares:
            samples[name]["cpu_share_of_a_waiting_rank"] = record.spread(shares)
        if name.startswith("rank0_bcast_wts"):
            ratio = samples[name]["update_ms_per_step"]["median"] / samples["alone"]["update_ms_per_step"]["median"]
            busiest = 100 * max(shares)
            claims.append(record.claim(f"waiting in {name}: CPU time of the busiest, % of a core", busiest, at_most=2))
            claims.append(record.claim(f"waiting in {name}: update / update alone", ratio, at_most=1.1))
    record.save(args, samples, claims, steps=steps, threads=mpi_util.usable_cores())


def part(args: argparse.Namespace) -> None:
    """One update, with the other ranks waiting in one way."""
    if mpi_util.mpi_fork(args.ranks[0]) == "parent":
        return
    weights = np.zeros((OBS_DIM, HIDDEN), np.float32)
    if args.way == "comm.Bcast":
        from mpi4py import MPI

        wait = partial(MPI.COMM_WORLD.Bcast, weights)
    else:
        wait = partial(mpi_util.rank0_bcast_wts, {"weights": weights})
    update = build_update() if mpi_util.rank == 0 else None
    mpi_util.rank0_bcast_wts({"weights": weights})  # MPI has started everywhere, the update is built and warm
    start, cpu_start = time.perf_counter(), time.process_time()
    if update:
        update(args.steps)
        update_s = time.perf_counter() - start
    wait()
    share = (time.process_time() - cpu_start) / (time.perf_counter() - start)
    shares = mpi_util.rank0_accum_batches({"share": np.array([share])})["share"]
    if mpi_util.rank == 0:
        record.write_part(args.part, {"update_s": update_s, "cpu_shares": shares[1:].tolist()})


def build_update() -> Any:
    """A function that makes a number of full-batch steps of a 2x64 network, on all cores."""
    import torch

    torch.set_num_threads(mpi_util.usable_cores())
    torch.manual_seed(0)
    sizes = [(OBS_DIM, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, ACT_DIM)]
    net = torch.nn.Sequential(*(layer for pair in sizes for layer in (torch.nn.Linear(*pair), torch.nn.Tanh())))
    optimizer = torch.optim.Adam(net.parameters())
    observes, targets = torch.randn(ROWS, OBS_DIM), torch.randn(ROWS, ACT_DIM)

    def update(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            (net(observes) - targets).square().mean().backward()
            optimizer.step()

    update(10)
    return update


if __name__ == "__main__":
    main()
