"""Data-parallel torch: mpi_avg_grads and sync_params against one blocking Allreduce or Bcast per parameter.

    python -m benchmarks.averaging

Two Humanoid-v4 policies, 2x64 and Patrick Coady's sizes (3760, 799, 170: 4.6 million parameters). "Per parameter" is
the well-known way: each gradient's memory as a NumPy array, `comm.Allreduce` into a new one, division by the number of
ranks, and back; `comm.Bcast` of each parameter's memory. A sample is the mean of several calls in a row, on rank 0.
"""

import argparse
import itertools
import time
from collections.abc import Callable
from functools import partial

import numpy as np

import mpi_util
from benchmarks import record
from policies.actor import parse_hid_list

OBS_DIM, ACT_DIM = 376, 17  # of Humanoid-v4
HIDDEN = {"2x64": (64, 64), "4.6 million": parse_hid_list("auto", OBS_DIM, ACT_DIM, "policy")}
CALLS = {"2x64": 20, "4.6 million": 2}
AT_LEAST = {"2x64": 3.0, "4.6 million": 1.5}  # times faster than per parameter


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
                seconds = record.run_part("benchmarks.averaging", mpi, *arguments)
                found = {way: record.spread(values) for way, values in seconds.items()}
                samples[f"{name}, {mpi}, {n} ranks"] = found
                for ours, theirs in (("mpi_avg_grads", "Allreduce each"), ("sync_params", "Bcast each")):
                    ratio = found[theirs]["median"] / found[ours]["median"]
                    text = f"{ours}, {name} parameters, {n} ranks, {mpi}: times faster than {theirs}"
                    claims.append(record.claim(text, ratio, at_least=AT_LEAST[name]))
    record.save(args, samples, claims, unit="seconds")


def part(args: argparse.Namespace) -> None:
    """Measures one policy on one number of ranks."""
    if mpi_util.mpi_fork(args.ranks[0]) == "parent":
        return
    import torch
    from mpi4py import MPI

    from mpi_util_spinup.mpi_pytorch import mpi_avg_grads, setup_pytorch_for_mpi, sync_params

    setup_pytorch_for_mpi()
    sizes = (OBS_DIM, *HIDDEN[args.policy], ACT_DIM)
    layers = [torch.nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
    module = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.Tanh())))
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    comm = MPI.COMM_WORLD

    def allreduce_each() -> None:
        for parameter in module.parameters():
            grad = parameter.grad.numpy()
            total = np.zeros_like(grad)
            comm.Allreduce(grad, total)
            grad[:] = total / comm.Get_size()

    def bcast_each() -> None:
        for parameter in module.parameters():
            comm.Bcast(parameter.data.numpy())

    ways = {
        "mpi_avg_grads": partial(mpi_avg_grads, module),
        "Allreduce each": allreduce_each,
        "sync_params": partial(sync_params, module),
        "Bcast each": bcast_each,
    }
    alternatives = {way: partial(clock, call, CALLS[args.policy]) for way, call in ways.items()}
    seconds = record.in_turn(alternatives, args.repeats, warmup=3)
    if mpi_util.rank == 0:
        record.write_part(args.part, seconds)


def clock(call: Callable[[], None], n: int) -> float:
    """Seconds of one of `n` calls, which all ranks begin together."""
    mpi_util.all_sum(0)
    start = time.perf_counter()
    for _ in range(n):
        call()
    return (time.perf_counter() - start) / n


if __name__ == "__main__":
    main()
