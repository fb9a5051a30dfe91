"""What train.py saves: nothing is lost by a stop, a damaged file, or a disk that is full for a while."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import RANKS, ROOT, fill, mpi_environment, run
from safetensors.numpy import save
from training import rows, train, wait_for_row

from policies.actor import Spec
from trainer.command_line import parse
from trainer.config import Config
from trainer.record import Record
from trainer.run_folder import CHECKPOINT, META, RunFolder, checkpoints, load, load_checkpoint

EVALUATED = ["tests.envs:Uneven-v0", "-n", 32, "-b", 8, "--eval_every", 200, "--eval_episodes", 6]
WAYS = {
    "gather": EVALUATED,
    "average": [*EVALUATED, "--parallel", "average"],
    "overlap": [*EVALUATED, "--overlap"],
    "segments": [EVALUATED[0], "--total_steps", 800, "--batch_steps", 200, "--num_envs", 4]
    + [*EVALUATED[5:], "--on_env_error", "restart"],
}


def stopped(at: str, *arguments, n: int = 2, mpi: str = "mpich") -> None:
    """train.py, stopped at a place; see stopped_train.py."""
    command = [sys.executable, RANKS / "stopped_train.py", *arguments, "--nprocs", n]
    done = run(command, 60, {**mpi_environment(mpi), "STOP_AT": at})
    assert done.status == 143 and "stopped: " in done.out, done.err


def results(folder: Path) -> tuple:
    return rows(folder), *((folder / f"{name}.safetensors").read_bytes() for name in ("policy", "best"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Results of runs that nothing stopped, each made once."""
    made = {}

    def of(way: str) -> tuple:
        if way not in made:
            folder = tmp_path_factory.mktemp("undisturbed") / "run"
            train(*WAYS[way], "--nprocs", 2, "--run_dir", folder)
            made[way] = results(folder)
        return made[way]

    return of


# (way to share the work, where each of its starts is stopped, numbers of processes)
STOPS = {
    "before it, then in it": ("gather", ["update 3", "evaluate 3"], [1, 2, 1]),
    "in the last one, twice": ("gather", ["evaluate 4", "evaluate 4"], [3, 1, 2]),
    "between segments": ("segments", ["evaluate 2", "update 3"], [3, 2, 1]),
    "averaging": ("average", ["evaluate 1", "update 2"], [2, 2, 2]),
    "overlap": ("overlap", ["update 2", "evaluate 2", "update 3"], [2, 1, 3, 2]),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, mpi", [(case, "openmpi" if case.startswith("before") else "mpich") for case in STOPS], indirect=["mpi"]
)
def test_an_evaluation_that_a_stop_prevented_is_made_on_resume(tmp_path, undisturbed, case, mpi):
    way, places, n = STOPS[case]
    folder = tmp_path / "run"
    start = [*WAYS[way], "--run_dir", folder]
    for place, n_ranks in zip(places, n):
        stopped(place, *start, n=n_ranks, mpi=mpi)
        undone = way == "overlap" and place.startswith("update")  # the update ends, but what it was made for is dropped
        assert int(rows(folder)[-1]["Iteration"]) == int(place[-1]) - undone
        owed = rows(folder)[-1]["AverageTestEpRet"] == "nan"
        assert owed or (place.startswith("update") and n_ranks > 1)  # the others may have evaluated before rank 0 came
        assert load(folder / CHECKPOINT)[0]["evaluate"] == owed
        start = ["--resume", folder]
    train(*start, "--nprocs", n[-1])
    expected = undisturbed(way)
    assert load(folder / CHECKPOINT)[0]["evaluate"] == 0  # it owes nothing
    assert results(folder) == expected and [row["AverageTestEpRet"] == "nan" for row in expected[0]] == [False] * 4


# ---- checkpoints


def numbers(iteration: int) -> dict[str, np.ndarray]:
    return {"iteration": np.array([iteration]), "weights": np.arange(50, dtype=np.float32) * iteration}


def saved(folder: Path, iterations, keep: int) -> list[int]:
    """Saves checkpoints; the iterations of those that are there then, the newest first."""
    run_folder = RunFolder(folder, new=False) if checkpoints(folder) else RunFolder(folder, new=True)
    for i in iterations:
        run_folder.save(CHECKPOINT, numbers(i), {"scalars": {"time": i}}, keep)
    return [load(path)[1]["scalars"]["time"] for path in checkpoints(folder)]


