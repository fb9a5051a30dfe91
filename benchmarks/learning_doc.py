"""Writes what benchmarks.learning has measured into docs/learning.md and README.md, and draws its curves.

python -m benchmarks.learning_doc            # the documents, from results/learning.json
python -m benchmarks.learning_doc --check    # status 1 if a document is not what the results say
"""

import argparse
import io
import json
import sys
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record
from benchmarks.learning_tasks import FIRST_SEED, GROUPS, Task

DOCUMENT, README = record.ROOT / "docs" / "learning.md", record.ROOT / "README.md"
BEGIN, END = "<!-- results: made by benchmarks/learning_doc.py -->\n", "<!-- end of results -->"
ON_THE_FRONT_PAGE = [
    "PPO-default-1M/Humanoid-v4",
    "PPO-default-1M/HalfCheetah-v4",
    "PPO-default-1M/Hopper-v4",
    "PPO-default-1M/Walker2d-v4",
]
COLOURS = 32  # of a picture; its file is then a third as large


def main() -> int:
    """Writes the documents, or checks them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether they are up to date")
    args = parser.parse_args()
    if args.check:
        return int(any(new != path.read_text() for path, new in documents().items()))
    write_documents()
    return 0


def write_documents() -> None:
    """Replaces what stands between the markers."""
    for path, text in documents().items():
        path.write_text(text)


def documents(results: Path = record.RESULTS) -> dict[Path, str]:
    """The text that each document should have."""
    found = json.loads((results / "learning.json").read_text())
    path = results / "time_to_return.json"
    timed = json.loads(path.read_text()) if path.exists() else None
    made = {DOCUMENT: tables(found) + times(timed), README: front(found)}
    return {path: _between(path.read_text(), text) for path, text in made.items()}


def _between(text: str, new: str) -> str:
    before, rest = text.split(BEGIN)
    return before + BEGIN + new + END + rest.split(END)[1]


def number(value: float) -> str:
    """A return: whole from 100 on, else with one digit after the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}"


def spread(last: dict[str, float]) -> str:
    """mean (lowest to highest seed)"""
    return f"{number(last['mean'])} ({number(last['min'])} to {number(last['max'])})"


def with_interval(sample: dict[str, Any], digits: int | None = None) -> str:
    """iqm [low, high]"""
    show = number if digits is None else lambda value: f"{value:.{digits}f}"
    bounds = sample["interval"]
    return show(sample["iqm"]) + (f" [{show(bounds[0])}, {show(bounds[1])}]" if bounds else "")


def tables(found: dict[str, Any]) -> str:
    """Markdown: a section for each group, then what was not run."""
    sections = [section(key, found) for key in GROUPS]
    hours = sum(sum(sample["hours_by_seed"]) for sample in found["samples"].values())
    runs = sum(len(sample["seeds"]) for sample in found["samples"].values())
    machine = found["machine"]
    intro = f"{runs} runs, {hours:.1f} hours, on {machine['cores']} cores.\n\n" if runs else ""
    rest = "### Not run\n\n" + ("".join(map(partial(missing, found), GROUPS)) or "Nothing: all runs are complete.\n")
    return f"\n{intro}{''.join(sections)}{rest}"


def missing(found: dict[str, Any], key: str) -> str:
    """A line with the runs of a group that are not complete, or none."""
    lacking = {env: found["not_run"].get(f"{key}/{env}", []) for env in GROUPS[key].published}
    if all(len(seeds) == GROUPS[key].seeds for seeds in lacking.values()):
        return f"- `{key}`: no run is complete\n"
    parts = [
        env + f" (seeds {', '.join(map(str, seeds))})" * (len(seeds) < GROUPS[key].seeds)
        for env, seeds in lacking.items()
        if seeds
    ]
    return f"- `{key}`: {', '.join(parts)}\n" if parts else ""


def section(key: str, found: dict[str, Any]) -> str:
    """Settings, table, seeds and picture of a group; "": no run is complete."""
    group = GROUPS[key]
    ran = {env: sample for env in group.published if (sample := found["samples"][f"{key}/{env}"])["seeds"]}
    if not ran:
        return ""
    task = Task(key, "ENV" if len(group.published) > 1 else next(iter(group.published)), group.steps)
    text = (
        f"### {group.title}\n\n`{key}`, seeds {FIRST_SEED} to {FIRST_SEED + group.seeds - 1}:\n\n"
        f"    python {task.command} --seed {FIRST_SEED}\n\n"
    )
    for name, (options, why) in group.added.items():
        text += f"{name} has `{options}` too: {why}.\n\n"
    text += (
        "| | published | reached | sampled actions | last tenth: mean (seeds) | IQM [95 %] | seeds | hours |\n"
        "|---|---|---|---|---|---|---|---|\n"
    )
    for env, sample in ran.items():
        figures = "; ".join(f"{figure:g} ({who})" for figure, who in sample["published"]) or "none"
        peak = number(sample["evaluation"]["peak"])
        missed = sample["published"] and sample["evaluation"]["peak"] < sample["published"][0][0]
        cells = [
            env, figures, f"**{peak}**" if missed else peak, number(sample["training"]["peak"]),
            spread(sample["evaluation"]["last"]), with_interval(sample["evaluation"]),
            str(len(sample["seeds"])), f"{sum(sample['hours_by_seed']):.1f}",
        ]  # fmt: skip
        text += f"| {' | '.join(cells)} |\n"
    if over_tasks := found["groups"].get(key):
        text += (
            f"\nOver {over_tasks['tasks']} tasks, 0 for random actions and 1 for the published figure: interquartile "
            f"mean of the last tenth {with_interval(over_tasks['evaluation'], 2)}, with sampled actions "
            f"{with_interval(over_tasks['training'], 2)}.\n"
        )
    text += "\n| last tenth, by seed | deterministic actions | sampled actions |\n|---|---|---|\n"
    for env, sample in ran.items():
        kinds = (", ".join(map(number, sample[kind]["last_by_seed"])) for kind in ("evaluation", "training"))
        text += f"| {env}, seeds {', '.join(map(str, sample['seeds']))} | {' | '.join(kinds)} |\n"
    for env in group.last.keys() & ran.keys():
        (mean, least), last = group.last[env], ran[env]["training"]["last"]
        outcome = "Met" if last["mean"] >= mean and last["min"] >= least else "Missed"
        text += (
            f"\nTarget for {env}'s training returns in the last tenth: a mean of {mean} and no seed below {least}. "
            f"{outcome}: {spread(last)}.\n"
        )
    return f"{text}\n![{group.title}](../benchmarks/results/learning/{key}.png)\n\n"


