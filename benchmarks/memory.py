"""Memory of each rank while train.py trains on Humanoid-v4 with 4 ranks, and whether torch is mapped in a worker.

    python -m benchmarks.memory

PSS (proportional set size): private pages, and of shared ones each process's share. The shared batch is
counted in the same way.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks import record
from benchmarks.rollout import ENV

RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")


def main() -> None:
    """Trains, measures each rank every second, and saves the figures."""
    parser = record.command_line(__doc__, repeats=20, ranks="4")
    args = parser.parse_args()
    mpi, n = args.mpi[0], args.ranks[0]
    with tempfile.TemporaryDirectory() as folder:
        run_folder = Path(folder) / "run"
        command = [sys.executable, "train.py", ENV, "--nprocs", str(n), "--run_dir", str(run_folder)]
        with open(os.devnull, "w") as devnull:
            job = subprocess.Popen(command, cwd=record.ROOT, env=record.mpi_environment(mpi), stdout=devnull)
        try:
            while len(record.progress(run_folder)) < 2:
                if job.poll() is not None:
                    sys.exit(f"train.py ended with status {job.returncode}")
                time.sleep(0.1)
            pss, torch_in = watch(job.pid, args.repeats)
        finally:
            job.terminate()
            job.wait()
    samples = {f"rank {rank}": {"pss_mb": record.spread(values)} for rank, values in sorted(pss.items())}
    worst = max(max(values) for rank, values in pss.items() if rank > 0)
    workers_with_torch = sorted(rank for rank in torch_in if rank > 0)
    claims = [record.claim(f"memory of a worker on {ENV}, {n} ranks: largest PSS, MB", worst, at_most=80)]
    claims.append(record.claim(f"workers on {ENV} with torch in memory", len(workers_with_torch), at_most=0))
    record.save(args, samples, claims, unit="MB of 1,000,000 bytes", torch_mapped_in_ranks=sorted(torch_in))


def watch(launcher_pid: int, repeats: int) -> tuple[dict[int, list[float]], set[int]]:
    """PSS in MB of each rank, once a second, and the ranks with a library of torch in their memory map."""
    ranks = ranks_of(launcher_pid)
    pss: dict[int, list[float]] = {rank: [] for rank in ranks}
    torch_in = set()
    for _ in range(repeats):
        for rank, process in ranks.items():
            pss[rank].append(process.memory_full_info().pss / 1e6)
            if any("/torch/" in part.path for part in process.memory_maps()):
                torch_in.add(rank)
        time.sleep(1.0)
    return pss, torch_in


def ranks_of(launcher_pid: int) -> dict[int, psutil.Process]:
    """The ranks' processes, by rank."""
    found = {}
    for process in psutil.Process(launcher_pid).children(recursive=True):  # parents come first
        environment = process.environ()
        for variable in RANK_VARIABLES:
            if variable in environment:
                found.setdefault(int(environment[variable]), process)  # not what a rank starts itself
    return found


if __name__ == "__main__":
    main()
