"""Collecting with 10 and 64 ranks against 1 where each environment step sleeps 5 ms.

    python -m benchmarks.sleeping

train.py on benchmarks.sleeping_env; steps per second from the start of an iteration's rollout until rank 0 has all
ranks' batches, the first iteration left out. An iteration has as many episodes for each rank.
"""

from functools import partial

from benchmarks import record

ENV = "benchmarks.sleeping_env:Sleeping-v0"
EPISODE_STEPS = 20
ITERATIONS = 3
REACHED = {10: 9.5, 64: 60.0}  # at least, times the rate of one rank


def main() -> None:
    """Takes the rank counts in turn and saves what they measured."""
    parser = record.command_line(__doc__, repeats=5, ranks="1,10,64")
    parser.add_argument("--episodes", type=int, default=20, help="per iteration and rank (default: 20)")
    args = parser.parse_args()
    mpi = args.mpi[0]

    def rate(n: int) -> float:
        limits = ("-b", args.episodes * n, "-n", args.episodes * n * ITERATIONS)
        rows = record.train(mpi, ENV, "--nprocs", n, *limits)[1:]
        return len(rows) * args.episodes * n * EPISODE_STEPS / sum(row["RolloutS"] + row["GatherS"] for row in rows)

    rates = record.in_turn({f"{n} ranks": partial(rate, n) for n in args.ranks}, args.repeats)
    found = {name: record.spread(of_name) for name, of_name in rates.items()}
    alone = found[f"{args.ranks[0]} ranks"]["median"]
    text = "{} ranks on an environment that sleeps 5 ms a step: rollout rate / {} rank"
    claims = [
        record.claim(
            text.format(n, args.ranks[0]), found[f"{n} ranks"]["median"] / alone, at_least=REACHED.get(n, 0.9 * n)
        )
        for n in args.ranks[1:]
    ]
    record.save(args, found, claims, unit="environment steps per second")


if __name__ == "__main__":
    main()
