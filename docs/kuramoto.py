"""Makes the picture of docs/simulators.md: what train.py learns on a flow that several ranks step together.

python train.py examples.kuramoto:make --nprocs 2 --ranks_per_env 1 --total_steps 200000 --name kuramoto
python docs/kuramoto.py runs/examples.kuramoto-make/kuramoto-s0 docs/kuramoto.png
"""

import argparse
import csv
from pathlib import Path

import matplotlib
import numpy as np
from mpi4py import MPI

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from examples.kuramoto import ACTUATORS, STEPS, Kuramoto


def uncontrolled(episodes: int = 20) -> float:
    """The mean reward of a step if nothing is done."""
    env, rewards = Kuramoto(MPI.COMM_SELF), []
    for seed in range(episodes):
        env.reset(seed=seed)
        rewards += [env.step(np.zeros(ACTUATORS))[1] for _ in range(STEPS)]
    return float(np.mean(rewards))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("out", type=Path, help="file, .png")
    args = parser.parse_args()
    rows = list(csv.DictReader((args.run / "progress.txt").read_text().splitlines(), delimiter="\t"))
    found = [(float(row["TotalEnvInteracts"]), float(row["AverageEpRet"]) / STEPS) for row in rows]
    steps, rewards = np.array([each for each in found if np.isfinite(each[1])]).T
    nothing = uncontrolled()
    _, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    axes.plot(steps / 1e3, 1 - rewards)
    axes.axhline(1 - nothing, linestyle=":", color="grey")
    axes.annotate("no control", (steps[-1] / 1e3, 1 - nothing), ha="right", va="bottom")
    axes.set(xlabel="thousand steps", ylabel="mean(u²) + 0.1 mean(a²)", ylim=(0, None))
    plt.savefig(args.out, dpi=100)
    print(
        f"cost of a step without control {1 - nothing:.2f}, at first {1 - rewards[0]:.2f}, last {1 - rewards[-1]:.2f}"
    )


if __name__ == "__main__":
    main()
