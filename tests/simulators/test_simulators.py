"""Environments on several ranks, in a team or started by a command: same bits, failures, sleep, bad input."""

import json
import shlex
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import gymnasium
import pytest
from conftest import FLAGS, LAUNCHER, RANKS, ROOT, mpi_environment, run
from safetensors.numpy import load_file
from training import train, wait_for_row

import mpi_util
from mpi_util.host import reap
from mpi_util.simulators import wire

BITS = {}  # of the first case that has run: all others have the same


def launcher(mpi: str) -> dict[str, str]:
    """Variables with which the program's commands start ranks of this MPI."""
    words = [*(f"{name}={value}" for name, value in mpi_environment(mpi).items()), LAUNCHER[mpi], *FLAGS[mpi][:1]]
    return {"TEST_LAUNCHER": shlex.join(["env", *map(str, words)])}


def play(n, k, coupling, *act, mpi="mpich", inner="mpich", status=0, **more):
    command = [sys.executable, RANKS / "simulators.py", n, k, coupling, *act]
    done = run(command, 90, mpi_environment(mpi) | launcher(inner) | more)
    assert done.status == status, f"status {done.status}\n{done.out}\n{done.err}"
    return done


@pytest.mark.slow_if(n_workers=2)
@pytest.mark.left_out(mpi="openmpi", n_workers=[1, 3])
@pytest.mark.parametrize("n_workers", [1, 2, 3])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_team_plays_the_same_bits_for_any_number_of_workers_and_ranks(mpi, n_workers, k):
    out = play(n_workers * k, k, "team", mpi=mpi).out
    assert out.count("\n") == 2 and BITS.setdefault("bits", out) == out


@pytest.mark.parametrize("inner", ["mpich", "openmpi"])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (1, 2), (2, 2), (3, 1)])
def test_a_command_plays_the_same_bits_as_a_team(n, k, inner):
    out = play(n, k, "process", inner=inner).out
    assert out.count("\n") == 2 and BITS.setdefault("bits", out) == out


def test_an_mpiexec_of_ones_own_is_split():
    command = [LAUNCHER["mpich"], *FLAGS["mpich"], "-n", 4, sys.executable, RANKS / "simulators.py", 4, 2, "team"]
    out = run(command, 90).out
    assert BITS.setdefault("bits", out) == out


@pytest.mark.parametrize("coupling", ["team", "process"])
def test_a_worker_has_several_of_them_under_wrappers(coupling):
    assert play(2, 2, coupling, "vector").out.count("(2, 12) [True, True]\n") == (1 if coupling == "team" else 2)


@pytest.mark.slow_if(act=["first raise", "late gil 0", "wrong stop"])
@pytest.mark.left_out(mpi="openmpi", act=["fault exit", "first raise", "wrong stop"])
@pytest.mark.parametrize(
    ("act", "status", "report"),
    [
        ("fault raise", 1, "member 1 of worker {} (phase simulator, simulator step 2): uncaught exception"),
        ("first raise", 1, "worker {} (phase simulator, simulator step 2): uncaught exception"),
        ("fault exit", 1, "RuntimeError: the environment has called sys.exit"),
        ("fault kill", 137, "was killed by signal 9"),
        ("late stop", 1, "environment of worker {} is not done with step 2 after 5 s"),
        ("late gil 0", 1, "coupled.py"),
        ("wrong stop", 1, "environment of worker {} is not done with stop after 5 s"),
    ],
)
def test_a_rank_of_a_team_that_fails_ends_the_job_with_one_report(mpi, act, status, report):
    done = play(4, 2, "team", *act.split(), mpi=mpi, status=status)
    assert any(report.format(k) in done.err for k in (0, 1)), done.err
    assert done.err.count("uncaught exception") == ("raise" in act or "exit" in act)


@pytest.mark.parametrize("coupling", ["team", "process"])
def test_an_error_that_all_ranks_have_can_be_caught(coupling):
    out = play(2 if coupling == "team" else 1, 2, coupling, "everywhere", "raise").out
    raised = "ValueError" if coupling == "team" else "SimulatorError the simulator of worker 0"
    assert f"raised {raised}" in out and "the solver diverged" in out and out.endswith("played 4\n"), out


