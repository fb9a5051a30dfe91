"""benchmarks.learning: its statistics by hand and against plain loops, its document, and runs that are killed."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, run

from benchmarks import learning, learning_doc, record, tried
from benchmarks import learning_results as results
from benchmarks.learning_tasks import GROUPS, RANDOM, Task, tasks
from trainer.command_line import parse
from trainer.run_folder import CHECKPOINT, load


def curve(seed: int, evaluations, steps=None, training=None, episodes=None) -> np.ndarray:
    """A run's curves; by default evaluated at 10, 20, ... steps, with training returns half as high."""
    n = len(evaluations)
    steps = range(10, 10 * n + 1, 10) if steps is None else steps
    training = [value / 2 for value in evaluations] if training is None else training
    columns = [[seed] * n, steps, evaluations, training, episodes or [1] * n, range(n)]
    return np.array(list(zip(*columns)), float)


def test_the_statistic_is_the_best_point_of_the_mean_curve():
    """The means are 2, 5, 4; the mean of each seed's own best would be 7."""
    found = results.statistics_of({1: curve(1, [1, 8, 2]), 2: curve(2, [3, 2, 6])}, results.EVALUATION, 30)
    assert (found["peak"], found["peak_at_steps"]) == (5, 20)
    halves = results.statistics_of({1: curve(1, [1, 8, 2]), 2: curve(2, [3, 2, 6])}, results.TRAINING, 30)
    assert (halves["peak"], halves["peak_at_steps"]) == (2.5, 20)


def test_the_last_tenth_is_a_mean_over_steps_and_then_over_seeds():
    """Of 30 evaluations the last three; training returns are weighted by their episodes."""
    a = curve(1, [0] * 27 + [1, 2, 6])
    b = curve(2, [9] * 27 + [6, 6, 9], training=[0] * 27 + [2, 2, 8], episodes=[1] * 27 + [1, 1, 2])
    found = results.statistics_of({1: a, 2: b}, results.EVALUATION, 300)
    assert found["last_by_seed"] == [3, 7]
    assert found["last"] == {"min": 3, "median": 5, "max": 7, "n": 2, "mean": 5}
    assert results.statistics_of({1: a, 2: b}, results.TRAINING, 300)["last_by_seed"] == [1.5, 5]


def test_runs_evaluated_at_other_steps_meet_at_the_same(monkeypatch):
    monkeypatch.setattr(results, "EVAL_EVERY", 10)
    steps, returns = results.mean_curve(
        {1: curve(1, [10, 20, 40], [5, 10, 30]), 2: curve(2, [10, 30], [10, 30])}, results.EVALUATION
    )
    assert steps.tolist() == [10, 20, 30] and returns.tolist() == [[20, 30, 40], [10, 20, 30]]


def plain_iqm(scores: list[float]) -> float:
    """The mean without a quarter of the values at each end, rounded down to whole ones."""
    cut = len(scores) // 4
    middle = sorted(scores)[cut : len(scores) - cut]
    return sum(middle) / len(middle)


@pytest.mark.parametrize(
    ("scores", "iqm"), [([7], 7), ([1, 2, 9], 4), ([1, 9, 3], 13 / 3), ([100, 1, 2, 3, 4], 3), ([8, 0, 2, 4] * 2, 3)]
)
def test_the_interquartile_mean_by_hand(scores, iqm):
    assert results.interquartile_mean(np.array(scores)) == pytest.approx(iqm) == pytest.approx(plain_iqm(scores))


def test_the_interval_is_that_of_a_bootstrap_within_each_task():
    """Against a plain loop. Drawn from all runs together, the second task's high scores would widen it."""
    rng = random.Random(1)
    scores = [[rng.gauss(0, 1) for _ in range(5)], [rng.gauss(20, 1) for _ in range(5)]]
    means = []
    for _ in range(20_000):
        drawn = [rng.choice(task) for task in scores for _ in task]
        means.append(plain_iqm(drawn))
    expected = np.percentile(means, [2.5, 97.5])
    assert results.interval([np.array(task) for task in scores]) == pytest.approx(expected, abs=0.1)


def test_a_score_is_0_if_random_and_1_if_as_published():
    found = {}
    for env in ("Reacher-v4", "Hopper-v4"):
        task = Task("PPO-1M", env, 30)
        best, low = task.published[0][0], RANDOM[env]
        returns = {1: curve(1, [0, 0, best], training=[0, 0, low]), 2: curve(2, [0, 0, best], training=[0, 0, low])}
        found[task.name] = results.describe(task, returns)
    assert results.describe_group(found, "PPO-1M") == {
        "tasks": 2,
        "evaluation": {"iqm": 1, "interval": [1, 1]},
        "training": {"iqm": 0, "interval": [0, 0]},
    }


