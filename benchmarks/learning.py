"""What train.py learns: PPO, TRPO and VPG on nine environments, over several seeds, against published results.

    nice python -m benchmarks.learning --jobs 2                # all that is missing, the most important first
    python -m benchmarks.learning --only 'PPO-1M/*' --hours 8  # after eight hours no run begins
    python -m benchmarks.learning --list                       # how far each run is
    python -m benchmarks.learning --hours 0                    # no run begins; writes the results of those there are

Ctrl-C or SIGTERM stops the runs, which save; started again, the program resumes them, to bit-identical results, also
after kill -9. It does not repeat runs that are complete, nor those whose curves are among the results: to make such a
run anew, remove its folder and its rows there. benchmarks/learning_tasks.py has tasks and settings,
benchmarks/learning_results.py what is computed. The curves go to learning/ beside the result's file; with the default
--results also to docs/learning.md and to pictures.
"""

import sys
from pathlib import Path

from benchmarks import learning_doc, record
from benchmarks import learning_results as results
from benchmarks.background import Job, locked, run_all, say
from benchmarks.learning_tasks import FIRST_SEED, GROUPS, Task, tasks
from trainer.command_line import parse
from trainer.config import FREE, Config, fields
from trainer.run_folder import checkpoints


def main() -> int:
    """Makes the runs that are missing, and saves the results of all that are complete. Returns the exit status."""
    parser = record.command_line(__doc__, repeats=5)
    parser.add_argument("--only", type=record.words, default=["*"], help="tasks, such as PPO-1M/*,VPG-3M/Ant-v4")
    parser.add_argument(
        "--seeds", type=record.numbers, help=f"instead of --repeats: of these seeds (the table: {FIRST_SEED} and on)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (default: 1)")
    parser.add_argument("--hours", type=float, help="after so many hours no run begins (default: no limit)")
    parser.add_argument("--steps", type=int, help="of each run, to try this program (default: the task's own)")
    parser.add_argument("--runs", type=Path, help="folder of the runs (default: runs/ in that of the result's file)")
    parser.add_argument("--list", action="store_true", help="print how far each run is, and end")
    args = parser.parse_args()
    chosen = tasks(args.only, args.steps)
    if not chosen:
        parser.error(f"--only {','.join(args.only)} names no task; tasks: {', '.join(t.name for t in tasks())}")
    if args.results.resolve() == record.RESULTS:
        if other := [seed for seed in args.seeds or [] if seed < FIRST_SEED]:
            parser.error(
                f"--seeds {other[0]} is not one of the table, which begin at {FIRST_SEED}; give another --results"
            )
        if args.steps:
            parser.error("--steps makes other runs than the table's; give another --results")
    args.runs = args.runs or args.results / "runs"
    runs = in_order(chosen, args)
    if args.list:
        for task, seed in runs:
            print(f"{task.name}, seed {seed}: {steps_of(args.runs, task, seed):,} of {task.steps:,} steps")
        return 0
    with locked(args.runs) as lock:
        for run in runs:
            refuse_other_settings(*run, folder_of(args.runs, *run))
        missing = [run for run in runs if not (is_complete(args.runs, *run) or is_saved(args.results, *run))]
        say(f"{len(runs) - len(missing)} of {len(runs)} runs are complete")
        jobs = [job(*run, args) for run in missing]
        outcome = run_all(jobs, args.jobs, args.hours, lock)
    save(args, chosen, [run for run in runs if is_complete(args.runs, *run)])
    if outcome.failed:
        say(f"failed: {', '.join(outcome.failed)}; start this program again to continue them")
    return 128 + outcome.stopped if outcome.stopped else int(bool(outcome.failed))


def in_order(chosen: list[Task], args) -> list[tuple[Task, int]]:
    """(task, seed) of each run, by importance: seed by seed, so that all tasks of one rank have as many at any time."""
    places = {}
    for k, task in enumerate(chosen):
        for i, seed in enumerate(args.seeds or task.seeds[: args.repeats]):
            places[GROUPS[task.group].rank, i, k] = (task, seed)
    return [places[place] for place in sorted(places)]


def folder_of(runs: Path, task: Task, seed: int) -> Path:
    """Of a run."""
    return runs / task.name / f"seed{seed}"


