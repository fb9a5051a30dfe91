"""The programs of examples/ on 1 rank against 2, and against 10 on an environment that sleeps 5 ms a step.

    python -m benchmarks.examples
    python -m benchmarks.examples --only same_bits,cross_entropy
    python -m benchmarks.examples --table            # the rows of the table in examples/README.md, from the results

Seconds per whole iteration (weights, rollout, gather, update), the first one left out: from the arrival of the
first line "iteration ..." to that of the last. The programs do bit-identical work on any number of ranks.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from typing import Any, NamedTuple

from benchmarks import record

ENV, SLEEPING = "HalfCheetah-v5", "benchmarks.sleeping_env:Sleeping-v0"
PAIRS = {2: ENV, 10: SLEEPING}  # ranks -> environment
TARGETS = {2: 1.5, 10: 8.0}
EXAMPLES = record.ROOT / "examples"


class Program(NamedTuple):
    """What is measured of a program, and what its row in the table says.

    Attributes:
        work: options that make an iteration of some seconds on HalfCheetah-v5 (episodes of 1000 steps).
        asleep: options that make one of 1000 steps, 5 s of sleep on 1 rank, on the sleeping environment.
        iterations: the option that sets their number.
    """

    teaches: str
    bits: str
    work: str
    asleep: str
    iterations: str = "--iterations"


PROGRAMS = {
    "same_bits": Program(
        "what `collect` does, call by call: `deal`, `stream`, `index=`",
        "yes",
        "--episodes 16",
        "--episodes 50",
    ),
    "gather_ppo_torch": Program(
        "PPO in one file; `collect`; stop and totals over all ranks; a normalizer",
        "yes",
        "--episodes 8 --minibatch_size 500",
        "--episodes 50 --minibatch_size 500 --epochs 2",
        "--total_steps",
    ),
    "gather_ppo_jax": Program(
        "the same in JAX: Flax's nnx and optax; only rank 0 opens a GPU",
        "yes",
        "--episodes 8 --minibatch_size 500",
        "--episodes 50 --minibatch_size 500 --epochs 2",
    ),
    "cross_entropy": Program(
        "NumPy alone; `collect`; only seeds and returns are sent, rank 0 draws the weights again",
        "yes",
        "--candidates 16 --elite 4 --episodes 1",
        "--candidates 50 --episodes 1",
    ),
    "keras_reinforce": Program(
        "Keras 3 on TensorFlow; `collect` brings trajectories as Python objects",
        "yes",
        "--episodes 16",
        "--episodes 50",
    ),
    "vector_envs": Program(
        "environments that continue: a generator for `collect`; normalizing wrappers: `merge_moments`",
        "yes",
        "--num_envs 8 --num_steps 1000",
        "--num_envs 20 --num_steps 50",
    ),
    "gpu_on_rank0": Program(
        "`collect`, and the update on rank 0's GPU, which no other process opens",
        "yes",
        "--episodes 8",
        "--episodes 50",
    ),
}
STEPS = {ENV: 8 * 1000, SLEEPING: 50 * 20}  # of gather_ppo_torch, in an iteration


def main() -> None:
    """Takes the numbers of ranks in turn and saves what they measured, or prints the table's rows."""
    parser = record.command_line(__doc__, repeats=3)
    parser.add_argument("--only", type=record.words, default=list(PROGRAMS), help="programs (default: all)")
    parser.add_argument("--iterations", type=int, default=3, help="of a run, the first not counted (default: 3)")
    parser.add_argument("--options", default="", help="more of the programs' options, such as '--episodes 4'")
    parser.add_argument("--table", action="store_true", help="measure nothing, print the table's rows")
    args = parser.parse_args()
    if args.table:
        return print_table(args)
    found, claims = {}, []
    for name in args.only:
        for ranks, env in PAIRS.items():
            alternatives = {f"{n} ranks": partial(seconds, args, name, n, env) for n in (1, ranks)}
            samples = record.in_turn(alternatives, args.repeats)
            of_env = {alternative: record.spread(values) for alternative, values in samples.items()}
            found[name] = found.get(name, {}) | {env: of_env}
            speed_up = of_env["1 ranks"]["median"] / of_env[f"{ranks} ranks"]["median"]
            text = f"examples/{name}.py on {env}: speed-up on {ranks} ranks"
            claims.append(record.claim(text, speed_up, at_least=TARGETS[ranks]))
    part = "" if args.only == list(PROGRAMS) else f"_{'_'.join(args.only)}"
    settings = {name: PROGRAMS[name][2:] for name in args.only}
    record.save(args, found, claims, part, unit="seconds an iteration", settings=settings)


def seconds(args: argparse.Namespace, name: str, n: int, env: str) -> float:
    """Runs a program once on `n` ranks and returns the seconds of an iteration."""
    program = PROGRAMS[name]
    options = (program.work if env == ENV else program.asleep).split()
    limit = args.iterations * STEPS[env] if program.iterations == "--total_steps" else args.iterations
    options += [program.iterations, limit, *args.options.split()]
    command = [sys.executable, EXAMPLES / f"{name}.py", "--env", env, "--nprocs", n, *options]
    process = subprocess.Popen(
        [str(word) for word in command],
        cwd=record.ROOT,
        env=record.mpi_environment(args.mpi[0]) | {"PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        times = [time.perf_counter() for line in process.stdout if line.startswith("iteration")]
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)  # the launching process ends its ranks
        raise
    if process.wait() or len(times) < 2:
        sys.exit(f"{' '.join(map(str, command))}: status {process.returncode}, {len(times)} iterations")
    return (times[-1] - times[0]) / (len(times) - 1)


def print_table(args: argparse.Namespace) -> None:
    """The rows of examples/README.md, with the figures of the results."""
    samples: dict[str, Any] = {}
    for path in sorted(args.results.glob("examples*.json")):  # of parts, which were run on another day
        samples |= json.loads(path.read_text())["samples"]
    print("| program | what it teaches | command | lines | bit-identical | speed-up on 2 | on 10, asleep |")
    print("|---|---|---|---|---|---|---|")
    for name, program in PROGRAMS.items():
        lines = sum("  # +" in line for line in (EXAMPLES / f"{name}.py").read_text().splitlines())
        figures = [speed_up(samples.get(name, {}).get(env), ranks) for ranks, env in PAIRS.items()]
        command = f"`python examples/{name}.py --nprocs 2`"
        print(
            "|",
            " | ".join([f"[`{name}.py`]({name}.py)", program.teaches, command, str(lines), program.bits, *figures]),
            "|",
        )


def speed_up(of_env: dict | None, ranks: int) -> str:
    """Time on 1 rank / time on `ranks`, medians."""
    return f"{of_env['1 ranks']['median'] / of_env[f'{ranks} ranks']['median']:.2f} x" if of_env else "-"


if __name__ == "__main__":
    main()