@pytest.mark.parametrize("coupling", ["team", "process"])
def test_an_error_of_a_member_alone_can_be_caught(coupling):
    out = play(2 if coupling == "team" else 1, 2, coupling, "fault", "afterwards").out
    assert out.startswith("raised SimulatorError") and "member 1 of worker 0 failed in step 2" in out, out
    assert "the solver diverged" in out and out.endswith("played 4\n"), out


@pytest.mark.parametrize("inner", ["mpich", "openmpi"])
@pytest.mark.parametrize(
    ("act", "report"),
    [
        ("fault raise", "has ended with status 1, in step 2"),
        ("fault kill", "has ended"),
        ("fault leave", "in step 2"),
        ("late stop", "was not done after 5 s, and was ended, in step 2"),
        ("late spin", "was not done after 5 s, and was ended, in step 2"),
    ],
)
def test_a_command_that_fails_is_ended_and_can_be_started_again(act, report, inner):
    out = play(1, 2, "process", *act.split(), inner=inner).out
    assert out.startswith("raised SimulatorError the simulator of worker 0 (") and report in out, out
    assert out.endswith("played 4\n")


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_members_sleep(mpi):
    (share,) = json.loads(play(2, 2, "team", "shares", mpi=mpi).out)
    assert share <= 0.01  # on a machine that is busy otherwise; measured: 0.004


@pytest.mark.parametrize("inner", ["mpich", "openmpi"])
def test_a_program_that_is_not_called_is_paused(inner):
    assert max(json.loads(play(1, 2, "process", "shares", inner=inner).out)) <= 0.05  # without pause 0.3 or more


def test_a_solver_is_paused_and_ended():
    found = json.loads(play(1, 1, "process", "spinning").out)
    first, paused, last = found["used"]
    assert paused <= 0.02 < min(first, last) and found["status"] == -15


def test_a_program_may_print_much_and_leave_processes(tmp_path):
    assert play(1, 1, "process", "flood", TEST_LOGS=str(tmp_path)).out == "left behind False\n"
    (log,) = tmp_path.iterdir()
    assert log.name == "worker-0-simulator-1.txt" and log.stat().st_size > 3e6


@pytest.mark.parametrize("coupling", ["team", "process"])
def test_a_closed_one_says_so_and_others_go_on(coupling):
    first, *_, last = play(2 if coupling == "team" else 1, 2, coupling, "closed").out.splitlines()
    assert "was closed" in first and "'ranks'" in last


def test_what_members_print_goes_to_their_files(tmp_path):
    shown = play(2, 2, "team", "complains", TEST_LOGS=str(tmp_path)).err
    assert shown == "warning of rank 0\n"
    assert (tmp_path / "worker-0-member-1.txt").read_text() == "warning of rank 1\n"


@pytest.mark.parametrize(("n", "status"), [(1, -signal.SIGKILL), (2, 137)])
@pytest.mark.parametrize("inner", ["mpich", "openmpi"])
def test_a_killed_worker_leaves_no_process(n, status, inner):
    left, end = play(n, 2, "process", "killed", inner=inner, status=status).out.split(), time.monotonic() + 10
    while any(reap.is_alive(int(pid)) for pid in left) and time.monotonic() < end:  # with n = 1 the guard ends them
        time.sleep(0.05)
    assert len(left) >= 3 and not [pid for pid in left if reap.is_alive(int(pid))]


def test_a_forked_process_that_ends_and_a_thread_that_ends_leave_programs():
    assert play(1, 1, "process", "forks").out.startswith("[")
    with ThreadPoolExecutor(1) as pool:
        solver = pool.submit(mpi_util.solver, "sleep 100").result()
    time.sleep(0.2)
    assert solver.poll() is None
    solver.kill()


@pytest.mark.parametrize("end", ["kill", "terminate"])
def test_a_program_whose_environment_is_empty_is_ended(end):
    solver = mpi_util.solver(["env", "-i", "sleep", "100"])
    time.sleep(0.2)
    getattr(solver, end)()
    assert solver.wait(5) < 0