def test_curves_of_a_run_and_their_file(tmp_path):
    """The second evaluation sums up iterations 2 and 3, with 1 and 3 episodes."""
    columns = ("Episodes", "TotalEnvInteracts", "AverageEpRet", "AverageTestEpRet", "Time")
    nan = float("nan")
    rows = [(2, 100, 5.0, 7.0, 1.5), (3, 200, 1.0, nan, 2.5), (6, 300, 9.0, 8.0, 3.5), (6, 400, nan, 9.0, 4.0)]
    found = results.curves_of([dict(zip(columns, row)) for row in rows], 21)
    expected = [[21, 100, 7, 5, 2, 1.5], [21, 300, 8, 7, 4, 3.5], [21, 400, 9, nan, 0, 4.0]]
    np.testing.assert_equal(found, np.array(expected))
    found[2, results.STEPS] = 10_000_384
    results.write(tmp_path / "c.csv", "train.py X", {21: found, 20: curve(20, [1.25, 2])})
    read = results.read(tmp_path / "c.csv", "train.py X")
    np.testing.assert_equal(read[21], found)
    np.testing.assert_equal(read[20], curve(20, [1.25, 2]))
    assert results.read(tmp_path / "c.csv", "train.py X --gamma 0.9") == {}


def test_a_row_that_a_crash_has_cut_off_does_not_count(tmp_path):
    names = "TotalEnvInteracts\tAverageTestEpRet\n"
    for text, steps in (
        ("", []),
        (names, []),
        (f"{names}10\t1.5\n20\t2.2", [10]),
        (f"{names}10\t1\n20\t2\n", [10, 20]),
    ):
        (tmp_path / "progress.txt").write_text(text)
        assert [row["TotalEnvInteracts"] for row in record.progress(tmp_path)] == steps
        assert results.is_complete(tmp_path, 20) == (20 in steps)


# ---- the tasks and the order of work


def test_every_task_is_a_command_that_train_accepts():
    assert len(tasks()) == 3 * 9 + 8 + 9 + 9 + 6 + 1
    for task in tasks():
        config = parse(task.arguments(task.seeds[0]))
        assert config.total_steps == GROUPS[task.group].steps and config.eval_every == 30_000
        assert min(task.seeds) >= 20
    default = parse(Task("PPO-default-1M", "Humanoid-v4", 1_000_000).arguments(20))
    assert default == parse(["Humanoid-v4", "--total_steps", "1000000", "--eval_every", "30000", "--seed", "20"])


# ---- the document


def test_the_documents_are_what_the_results_say():
    assert learning_doc.documents() == {
        path: path.read_text() for path in (learning_doc.DOCUMENT, learning_doc.README)
    }, "run: python -m benchmarks.learning_doc"


def rounded(sample: dict) -> dict:
    """As JSON gives it back, with six digits of each number."""
    return json.loads(json.dumps(sample), parse_float=lambda text: f"{float(text):.6g}")


def test_the_results_are_what_the_curves_say():
    """So each figure of the document follows from the curves of each seed that lie beside it."""
    found = json.loads((record.RESULTS / "learning.json").read_text())
    for task in tasks():
        expected = results.describe(task, results.read(learning.curves_path(record.RESULTS, task), task.command))
        assert rounded(expected) == rounded(found["samples"][task.name]), task.name
        assert found["not_run"].get(task.name, []) == sorted(set(task.seeds) - set(expected["seeds"]))


def test_the_document_shows_what_was_reached_and_what_not_run(tmp_path):
    samples = {task.name: results.describe(task, {}) for task in tasks()}
    task = Task("PPO-1M", "Hopper-v4", 30)
    samples[task.name] = results.describe(task, {20: curve(20, [0, 0, 3000]), 21: curve(21, [0, 0, 1000])})
    default = Task("PPO-default-1M", "Humanoid-v4", 30)
    samples[default.name] = results.describe(default, {seed: curve(seed, [0, 0, 9000]) for seed in default.seeds})
    not_run = {t.name: [s for s in t.seeds if s not in samples[t.name]["seeds"]] for t in tasks()}
    machine = {"cores": 2, "cpu": "some CPU"}
    text = learning_doc.tables({"samples": samples, "groups": {}, "not_run": not_run, "machine": machine})
    row = "| Hopper-v4 | 2609 (PPO, Tianshou) | **2000** | 1000 | 2000 (1000 to 3000) | 2000 [1000, 3000] | 2 | 0.0 |"
    assert row in text
    assert "| Hopper-v4, seeds 20, 21 | 3000, 1000 | 1500, 500 |" in text
    assert "a mean of 4000 and no seed below 1726. Met: 4500 (4500 to 4500)." in text
    assert "- `PPO-1M`: HalfCheetah-v4, Hopper-v4 (seeds 22, 23, 24), Walker2d-v4, " in text
    assert "- `TRPO-1M`: no run is complete\n" in text
    front = learning_doc.front({"samples": samples})
    assert "| Humanoid-v4 | 9000 | 4500 | 1726 |" in front
    assert "Hopper-v4" not in front  # of which no run is complete
    none = {task.name: results.describe(task, {}) for task in tasks()}
    assert learning_doc.front({"samples": none}) == ""


