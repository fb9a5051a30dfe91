"""The wall-clock time of benchmarks.learning's PPO runs against Stable-Baselines3's PPO, the same work, in turn.

    python -m benchmarks.learning_time --sb3_python ../sb3/bin/python

Both sides: the same steps, epochs and rows of a minibatch, 2x64 tanh networks, observations scaled by running moments,
no evaluation. Each run makes --iterations of them; the rate over whole iterations, the first two left out, gives the
time of all steps. SB3 takes its environments in its own process, one (its default) or as many as train.py has, with 1
and with 2 torch threads; train.py is compared with the best of these.
"""

from functools import partial
from pathlib import Path

from benchmarks import record
from benchmarks.end_to_end import run_other
from benchmarks.learning_tasks import Task, tasks
from trainer.command_line import parse

TASKS = {task.name: task for task in tasks(["PPO-1M/*"])}
DEFAULT = [f"PPO-1M/{env}-v4" for env in ("Hopper", "Walker2d", "HalfCheetah", "InvertedDoublePendulum")]


def main() -> None:
    """Takes train.py and SB3 at each setting in turn, task by task, and saves what they measured."""
    parser = record.command_line(__doc__, repeats=3, ranks="1,2")
    parser.add_argument("--sb3_python", type=Path, help="interpreter that has stable-baselines3; none: train.py alone")
    parser.add_argument("--threads", type=record.numbers, default=[1, 2], help="torch threads of SB3 (default: 1,2)")
    parser.add_argument("--iterations", type=int, default=20, help="of each run (default: 20)")
    parser.add_argument("--only", type=record.words, default=DEFAULT, help=f"tasks, of: {', '.join(TASKS)}")
    args = parser.parse_args()
    sb3_versions: dict[str, str] = {}
    found, claims = {}, []
    for name in args.only:
        task = TASKS[name]
        alternatives = {f"train.py, {n} ranks": partial(ours, task, n, args) for n in args.ranks}
        if args.sb3_python:
            for envs in (1, parse(task.arguments(0)).num_envs):
                for threads in args.threads:
                    label = f"SB3, {envs} environment{'s' * (envs > 1)}, {threads} torch thread{'s' * (threads > 1)}"
                    alternatives[label] = partial(sb3, task, envs, threads, args, sb3_versions)
        rates = record.in_turn(alternatives, args.repeats)
        found[name] = {key: record.spread([task.steps / rate for rate in values]) for key, values in rates.items()}
        median = {key: times["median"] for key, times in found[name].items()}
        if args.sb3_python:
            best = min((key for key in median if key.startswith("SB3")), key=median.get)
            mine = min((key for key in median if not key.startswith("SB3")), key=median.get)
            text = f"{name}, {task.steps:,} steps: time of SB3's best ({best[5:]}) / {mine}"
            claims.append(record.claim(text, median[best] / median[mine], at_least=2.0))
    record.save(args, found, claims, unit="seconds for all steps, without evaluation", sb3_versions=sb3_versions)


def ours(task: Task, n: int, args) -> float:
    """Steps per second of train.py with n ranks."""
    steps = args.iterations * parse(task.arguments(0)).batch_steps
    arguments = f"{task.env} {task.settings} --nprocs {n} --total_steps {steps}".split()
    return record.steps_per_s(record.train(args.mpi[0], *arguments))


def sb3(task: Task, envs: int, threads: int, args, versions: dict[str, str]) -> float:
    """Steps per second of SB3; notes its versions."""
    config = parse(task.arguments(0))
    rows = config.batch_steps // config.minibatches
    settings = {"env": task.env, "steps": config.batch_steps, "rows": rows, "envs": envs, "threads": threads}
    measured = run_other(args.sb3_python, "sb3_ppo", settings | {"iterations": args.iterations})
    versions.update(measured["versions"])
    return measured["steps_per_s"]


if __name__ == "__main__":
    main()
