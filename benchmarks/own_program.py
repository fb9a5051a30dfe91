"""The time of rank 0's update in a user's own program, against the same program without mpi_util.

    python -m benchmarks.own_program

The program is plain torch that sets no threads: three layers of 1024 units, Adam, full batches of 4000 rows. It runs as
it is, and with the README's lines while 3 other ranks wait for rank 0's update.
"""

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import mpi_util
from benchmarks import record

BEFORE = """
import sys, time
import torch

net = torch.nn.Sequential(
    torch.nn.Linear(376, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 1024), torch.nn.Tanh(),
    torch.nn.Linear(1024, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 17),
)
optimizer = torch.optim.Adam(net.parameters())
for iteration in range(3):
    batch = {"obs": torch.randn(ROWS, 376), "act": torch.randn(ROWS, 17)}
    start = time.perf_counter()
    for _ in range(int(sys.argv[1])):
        optimizer.zero_grad()
        (net(batch["obs"]) - batch["act"]).square().mean().backward()
        optimizer.step()
    seconds = time.perf_counter() - start
print(seconds)
"""
AFTER = (
    BEFORE.replace(
        "import torch\n", "import mpi_util\nif mpi_util.mpi_fork(RANKS) == 'parent': sys.exit()\nimport torch\n"
    )
    .replace("range(3):\n", "range(3):\n    mpi_util.rank0_bcast_wts(net)\n")
    .replace("    start", "    batch = mpi_util.rank0_accum_batches(batch)\n    if mpi_util.rank: continue\n    start")
    .replace("print(", "mpi_util.print0(")
    .replace("seconds)\n", "0 if mpi_util.rank else seconds)\n")
)


def main() -> None:
    """Takes the alternatives in turn and saves what they measured."""
    parser = record.command_line(__doc__, repeats=7, ranks="4", mpi="mpich,openmpi")
    parser.add_argument("--rows", type=int, default=4000, help="of a batch (default: 4000)")
    parser.add_argument("--steps", type=int, default=15, help="steps of an update (default: 15)")
    args = parser.parse_args()
    (n,) = args.ranks
    with tempfile.TemporaryDirectory() as folder:

        def run(program: str, mpi: str, ranks: int = 1) -> float:
            path = Path(folder, "program.py")
            path.write_text(program.replace("RANKS", str(ranks)).replace("ROWS", str(args.rows // ranks)))
            command = [sys.executable, str(path), str(args.steps)]
            done = subprocess.run(command, env=record.mpi_environment(mpi), check=True, stdout=subprocess.PIPE)
            return float(done.stdout)

        ways = {"alone": partial(run, BEFORE, "mpich")}
        ways |= {f"with {n - 1} ranks waiting, {mpi}": partial(run, AFTER, mpi, n) for mpi in args.mpi}
        found = {name: record.spread(seconds) for name, seconds in record.in_turn(ways, args.repeats).items()}
    alone = found["alone"]["median"]
    claims = [
        record.claim(f"rank 0's update in a plain torch program {name} / alone", s["median"] / alone, at_most=1.05)
        for name, s in found.items()
        if name != "alone"
    ]
    record.save(args, {n: {"update_s": s} for n, s in found.items()}, claims, threads=mpi_util.usable_cores())


if __name__ == "__main__":
    main()