def test_pictures_are_drawn_of_what_was_run(tmp_path):
    curves = {task.name: {} for task in tasks()}
    for name in learning_doc.ON_THE_FRONT_PAGE[:-1]:
        curves[name] = {seed: curve(seed, [1, 2, seed]) for seed in range(20, 25)}
    learning_doc.pictures(tmp_path, tasks(), curves)
    assert {path.name for path in tmp_path.iterdir()} == {"PPO-default-1M.png"}
    assert all(1_000 < path.stat().st_size < 60_000 for path in tmp_path.iterdir())


# ---- runs that are killed, stopped and continued

TASK = Task("PPO-1M", "InvertedPendulum-v4", 24_000)  # twelve iterations


def command(folder: Path, seeds: list[int], *more) -> list[str]:
    chosen = ["--only", TASK.name, "--steps", TASK.steps, "--seeds", ",".join(map(str, seeds)), "--jobs", 2]
    program = [sys.executable, "-m", "benchmarks.learning"]
    return [str(word) for word in (*program, *chosen, "--results", folder, *more)]


def started(folder: Path, seeds: list[int]) -> subprocess.Popen:
    """The program, after each of its runs has made an iteration."""
    run_folders = [learning.folder_of(folder / "runs", TASK, seed) for seed in seeds]
    before = [len(record.progress(path)) for path in run_folders]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command(folder, seeds), cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    end = time.monotonic() + 60
    while any(len(record.progress(path)) <= n for path, n in zip(run_folders, before)):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.02)
    return process


def have_saved(folder: Path, seeds: list[int]) -> bool:
    """Whether the checkpoints are those of the last rows."""
    folders = [learning.folder_of(folder / "runs", TASK, seed) for seed in seeds]
    rows = [record.progress(path)[-1]["Iteration"] for path in folders]
    return rows == [load(path / CHECKPOINT)[0]["iteration"] for path in folders]


def children_of(folder: Path) -> list[int]:
    """Processes that train in the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.endswith(b"train.py") for word in words) and any(str(folder).encode() in word for word in words):
            found.append(int(path.name))
    return found


@pytest.mark.slow
def test_killed_or_stopped_runs_continue_to_the_same_bits(tmp_path):
    disturbed, undisturbed, seeds = tmp_path / "disturbed", tmp_path / "undisturbed", [3, 4]
    process = started(disturbed, seeds)
    process.kill()
    process.communicate()
    while children_of(disturbed):  # which the kernel has told
        time.sleep(0.02)
    assert have_saved(disturbed, seeds)
    process = started(disturbed, seeds)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out = process.communicate(timeout=30)[0]
    assert process.returncode == 130 and "SIGINT: stopping 2 runs" in out
    assert have_saved(disturbed, seeds) and not children_of(disturbed)
    assert json.loads((disturbed / "learning.json").read_text())["not_run"] == {TASK.name: TASK.seeds}
    process = started(disturbed, seeds)
    os.kill(children_of(disturbed)[0], signal.SIGKILL)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 1 and out.count("ended with status -9") == 1 and out.count(": complete") == 1
    done = run(command(disturbed, seeds), 60)
    assert done.status == 0 and "1 of 2 runs are complete" in done.out and done.out.count("continues") == 1
    done = run(command(undisturbed, seeds), 60)
    assert done.status == 0 and done.out.count("begins") == 2
    curves = [results.read(learning.curves_path(path, TASK), TASK.command) for path in (disturbed, undisturbed)]
    for seed in seeds:
        files = [learning.folder_of(path / "runs", TASK, seed) for path in (disturbed, undisturbed)]
        for name in ("policy.safetensors", "best.safetensors"):
            assert (files[0] / name).read_bytes() == (files[1] / name).read_bytes()
        np.testing.assert_equal(curves[0][seed][:, :-1], curves[1][seed][:, :-1])
    shutil.rmtree(disturbed / "runs")  # as after a move to another machine
    done = run(command(disturbed, seeds), 30)
    assert done.status == 0 and "2 of 2 runs are complete" in done.out and "begins" not in done.out
    assert results.read(learning.curves_path(disturbed, TASK), TASK.command).keys() == set(seeds)


@pytest.mark.slow
def test_a_line_of_what_was_tried_is_made_and_filled_in(tmp_path):
    path, known = tmp_path / "tried.csv", "Hopper-v4 --total_steps 9,1,2,3,4,5"
    new, bad = "CartPole-v1 --total_steps 4000 --epochs 1 --seed 7", "CartPole-v1 --total_steps 4000 --lam 2"
    path.write_text("\n".join([",".join(tried.COLUMNS), known, new, bad]))
    command = [
        sys.executable,
        "-m",
        "benchmarks.tried",
        "--jobs",
        2,
        "--runs",
        tmp_path / "runs",
        "--results",
        tmp_path,
    ]
    done = run(command, 120)
    assert done.status == 1 and "--lam is 2.0; it must be between 0 and 1" in done.out
    found = tried.read(path)
    assert found[known.partition(",")[0]] == ["1", "2", "3", "4", "5"] and found[bad] == []
    evaluation, _, training, _, minutes = map(float, found[new])
    assert 8 < evaluation <= 500 and 8 < training <= 500 and minutes < 2