def flip(path: Path, *places: int) -> None:
    content = bytearray(path.read_bytes())
    for place in places:
        content[place] ^= 0x01
    path.write_bytes(content)


def test_any_two_flipped_bytes_are_noticed(tmp_path):
    saved(tmp_path, [1], keep=1)
    path = tmp_path / CHECKPOINT
    good = path.read_bytes()
    assert load(path)[1] == load_checkpoint(tmp_path)[1] and len(good) < 1000
    for place in range(len(good)):
        flip(path, place, (place * 7 + 1) % len(good))
        with pytest.raises(ValueError, match=r"cannot load .*checkpoint\.safetensors: it is damaged") as error:
            load(path)
        assert "\n" not in str(error.value)
        path.write_bytes(good)
    for content in (b"", good[:-1], good + b"\0", bytes(len(good)), good.replace(b"checksum", b"checksun")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="it is damaged"):
            load(path)
    saved(tmp_path, [1], keep=1)
    assert path.read_bytes() == good  # the same state, the same bytes


def test_a_file_without_a_checksum_is_refused(tmp_path):
    path = tmp_path / CHECKPOINT
    for header in (
        {META: json.dumps({"env": "Hopper-v4", "checksun": ""})},
        {META: "{}"},
        {META: "[]"},
        {META: "5"},
        {},
        None,
    ):
        path.write_bytes(save(numbers(1), header))
        with pytest.raises(ValueError, match=r"it is damaged \(wrong checksum\), or not a file of train.py$"):
            load(path)


def test_a_damaged_checkpoint_pushes_no_good_one_out(tmp_path):
    assert saved(tmp_path, range(1, 13), keep=11) == [*range(12, 1, -1)]
    assert saved(tmp_path, [13], keep=3) == [13, 12, 11]
    flip(tmp_path / CHECKPOINT, 300, 301)
    assert saved(tmp_path, [14], keep=3) == [14, 12, 11]
    (tmp_path / "checkpoint-mine.safetensors").touch()
    assert saved(tmp_path, [15], keep=1) == [15] and (tmp_path / "checkpoint-mine.safetensors").exists()
    assert {p.name for p in tmp_path.iterdir()} == {CHECKPOINT, "checkpoint-mine.safetensors"}


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("step", range(5))
def test_wherever_a_save_is_cut_off_a_checkpoint_is_there(tmp_path, monkeypatch, step, links):
    saved(tmp_path, [1, 2, 3], keep=3)
    left = iter(range(step))
    replace, link = os.replace, os.link

    def cut_off(change, *paths):
        if next(left, None) is None:
            raise KeyboardInterrupt
        if change is link and not links:
            raise OSError("no links here")
        change(*paths)

    monkeypatch.setattr(os, "replace", lambda *paths: cut_off(replace, *paths))
    monkeypatch.setattr(os, "link", lambda *paths: cut_off(link, *paths))
    steps = 3 if links else 4
    with pytest.raises(KeyboardInterrupt) if step < steps else contextlib.nullcontext():
        saved(tmp_path, [4], keep=3)
    monkeypatch.undo()
    assert (tmp_path / CHECKPOINT).exists() or not links  # at every moment, for who copies it
    assert load_checkpoint(tmp_path)[1]["scalars"]["time"] == (3 if step < steps else 4)
    assert saved(tmp_path, [4], keep=3)[0] == 4


@pytest.mark.slow
def test_of_a_damaged_checkpoint_the_one_before_is_used(tmp_path, undisturbed):
    folder = tmp_path / "run"
    train(*EVALUATED[:2], 24, *EVALUATED[3:], "--save_every", 0, "--keep", 3, "--run_dir", folder)
    assert [int(load(path)[0]["iteration"][0]) for path in checkpoints(folder)] == [3, 3, 2]
    flip(folder / CHECKPOINT, 2000, 2001)
    (folder / "checkpoint-1.safetensors").write_bytes(b"")
    out = train("--resume", folder, "-n", 32, "--save_every", 1e9, "--keep", 2).out
    named = [line for line in out.splitlines() if "is damaged" in line]
    assert len(named) == 1 and named[0].endswith("resuming from checkpoint-2.safetensors")
    assert named[0].count("cannot load") == 2
    assert results(folder) == undisturbed("gather")
    (folder / "checkpoint-1.safetensors").write_bytes(b"")
    flip(folder / CHECKPOINT, 20, 3000)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    done = train("--resume", folder, "--nprocs", 2, status=2)
    assert done.err.splitlines()[-1].count("it is damaged") == len(checkpoints(folder)) == 2
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
    flip(folder / "best.safetensors", 100, 5000)
    done = train("--watch", folder / "best.safetensors", status=2)
    assert (done.status, done.err.count("\n")) == (2, 1) and "it is damaged" in done.err


