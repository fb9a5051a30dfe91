"""What --overlap gains where environments wait: 10 ranks, an update about as long as the rollout.

    python -m benchmarks.overlap

train.py on benchmarks.sleeping_env (5 ms a step), 18 environments in segments of 100 steps: as 9 ranks collect while
rank 0 updates, and 10 ranks without --overlap need the same 200 steps of the busiest one, the rollout takes the same
time either way. Seconds of a whole iteration, the first two left out.
"""

import statistics
from functools import partial

from benchmarks import record

ENV = "benchmarks.sleeping_env:Sleeping-v0"
WORK = "--minibatches 28 --kl_targ 0"
WARM_UP = 2


def main() -> None:
    """Takes both in turn, and saves what they measured."""
    parser = record.command_line(__doc__, repeats=5, ranks="10")
    parser.add_argument("--epochs", type=int, default=120, help="of both learners (default: 120)")
    parser.add_argument("--iterations", type=int, default=10, help="of each run (default: 10)")
    parser.add_argument("--segment", type=int, default=100, help="steps of an environment (default: 100)")
    args = parser.parse_args()
    (n,), n_envs = args.ranks, 2 * (args.ranks[0] - 1)
    batch = n_envs * args.segment
    work = ("--nprocs", n, "--batch_steps", batch, "--num_envs", n_envs, *WORK.split())
    limit = ("--total_steps", batch * args.iterations)

    def seconds(*option: str) -> dict[str, float]:
        epochs = ("--epochs", args.epochs, "--vf_epochs", args.epochs)
        rows = record.train(args.mpi[0], ENV, *work, *limit, *epochs, *option)[WARM_UP:-1]
        time = [row["Time"] for row in rows]
        found = {name: statistics.mean(row[name] for row in rows) for name in ("RolloutS", "UpdateS")}
        return found | {"iteration": (time[-1] - time[0]) / (len(time) - 1)}

    measured = record.in_turn({"lock-step": seconds, "--overlap": partial(seconds, "--overlap")}, args.repeats)
    names = {"rollout": "RolloutS", "update": "UpdateS", "iteration": "iteration"}
    found = {
        f"{mode}: {name}": record.spread([each[column] for each in runs])
        for mode, runs in measured.items()
        for name, column in names.items()
    }
    longer = max(found["lock-step: rollout"]["median"], found["lock-step: update"]["median"])
    claims = [
        record.claim(
            f"sleeping environment, {n} ranks, --overlap: iteration / the longer of rollout and update",
            found["--overlap: iteration"]["median"] / longer,
            at_most=1.1,
        )
    ]
    record.save(args, found, claims, unit="seconds")


if __name__ == "__main__":
    main()