def steps_of(runs: Path, task: Task, seed: int) -> int:
    """Steps that a run has made so far."""
    return int((record.progress(folder_of(runs, task, seed)) or [{"TotalEnvInteracts": 0}])[-1]["TotalEnvInteracts"])


def is_complete(runs: Path, task: Task, seed: int) -> bool:
    """Whether a run has been made to its end."""
    return results.is_complete(folder_of(runs, task, seed), task.steps)


def curves_path(folder: Path, task: Task) -> Path:
    """The file of a task's curves. Args: folder: of the results."""
    return folder / "learning" / f"{task.name.replace('/', '-')}.csv"


def is_saved(folder: Path, task: Task, seed: int) -> bool:
    """Whether the results hold the run's curves, so that it is not repeated where the folder of the runs is gone."""
    return seed in results.read(curves_path(folder, task), task.command)


def refuse_other_settings(task: Task, seed: int, folder: Path) -> None:
    """Ends the program if the folder holds a run that is not this one."""
    if not checkpoints(folder):
        return
    made, wanted = parse(["--resume", str(folder)]).effective, parse(task.arguments(seed)).effective
    free = {option.name for option in fields(Config) if option.metadata.get("group") == FREE} - {"total_steps"}
    follow = {name for name in wanted if wanted[name] is None}  # lam: the environment decides it
    other = [name for name in wanted if made[name] != wanted[name] and name not in free | follow | {"run_dir"}]
    if other:
        what = f"--{other[0]} {made[other[0]]}, not {wanted[other[0]]}"
        sys.exit(f"{folder} holds a run with {what}; remove it, or give another --runs")


def job(task: Task, seed: int, args) -> Job:
    """A run, to begin or to continue."""
    folder = folder_of(args.runs, task, seed).resolve()

    def command() -> list[str]:
        how = ["--resume", str(folder)] if checkpoints(folder) else [*task.arguments(seed), "--run_dir", str(folder)]
        return [sys.executable, str(record.ROOT / "train.py"), *how]

    return Job(f"{task.name}, seed {seed}", folder, command, environment=record.mpi_environment(args.mpi[0]))


def save(args, chosen: list[Task], complete: list[tuple[Task, int]]) -> None:
    """Adds these runs to the curves beside the result's file, and writes what all curves there come to."""
    known = chosen if args.steps else tasks()
    found, curves_of = {}, {}
    for task in known:
        path = curves_path(args.results, task)
        curves = results.read(path, task.command)
        if new := [seed for of, seed in complete if of == task]:
            rows = {seed: record.progress(folder_of(args.runs, task, seed)) for seed in new}
            results.write(path, task.command, curves | {seed: results.curves_of(rows[seed], seed) for seed in new})
            curves = results.read(path, task.command)
        curves_of[task.name] = curves
        found[task.name] = results.describe(task, curves)
    groups = {key: group for key in GROUPS if (group := results.describe_group(found, key))}
    not_run = {task.name: sorted(set(task.seeds) - set(found[task.name]["seeds"])) for task in known}
    record.save(
        args, found, claims_of(found), groups=groups, not_run={name: seeds for name, seeds in not_run.items() if seeds},
        unit="undiscounted return of an episode",
        note="hours are those of each run, its evaluations included, with --jobs at once and beside other work",
    )  # fmt: skip
    learning_doc.pictures(args.results / "learning", known, curves_of)
    if args.results.resolve() == record.RESULTS:
        learning_doc.write_documents()


def claims_of(found: dict) -> list[dict]:
    """Each task's mean curve against the best published figure; the last tenth where its group has a target for it."""
    claims = []
    for name, sample in found.items():
        if not sample["seeds"]:
            continue
        n = f"{len(sample['seeds'])} seed{'s' * (len(sample['seeds']) > 1)}"
        if sample["published"]:
            text = f"{name}: highest point of the mean curve of {n}, evaluations"
            claims.append(record.claim(text, sample["evaluation"]["peak"], at_least=sample["published"][0][0]))
        group, _, env = name.partition("/")
        for target, kind in zip(GROUPS[group].last.get(env, ()), ("mean", "min")):
            text = f"{name}: training returns in the last tenth, {kind} of {n}"
            claims.append(record.claim(text, sample["training"]["last"][kind], at_least=target))
    return claims


if __name__ == "__main__":
    sys.exit(main())
