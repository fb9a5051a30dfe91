"""Collecting with 10 ranks against 1 where each environment step sleeps 5 ms.

    python -m benchmarks.sleeping

train.py on benchmarks.sleeping_env; steps per second from the start of an iteration's rollout until rank 0 has all
ranks' batches, the first iteration left out.
"""

from functools import partial

from benchmarks import record

ENV = "benchmarks.sleeping_env:Sleeping-v0"
EPISODE_STEPS = 20
ITERATIONS = 3
RANKS = 10


def main() -> None:
    """Takes the two rank counts in turn and saves what they measured."""
    parser = record.command_line(__doc__, repeats=5)
    parser.add_argument("--episodes", type=int, default=100, help="per iteration, all ranks together (default: 100)")
    args = parser.parse_args()
    mpi = args.mpi[0]

    def rate(n: int) -> float:
        limits = ("-b", args.episodes, "-n", args.episodes * ITERATIONS)
        rows = record.train(mpi, ENV, "--nprocs", n, *limits)[1:]
        return len(rows) * args.episodes * EPISODE_STEPS / sum(row["RolloutS"] + row["GatherS"] for row in rows)

    rates = record.in_turn({f"{n} ranks": partial(rate, n) for n in (1, RANKS)}, args.repeats)
    found = {name: record.spread(of_name) for name, of_name in rates.items()}
    ratio = found[f"{RANKS} ranks"]["median"] / found["1 ranks"]["median"]
    text = "10 ranks on an environment that sleeps 5 ms a step: rollout rate / 1 rank"
    claims = [record.claim(text, ratio, at_least=9.5)]
    record.save(args, found, claims, unit="environment steps per second")


if __name__ == "__main__":
    main()