def test_what_travels_is_the_same():
    one, other = socket.socketpair()
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(wire.Wire, other, "b", "a")
        here, there = wire.Wire(one, "a", "b"), there.result()
    space = gymnasium.spaces.MultiDiscrete([3, 4], start=[5, -2])
    here.send(1, [b"ab\0\0", b"", space])
    _, (full, empty, same) = there.receive()
    assert (full, empty, same) == (b"ab\0\0", b"", space)


@pytest.mark.parametrize(
    ("n", "coupling", "what", "line"),
    [
        (1, "process", "both", "simulator takes make_env, for ranks of this job, or command="),
        (1, "process", "neither", "simulator takes make_env, for ranks of this job, or command="),
        (1, "process", "timeout", "timeout is a number of seconds above 0; got -1"),
        (1, "process", "command", "/nowhere/mpiexec -n 2 x cannot be started"),
        (1, "process", "quote", "mpiexec ' cannot be started: No closing quotation"),
        (1, "process", "stop", "was not done after 5 s, and was ended, in stop"),
        (1, "process", "log", "cannot be started: [Errno 17] File exists"),
        (2, "team", "log", "member 1 of worker 0: simulators.py:32: LaunchError: log_dir: [Errno 17] File exists"),
        (1, "process", "target", "makes no environment: module 'coupled' has no attribute 'mak'; give module:function"),
        (1, "process", "module", "makes no environment: No module named 'cupled'; give module:function"),
        (1, "process", "start", "(sleep 100) was not done after 0.5 s, and was ended, in its start"),
        (1, "process", "ends", "has ended with status 7, in its start; it said last: no licence"),
        (1, "process", "no_environment", "make_env returned 3, which is no environment"),
        (1, "process", "without", "mpi_fork(n, ranks_per_env=k) says how many ranks"),
        (2, "team", "no_environment", "make_env returned 3, which is no environment"),
        (2, "team", "member_calls", "member 1 of worker 0: members of teams take part in no collective calls; call"),
        (2, "team", "world", "members of teams take part in no collective calls; call"),
        (3, "team", "both", "mpi_fork: 3 ranks cannot be shared by environments; start a multiple of ranks_per_env=2"),
    ],
)
def test_bad_input_is_one_line(n, coupling, what, line):
    done = run([sys.executable, RANKS / "simulators.py", n, min(n, 2), coupling, "wrong", what], 60)
    first, *rest = done.err.splitlines()
    assert done.status in (1, 2) and line in first, done.err
    assert rest in ([], [f"mpi_util: all {n} ranks were stopped"])


def test_a_world_that_is_no_multiple_is_one_line_under_mpiexec():
    command = [LAUNCHER["mpich"], "-n", 3, sys.executable, RANKS / "simulators.py", 3, 2, "team"]
    done = run(command, 60)
    assert done.status and done.err.count("cannot be shared by environments") == 1, done.err


@pytest.mark.slow
def test_train_py_has_the_same_bits_with_a_command_that_hangs(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os, sys\n"
        f"sys.path.append({str(RANKS)!r})\n"
        "import coupled, gymnasium\n"
        "class Mine(coupled.Coupled):\n"
        "    action_space = gymnasium.spaces.Box(-1, 1, (2,), 'float32')\n"
        "    def step(self, action):\n"
        "        if self.n == 2 and 'FAULT' in os.environ and os.path.exists('run/progress.txt'):\n"
        "            if not os.path.exists('failed'):\n"
        "                open('failed', 'x').close()\n"
        "                coupled.FAULTS['stop']()\n"
        "        return super().step({'z': action, 'a': 0})\n"
        "make = lambda comm: Mine(comm)  # which pickle does not take\n"
        "def alone():\n"
        "    from mpi4py import MPI\n"
        "    return Mine(MPI.COMM_SELF)\n"
    )
    serve = f"{shlex.quote(sys.executable)} -m mpi_util.serve mine:make"
    found = []
    for options, more in (
        (["mine:make", "--ranks_per_env", 2, "--nprocs", 4], {}),
        (["mine:alone", "--ranks_per_env", 1], {}),
        (["--env_command", f"{LAUNCHER['mpich']} -n 2 {serve}", "--nprocs", 2], {}),
        (["--env_command", serve, "--env_timeout", 3, "--on_env_error", "restart"], {"FAULT": "1"}),
    ):
        run(["rm", "-rf", "run"], 10, cwd=tmp_path)
        command = [sys.executable, ROOT / "train.py", *options, "-n", 8, "-b", 4, "--run_dir", "run"]
        done = run(command, 120, more, cwd=tmp_path)
        assert done.status == 0 and ("run again in a new environment" in done.err) == bool(more), done.err
        assert "pickle" not in done.err, done.err  # one more environment of it was made, to see whether it repeats
        found.append(learned(tmp_path / "run"))  # the notes in the file name what makes the environment
    assert all(arrays == found[0] for arrays in found) and (tmp_path / "failed").exists()


