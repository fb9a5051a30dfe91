"""train.py with Patrick Coady's algorithm, from the start of training, compared with bare stepping by 2 processes.

    python -m benchmarks.coady

Steps per second over whole iterations of 20 episodes (some 450 steps each), the first two left out. The targets are
those of a machine that steps a bare Humanoid-v4 at 8900 steps/s in 2 processes, scaled to this one.
"""

import argparse
from functools import partial

import mpi_util
from benchmarks import record
from benchmarks.rollout import ENV, Bare, Rollout

TARGETS = {2: 3700, 10: 3200}  # steps/s, where bare stepping does
BARE = 8900
BARE_RANKS = 2
BATCH_SIZE = 20
NETS = ("--policy_hid_list", "64,64,64", "--valfunc_hid_list", "64,64,64")


def main() -> None:
    """Takes bare stepping and each rank count in turn, and saves what they measured."""
    parser = record.command_line(__doc__, repeats=7, ranks="1,2,10")
    parser.add_argument("--iterations", type=int, default=30, help="of each run of train.py (default: 30)")
    parser.add_argument("--episodes", type=int, default=800, help="of each sample of bare stepping (default: 800)")
    args = parser.parse_args()
    if args.part:
        return bare_part(args)

    def train(mpi: str, n: int) -> float:
        limits = ("-b", BATCH_SIZE, "-n", BATCH_SIZE * args.iterations)
        return record.steps_per_s(record.train(mpi, ENV, "--algo", "ppo-kl", "--nprocs", n, *limits, *NETS))

    mpi = args.mpi[0]
    alternatives = {"bare": partial(record.run_part, "benchmarks.coady", mpi, "--episodes", args.episodes)}
    alternatives |= {f"{n} ranks": partial(train, mpi, n) for n in args.ranks}
    found = {name: record.spread(rates) for name, rates in record.in_turn(alternatives, args.repeats).items()}
    scale = found["bare"]["median"] / BARE
    claims = [
        record.claim(f"ppo-kl on {ENV}, {n} ranks: steps/s", found[f"{n} ranks"]["median"], at_least=TARGETS[n] * scale)
        for n in args.ranks
        if n in TARGETS
    ]
    record.save(args, found, claims, unit="environment steps per second", target_scale=scale)


def bare_part(args: argparse.Namespace) -> None:
    """Measures bare stepping once."""
    if mpi_util.mpi_fork(BARE_RANKS) == "parent":
        return
    bare = Bare(Rollout(args.episodes))
    bare.sample()
    rate = bare.sample()["steps_per_s"]
    if mpi_util.rank == 0:
        record.write_part(args.part, rate)


if __name__ == "__main__":
    main()