def times(timed: dict[str, Any] | None) -> str:
    """Markdown: how long each program took to each return. timed: of time_to_return.json; None: it was not run."""
    text = "\n### Time to a return on Humanoid-v4\n\n"
    if timed is None:
        return text + "Not run.\n\n"
    targets = list(dict.fromkeys(key for sample in timed["samples"].values() for key in sample if key != "runs"))
    text += f"On {timed['machine']['cores']} cores of {timed['machine']['cpu']}: `{timed['command']}`\n\n"
    text += f"| | runs | {' | '.join(targets)} |\n|---|---|{'---|' * len(targets)}\n"
    for name, sample in timed["samples"].items():
        cells = [_time(sample[target], sample["runs"]) if sample["runs"] else "not run" for target in targets]
        text += f"| {name} | {sample['runs']} | {' | '.join(cells)} |\n"
    return text + "\n"


def _time(times: dict[str, Any], runs: int) -> str:
    """Minutes: median (shortest to longest), and how many runs reached it, where not all did."""
    if not times["reached by"]:
        return "not reached"
    low, median, high = (times[key] / 60 for key in ("min", "median", "max"))
    some = f", {times['reached by']} of {runs} runs" * (times["reached by"] < runs)
    return f"{median:.1f} min ({low:.1f} to {high:.1f}{some})"


def is_complete(name: str, seeds: Collection[int]) -> bool:
    """Whether a task has all its seeds."""
    return len(seeds) >= GROUPS[name.partition("/")[0]].seeds


def front(found: dict[str, Any]) -> str:
    """The README's table, of those of its tasks whose runs are all complete."""
    rows = []
    for name in ON_THE_FRONT_PAGE:
        sample = found["samples"][name]
        if is_complete(name, sample["seeds"]):
            peaks = [number(sample[kind]["peak"]) for kind in ("evaluation", "training")]
            rows.append(f"| {name.partition('/')[2]} | {peaks[0]} | {peaks[1]} | {sample['published'][0][0]:g} |")
    if not rows:
        return ""
    lines = (
        "",
        "`train.py` with its default settings, a million steps, highest return of the mean curve of five seeds:",
        "",
        "| | deterministic actions | sampled actions | best published, on-policy |",
        "|---|---|---|---|",
        *rows,
        "",
        "[docs/learning.md](docs/learning.md) has nine environments, how comparable the published figures are, and",
        "where the default falls short.",
        "",
    )
    return "\n".join(lines) + "\n"


def pictures(folder: Path, known: list[Task], curves: dict[str, dict[int, np.ndarray]]) -> None:
    """Draws the curves of each group that has any.

    Args:
        curves: by task and seed, of learning_results.
    """
    shown = {f"{key}.png": [task for task in known if task.group == key] for key in GROUPS}
    for name, chosen in shown.items():
        if ran := [task for task in chosen if curves[task.name]]:
            draw(folder / name, ran, curves)


def draw(path: Path, ran: list[Task], curves: dict[str, dict[int, np.ndarray]]) -> None:
    """One picture: for each task the mean of the evaluations, lowest and highest seed, and the published figures."""
    try:
        from matplotlib.figure import Figure
        from PIL import Image
    except ImportError:
        print(f"no {path}: pip install -e '.[plot]'")
        return
    from benchmarks.learning_results import EVALUATION, mean_curve

    columns = min(len(ran), 3)
    rows = -(-len(ran) // columns)
    figure = Figure(figsize=(2.9 * columns, 2.1 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid[len(ran) :]:
        axes.set_visible(False)
    for axes, task in zip(grid, ran):
        steps, returns = mean_curve(curves[task.name], EVALUATION)
        axes.fill_between(steps / 1e6, returns.min(axis=0), returns.max(axis=0), alpha=0.25, linewidth=0)
        axes.plot(steps / 1e6, returns.mean(axis=0), linewidth=1.2)
        for i, (value, _) in enumerate(task.published):
            axes.axhline(value, color="black", linestyle="--" if i == 0 else ":", linewidth=0.8)
        axes.set_title(f"{task.env}, {len(returns)} seeds", fontsize="small")
        axes.tick_params(labelsize="x-small")
    figure.supxlabel("million steps", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=80)
    Image.open(picture).quantize(COLOURS).save(path, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