@pytest.mark.slow
def test_train_py_continues_a_killed_run_of_teams_and_has_its_other_modes(tmp_path):
    env = ["examples.kuramoto:make", "--ranks_per_env", 2, "--env_kwargs", '{"lengths": 2}', "--seed", 3]
    work = [*env, "--batch_steps", 200, "--num_envs", 2, "--total_steps", 800, "--save_every", 0]
    train(*work, "--nprocs", 2, "--run_dir", tmp_path / "whole")
    words = [*work, "--nprocs", 4, "--eval_every", 400, "--eval_episodes", 2, "--run_dir", tmp_path / "run"]
    command = [sys.executable, "train.py", *map(str, words)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_row(process, 2)
    process.kill()
    process.communicate(timeout=30)
    train("--resume", tmp_path / "run", "--nprocs", 2)
    assert learned(tmp_path / "run") == learned(tmp_path / "whole")
    for mode in "--overlap", "--parallel=average":
        train(*work, mode, "--nprocs", 4, "--run_dir", tmp_path / mode)
        assert learned(tmp_path / mode) != learned(tmp_path / "whole")


def learned(folder):
    return {name: array.tobytes() for name, array in load_file(folder / "policy.safetensors").items()}


def test_train_py_names_what_has_failed(tmp_path):
    (tmp_path / "mine.py").write_text(
        f"import sys; sys.path.append({str(RANKS)!r})\n"
        "import coupled, gymnasium\n"
        "class Mine(coupled.Coupled):\n"
        "    action_space = gymnasium.spaces.Box(-1, 1, (2,), 'float32')\n"
        "    def step(self, action):\n"
        "        if self.comm.Get_rank() == 1:\n"
        "            raise ValueError('negative density')\n"
        "        return self.whole(), 0.0, False, True, {}\n"
        "make = Mine\n"
    )
    command = [sys.executable, ROOT / "train.py", "-n", 2, "-b", 2, "--run_dir", "run"]
    done = run([*command, "mine:make", "--ranks_per_env", 2, "--nprocs", 2], 60, cwd=tmp_path)
    first, *_, last = done.err.splitlines()
    assert done.status == 1 and first.startswith("member 1 of worker 0 (phase "), done.err
    assert "in step 1" in first or "step 1)" in first
    assert last == "mpi_util: rank 1 ended with status 1 (ValueError: negative density); all 2 ranks were stopped", last
    done = run([*command, "mine:make", "--env_command", "x"], 60, cwd=tmp_path)
    assert (done.status, done.err.count("\n")) == (2, 1) and "leave out mine:make" in done.err


def test_what_a_program_prints_goes_through_no_link(tmp_path):
    for number in range(1, 30):
        (tmp_path / f"worker-0-simulator-{number}.txt").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(mpi_util.UsageError, match=r"^true cannot be started: .*symbolic links"):
        mpi_util.solver("true", log_dir=tmp_path)
    with pytest.raises(mpi_util.UsageError, match=r"^true cannot be started: .*/proc/nix"):
        mpi_util.solver("true", log_dir="/proc/nix")
    assert not (tmp_path / "elsewhere").exists()