@pytest.mark.slow
def test_rows_that_are_missing_or_torn_are_named(tmp_path):
    folder = tmp_path / "run"
    train(*EVALUATED, "--run_dir", folder)
    table = folder / "progress.txt"
    lines = table.read_text().splitlines(keepends=True)
    after = lines[4].replace("4\t", "5\t", 1)  # of an iteration after the checkpoint
    table.write_text("".join([*lines[:2], lines[2][:30] + "\0" * 9 + "\n", lines[4], after]) + "half a r")
    out = train("--resume", folder).out
    assert f"{table}: 2 of 4 rows are missing or damaged: 2, 3\n" in out
    assert table.read_text() == "".join([*lines[:2], lines[4]])
    assert "half a r" in (folder / "progress.txt.damaged").read_text()


# ---- a disk that is full, a folder that is gone


@pytest.fixture
def started():
    """started(folder, ...): train.py without an end, on two ranks; it has printed the row of iteration 2."""
    processes = []

    def start(folder: Path, *arguments) -> subprocess.Popen:
        command = [sys.executable, "train.py", "tests.envs:Uneven-v0", "--nprocs", "2", "--run_dir", folder, *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(list(map(str, command)), cwd=ROOT, **pipes))
        wait_for_row(processes[0], 2)
        return processes[0]

    yield start
    for process in processes:
        process.terminate()  # where the test has failed
        process.communicate(timeout=20)


@pytest.mark.slow
def test_a_second_run_in_a_folder_in_use_changes_nothing(tmp_path, started):
    folder = tmp_path / "run"
    process = started(folder, "--save_every", 1000)
    refused = train("--resume", folder, status=2)
    assert refused.err.endswith("another run, which has not ended, writes to this folder\n")
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=20) and process.returncode == 143
    numbers = [json.loads(line)["Iteration"] for line in (folder / "progress.jsonl").read_text().splitlines()]
    assert numbers == [*range(1, len(rows(folder)) + 1)]


LATE = """
import fcntl, os, shutil, sys
longer, folder = sys.argv.pop(), sys.argv[2]
flock = fcntl.flock
def flock_late(fd, how):
    if os.path.sameopenfile(fd, os.open(folder, os.O_RDONLY)):
        shutil.copytree(longer, folder, dirs_exist_ok=True)
    flock(fd, how)
fcntl.flock = flock_late
import train
train.main()
"""


@pytest.mark.slow
def test_a_checkpoint_is_read_when_no_other_run_can_write_it(tmp_path):
    """The other run ends, and saves, just before --resume has the folder's lock."""
    short, longer = tmp_path / "short", tmp_path / "longer"
    train("tests.envs:Uneven-v0", "-n", 16, "-b", 8, "--run_dir", short)
    shutil.copytree(short, longer)
    train("--resume", longer, "-n", 32, "--trust")  # as it is a copy
    command = [sys.executable, "-c", LATE, "--resume", short, "-n", "40", "--trust", longer]
    done = run(command, 60)
    assert done.status == 0, done.err
    assert re.findall(r"^ +(\d+) ", done.out, re.MULTILINE) == ["5"], done.out
    assert rows(short)[:4] == rows(longer)


def read_to(process: subprocess.Popen, text: str) -> list[str]:
    """Lines up to one with `text`."""
    lines = [process.stdout.readline()]
    while text not in lines[-1]:
        assert lines[-1], process.stderr.read()
        lines.append(process.stdout.readline())
    return lines


