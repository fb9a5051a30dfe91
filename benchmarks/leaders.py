"""What MPI's own calls give between the leaders of machines, against forwarding of our own: why cluster/ is as it is.

    python -m benchmarks.leaders

One rank on each pretended host (see benchmarks.machines); all wait by tests and sleeps. Broadcast: MPI_Ibcast against
1 MB parts that are forwarded along a binomial tree. Gather of rows that lie in 6 runs, or in 1,200 pieces, of rank 0's
memory: an MPI_Irecv with a derived datatype for each leader against 4 MB parts that rank 0 copies to their places.
"""

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import mpi_util
from benchmarks import record
from benchmarks.machines import Hosts, timed
from mpi_util.cluster import forwarding
from mpi_util.collectives.channel import channel_of
from mpi_util.host.waiting import wait_until

LAYOUTS = ("h1:1,h2:1", "h1:1,h2:1,h3:1,h4:1")
SIZES = {"10 kB": 10_000, "1 MB": 1_000_000, "18 MB": 18_000_000, "62 MB": 62_000_000}
MOST = 1.5  # what cluster/ does / the other way, in time
_PART_BYTES = 1 << 20


def main() -> None:
    """Measures one layout and one MPI library after the other, and saves it all."""
    parser = record.command_line(__doc__, repeats=9, mpi="mpich,openmpi")
    parser.add_argument("--hosts", nargs="+", default=LAYOUTS, help="one rank on each pretended host")
    args = parser.parse_args()
    if args.part:
        return calls(args)
    samples, claims = {}, []
    for layout in args.hosts:
        with Hosts(layout.count(":")) as hosts:
            for mpi in args.mpi:
                seconds = hosts.run_part(mpi, "benchmarks.leaders", "--hosts", layout, "--repeats", args.repeats)
                for what in dict.fromkeys(name.rpartition(", ")[0] for name in seconds):
                    chosen, other = ("MPI", "ours") if what.startswith("broadcast") else ("ours", "MPI")
                    ratio = np.median(seconds[f"{what}, {chosen}"]) / np.median(seconds[f"{what}, {other}"])
                    text = f"{what}, {layout}, {mpi}: {chosen}, as in cluster/, / {other}"
                    claims.append(record.claim(text, float(ratio), at_most=MOST))
                samples |= {f"{name}, {layout}, {mpi}": record.spread(found) for name, found in seconds.items()}
    record.save(args, samples, claims)


def calls(args: argparse.Namespace) -> None:
    """Measures all ways on one layout."""
    if mpi_util.mpi_fork(hosts=args.hosts[0]) == "parent":
        return
    channel = channel_of()
    ways: dict[str, Callable[[], Any]] = {}
    for size, nbytes in SIZES.items():
        block = np.zeros(nbytes, np.uint8)
        ways[f"broadcast, {size}, MPI"] = partial(forwarding.broadcast, channel, block)
        ways[f"broadcast, {size}, ours"] = partial(along_a_tree, channel.comm, block)
        for n in (1, 200):  # pieces of a leader, of each of 6 arrays
            here, target, pieces = spread(channel.rank, channel.size, nbytes, n)
            what = f"gather, {size}, {n} pieces"
            ways[f"{what}, MPI"] = partial(by_datatype, channel.comm, here, target, pieces)
            ways[f"{what}, ours"] = partial(in_parts, channel, here, target, pieces)
    seconds = record.in_turn({k: partial(timed, channel.comm, way) for k, way in ways.items()}, args.repeats, warmup=1)
    if channel.rank == 0:
        record.write_part(args.part, seconds)


def spread(rank: int, size: int, nbytes: int, n: int) -> tuple[np.ndarray, np.ndarray, dict[int, list[Any]]]:
    """(this leader's rows, rank 0's memory, by leader where its rows belong there)."""
    pieces: dict[int, list[Any]] = {k: [] for k in range(size)}
    end = 0
    for width in (376, 17, 1, 1, 1, 1):
        length = nbytes * width // 397 // (n * size)
        for k in itertools.islice(itertools.cycle(range(size)), n * size):
            pieces[k].append((end, length))
            end += length
    here = np.zeros(sum(length for _, length in pieces[rank]), np.uint8)
    return here, np.zeros(end if rank == 0 else 0, np.uint8), {k: own for k, own in pieces.items() if k}


def along_a_tree(comm: Any, block: np.ndarray) -> None:
    """Rank 0's block, in parts, each forwarded while the next one comes."""
    i, n = comm.Get_rank(), comm.Get_size()
    to = [i + (1 << k) for k in range(i.bit_length(), n.bit_length()) if i + (1 << k) < n]
    parts = [block[start : start + _PART_BYTES] for start in range(0, len(block), _PART_BYTES)]
    coming = [comm.Irecv(part, i - (1 << i.bit_length() >> 1)) for part in parts] if i else []
    sent = []
    for part, request in itertools.zip_longest(parts, coming):
        if request is not None:
            wait_until(request.Test, spin_s=20e-3)
        sent += [comm.Isend(part, k) for k in to]
    for request in sent:
        wait_until(request.Test, spin_s=20e-3)


def by_datatype(comm: Any, here: np.ndarray, target: np.ndarray, pieces: dict[int, list[Any]]) -> None:
    """One message of each leader, received at its places."""
    from mpi4py import MPI

    kinds = [MPI.BYTE.Create_hindexed([n for _, n in own], [at for at, _ in own]).Commit() for own in pieces.values()]
    if comm.Get_rank():
        requests = [comm.Isend(here, 0)]
    else:
        requests = [comm.Irecv([target, 1, kind], k) for k, kind in zip(pieces, kinds)]
    for request in requests:
        wait_until(request.Test, spin_s=20e-3)
    for kind in kinds:
        kind.Free()


def in_parts(channel: Any, here: np.ndarray, target: np.ndarray, pieces: dict[int, list[Any]]) -> None:
    """As cluster/ does it."""
    if channel.rank:
        forwarding.send(channel, here)
    else:
        with forwarding.receiving(channel, target, pieces):
            pass


if __name__ == "__main__":
    main()