@pytest.mark.slow
def test_a_full_disk_stops_nothing_and_no_row_is_lost(small_disk, started):
    folder = small_disk / "run"
    process = started(folder, "--save_every", 0.2)
    others = fill(small_disk)
    said = (
        read_to(process, "write a row")
        + read_to(process, "write a checkpoint")
        + read_to(process, "write a checkpoint")
    )
    failed = [line for line in said if "cannot" in line]
    assert [line.startswith("cannot write a row: ") for line in failed].count(True) == 1 < len(failed) - 1
    assert all(f"{folder}" in line and "No space left on device" in line for line in failed)
    others.unlink()
    first = "iter"
    while not first.isdecimal():  # the heading comes again every 30 rows
        first = read_to(process, "     ")[-1].split()[0]
    last = int(first)
    wait_for_row(process, last + 2)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 143 and "  continue: " in out, err
    assert [int(row["Iteration"]) for row in rows(folder)] == [*range(1, len(rows(folder)) + 1)]
    assert len(rows(folder)) >= last + 2 and load(folder / CHECKPOINT)[0]["iteration"] == len(rows(folder))
    assert not list(folder.glob(".*"))


def test_what_could_not_be_saved_at_the_end_is_status_1(small_disk, started):
    folder = small_disk / "run"
    process = started(folder, "--save_every", 1000)
    before = load(folder / CHECKPOINT)[0]["iteration"]
    fill(small_disk)
    wait_for_row(process, 4)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert out.splitlines()[-1].endswith("; the last save failed") and "  continue: " not in out
    assert "cannot write a checkpoint" in err and "No space left on device" in err and "Traceback" not in err
    assert load(folder / CHECKPOINT)[0]["iteration"] == before


@pytest.mark.slow
def test_a_folder_that_is_removed_is_made_again(tmp_path, started):
    folder = tmp_path / "runs" / "run"
    process = started(folder, "-b", 20, "--save_every", 0.2)
    shutil.rmtree(folder.parent.rename(tmp_path / "removed"))
    wait_for_row(process, 6)
    assert any((folder / CHECKPOINT).exists() for _ in range(1000) if process.stdout.readline())
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=20) and process.returncode == 143
    last = int(rows(folder)[-1]["Iteration"])
    assert [int(row["Iteration"]) for row in rows(folder)] == [*range(1, last + 1)]
    out = train("--resume", folder, "-n", 20 * last + 20).out
    assert "missing" not in out and int(rows(folder)[-1]["Iteration"]) == last + 1
    assert (folder / "config.json").exists()


def test_the_best_policy_is_written_again_where_it_was_removed(tmp_path):
    record = Record(Config(env="Hopper-v4", run_dir=str(tmp_path / "run")), Spec(11, 3, False, (), ()), {})
    record.begin(0)
    best = tmp_path / "run" / "best.safetensors"
    for test_ret, kept in ((1.0, 1.0), (3.0, 3.0), (2.0, 3.0)):
        record.keep_best({"weights": np.full(3, test_ret)}, test_ret)
        record.save({}, {"evaluate": np.zeros(1)}, {})
        assert load(best)[0]["weights"][0] == load(best)[1]["test_ret"] == kept
        best.unlink()


def test_a_run_does_not_begin_on_a_full_disk(small_disk):
    fill(small_disk)
    done = train("tests.envs:Uneven-v0", "--nprocs", 2, "--run_dir", small_disk / "run", status=2)
    assert done.err == f"train.py: cannot write to the run folder {small_disk}/run: No space left on device\n"
    assert not list((small_disk / "run").iterdir())


def test_a_checkpoint_without_room_is_written_later(small_disk, started):
    folder, others = small_disk / "run", fill(small_disk)
    os.truncate(others, others.stat().st_size - 16_384)
    process = started(folder, "--save_every", 0.2)
    line = read_to(process, "write a checkpoint")[-1]
    assert line.startswith(f"cannot write a checkpoint: {folder}") and "No space left on device" in line
    assert not checkpoints(folder) and (folder / "config.json").stat().st_size and not list(folder.glob(".*"))
    others.unlink()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 143 and "  continue: " in out, err
    assert load(folder / CHECKPOINT)[0]["iteration"] == len(rows(folder))


@pytest.mark.parametrize(
    "arguments, line",
    [
        ("--keep 0", "--keep is 0; it must be 1 or more"),
        ("--save_every -1", "--save_every is -1.0; it must be 0 or more"),
        ("--save_every nan", "--save_every is nan; it must be 0 or more"),
    ],
)
def test_bad_settings_of_saving_are_refused(capsys, arguments, line):
    with pytest.raises(SystemExit) as ended:
        parse(["Hopper-v4", *arguments.split()])
    assert ended.value.code == 2 and capsys.readouterr().err.startswith(f"train.py: {line}")
