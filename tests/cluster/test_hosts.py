"""Jobs over several hosts, which are namespaces of this machine (hosts.sh): launch, failure, what is left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import LAUNCHER, RANKS, ROOT, mpi_environment, run
from machines import Machines
from training import EPISODES

from mpi_util import HostError, LaunchError
from mpi_util.cluster.hosts import Hosts, find
from mpi_util.launch.api import hosts_module

TWO = {"hosts": "h1:2,h2:2"}
KNOWN_S, GONE_S = 10, 10  # until a host that vanishes is known, and until nothing is left


def wait_until_started(process: subprocess.Popen) -> None:
    while (line := process.stderr.readline()) != "started\n":
        assert line, f"it has ended with status {process.wait()}"


def assert_nothing_is_left(machines: Machines, within: float = 3.0) -> None:
    end = time.monotonic() + within
    while any((left := machines.left()).values()):
        assert time.monotonic() < end, left
        time.sleep(0.1)


@pytest.mark.slow
def test_ranks_run_on_two_hosts(machines, mpi):
    status, out, err = machines.run("h1", mpi, RANKS / "hosts.py", json.dumps(TWO))
    assert (status, err) == (0, "started\n")
    places = [f"rank {k} of 4 is on h{1 + k // 2}" for k in range(4)]
    assert sorted(out.splitlines()) == [*places, "sum 0.0"]
    assert_nothing_is_left(machines)


@pytest.mark.slow
@pytest.mark.left_out(mpi="openmpi", where=[{"MPI_UTIL_HOSTS": "h2:3"}])
@pytest.mark.parametrize("where", [{"MPI_UTIL_HOSTS": "h2:1,localhost:2"}, {"MPI_UTIL_HOSTS": "h2:3"}], ids=str)
def test_rank_0_is_on_the_first_host(machines, mpi, where):
    status, out, err = machines.run("h1", mpi, RANKS / "hosts.py", '{"n": 3}', env=where)
    assert (status, err) == (0, "started\n")
    assert "rank 0 of 3 is on h2" in out and out.count(" on h2") == int(where["MPI_UTIL_HOSTS"][3])


@pytest.mark.slow
@pytest.mark.parametrize(("n", "coupling", "where"), [(4, "team", "h1:2,h2:2"), (2, "process", "h1:1,h2:1")])
def test_the_ranks_of_an_environment_are_on_one_host(machines, mpi, n, coupling, where):
    more = {"MPI_UTIL_HOSTS": where, "TEST_LAUNCHER": f"env -u MPI4PY_LIBMPI {LAUNCHER['mpich']}"}
    status, out, err = machines.run("h1", mpi, RANKS / "simulators.py", n, 2, coupling, "hosts", env=more)
    bits = run([sys.executable, RANKS / "simulators.py", 2, 2, "team"], 60).out.splitlines()
    assert (status, err) == (0, "") and sorted(out.splitlines()) == sorted(["0 h1 h1", "1 h2 h2", *bits])
    assert_nothing_is_left(machines)


@pytest.mark.slow
def test_a_single_rank_on_another_host_needs_no_hostfile_there(machines, tmp_path):
    machines.on("h1", "sh", "-c", "echo h2 >/tmp/only-on-h1")
    arguments = ("CartPole-v1", "--hostfile", "/tmp/only-on-h1", "--total_steps", 1000, "--run_dir", tmp_path / "run")
    status, out, err = machines.run("h1", "mpich", "train.py", *arguments)
    assert status == 0 and "1 process" in out, err


@pytest.mark.slow
@pytest.mark.left_out(mpi="openmpi")  # an experiment's ranks are started as any others
def test_experiments_on_two_hosts(machines, mpi, tmp_path):
    program = ROOT / "tests" / "ranks" / "experiment_hosts.py"
    where = {"MPI_UTIL_HOSTS": "h1:2,h2:2"}
    status, out, err = machines.run("h1", mpi, program, tmp_path, env=where)
    assert status == 0, err
    assert sorted(line for line in out.splitlines() if line.startswith("rank")) == [f"rank {k} of 4" for k in range(4)]
    assert not list((tmp_path / "x" / "x_s0").glob(".*.job"))
    status, out, err = machines.run("h1", mpi, program, "/tmp/not-shared", env=where)
    assert status == 1 and re.search(r"/tmp/not-shared/x/x_s0/\S+\.job is not on this host", err)
    machines.on("h1", "rm", "-r", "/tmp/not-shared")


@pytest.mark.slow
def test_a_host_that_greets_and_a_large_environment(machines):
    machines.on("h2", "sh", "-c", "echo 'echo Welcome to h2' >/root/.ssh/rc")  # as a login shell's files may
    try:
        arguments = (RANKS / "hosts.py", '{"hosts": "10.77.0.1:1,h2:1"}')
        status, out, err = machines.run("h1", "mpich", *arguments, env={"LARGE": "x" * 120_000})
    finally:
        machines.on("h2", "rm", "/root/.ssh/rc")
    assert (status, err) == (0, "started\n") and "rank 1 of 2 is on h2" in out


def test_main_job_on_two_hosts_has_the_bits_of_one_process(machines, mpi, tmp_path):
    one = ("train.py", *EPISODES, "--run_dir", tmp_path / "one")
    subprocess.run([sys.executable, *map(str, one)], cwd=ROOT, check=True, capture_output=True)
    arguments = ("--run_dir", tmp_path / "two", "--hosts", "h1:1,h2:2", "--log_dir", tmp_path / "log", "--tag_output")
    status, out, err = machines.run("h1", mpi, "train.py", *EPISODES, *arguments)
    assert status == 0, err
    first, second = (tmp_path / run / "policy.safetensors" for run in ("one", "two"))
    assert first.read_bytes() == second.read_bytes()
    assert all(line.startswith("[0@h1] ") for line in out.splitlines()) and "3 processes" in out
    logged = (tmp_path / "log" / "rank-0.txt").read_text()
    assert set(out.replace("[0@h1] ", "").splitlines()) <= set(logged.splitlines())


@pytest.mark.slow
def test_train_says_where_it_runs(machines, tmp_path):
    """The slots of the hosts are `--nprocs auto`, and the command that resumes names them."""
    arguments = ("--total_steps", 1200, "--batch_steps", 200, "--run_dir", tmp_path / "run", "--nprocs", "auto")
    status, out, err = machines.run("h1", "mpich", "train.py", "CartPole-v1", "--hosts", "h1:1,h2:2", *arguments)
    assert status == 0, err
    assert "CartPole-v1: ppo, seed 0, 3 processes" in out
    assert out.count(f"--resume {tmp_path}/run --hosts h1:1,h2:2") == 2
    status, out, err = machines.run("h1", "mpich", "train.py", "CartPole-v1", "--hosts", "h1:1,h9:2", *arguments)
    assert (status, out) == (2, "")
    assert re.fullmatch(r"train.py: these hosts cannot be used:\n  h9: ssh: Could not resolve .*\n", err)


@pytest.mark.slow
def test_a_log_dir_on_a_full_disk(mpi, small_disk):
    fork = f"mpi_util.mpi_fork(2, log_dir={str(small_disk)!r}) == 'parent'"
    program = f"import mpi_util\nif {fork}: exit()\nfor i in range(10_000): print('x' * 100)"
    finished = run([sys.executable, "-c", program], 60, mpi_environment(mpi))
    assert finished.status == 0 and finished.out.count("\n") == 20_000
    assert re.fullmatch(r"(mpi_util: log_dir: .*No space left.*; nothing more is written there\n){2}", finished.err)


FAILURES = [
    ("kill", 137, r"rank {0}@h\d was killed by signal 9 \(SIGKILL\)"),
    ("segv", 139, r"rank {0}@h\d was killed by signal 11 \(SIGSEGV\)"),
    ("exit", 3, r"rank {0}@h\d ended with status 3"),
    ("raise", 1, r"rank {0}@h\d ended with status 1 \(ZeroDivisionError: a bug\)"),
]


@pytest.mark.slow_unless(who=3, how=["kill", "raise"])
@pytest.mark.left_out(mpi="openmpi", how=["segv", "exit"])
@pytest.mark.parametrize(("how", "status", "line"), FAILURES, ids=[failure[0] for failure in FAILURES])
@pytest.mark.parametrize("who", [0, 3])
def test_a_rank_that_fails_is_named_with_its_host(machines, mpi, how, status, line, who):
    process = machines.start("h1", mpi, RANKS / "hosts.py", json.dumps(TWO), how, who)
    wait_until_started(process)
    begin = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - begin < 4  # it fails after some 0.5 s
    assert process.returncode == status
    last = err.splitlines()[-1]
    assert re.fullmatch(rf"mpi_util: {line.format(who)}.*; all 4 ranks were stopped", last)
    assert f"@h{1 + who // 2}" in last
    assert len(err.splitlines()) == 1 + (how == "raise") * (err.count("\n") - 1), err
    assert_nothing_is_left(machines)


@pytest.mark.slow
@pytest.mark.left_out(mpi="openmpi", what=["agent.main", "sshd: root"])  # which are ours, and ssh's
@pytest.mark.parametrize(
    ("what", "line"),
    [
        (
            "bin/hydra_pmi_prox|bin/prted",
            r"(rank \d@h2|a helper process of the launcher on h2) was killed by signal 9.*",
        ),
        ("agent.main", "host h2 is lost: its connection was closed"),
        ("sshd: root", "host h2 is lost: .*[Cc]onnection.*"),
    ],
    ids=["proxy", "agent", "sshd"],
)
def test_a_helper_that_is_killed_ends_the_job(machines, mpi, what, line):
    process = machines.start("h1", mpi, RANKS / "hosts.py", json.dumps(TWO), "work")
    wait_until_started(process)
    begin = time.monotonic()
    machines.on("h2", "pkill", "-9", "-f", what)
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - begin < 4
    assert re.fullmatch(rf"mpi_util: (?:{line}); all 4 ranks were stopped\n", err), err
    assert_nothing_is_left(machines)


@pytest.mark.slow_unless(how="kill")
@pytest.mark.left_out(mpi="openmpi", how="cut")
@pytest.mark.parametrize("how", ["cut", "kill"])
def test_a_host_that_vanishes_is_named(machines, mpi, how):
    process = machines.start("h1", mpi, RANKS / "hosts.py", json.dumps(TWO), "work")
    try:
        wait_until_started(process)
        begin = time.monotonic()
        getattr(machines, how)("h2")
        _, err = process.communicate(timeout=60)
        assert time.monotonic() - begin < KNOWN_S
        assert process.returncode == 1
        assert re.fullmatch(r"mpi_util: host h2 is lost: .*; all 4 ranks were stopped\n", err)
        if how == "cut":
            assert_nothing_is_left(machines, within=GONE_S)
            machines.heal("h2")
    finally:
        if how == "kill":
            machines.again()


@pytest.mark.slow
@pytest.mark.left_out(mpi="openmpi")  # how it ends under each is tested above
def test_restart_on_the_hosts_that_are_left(machines, mpi, tmp_path):
    """A power cut on h2: all ranks start again on h1, and go on from what was saved."""
    (tmp_path / "hostfile").write_text("h1 slots=1  # the first\nh2:2\n")
    arguments = {"hostfile": str(tmp_path / "hostfile"), "n": 3, "max_restarts": 1}
    process = machines.start("h1", mpi, RANKS / "hosts.py", json.dumps(arguments), "count")
    try:
        wait_until_started(process)
        machines.kill("h2")
        out, err = process.communicate(timeout=60)
    finally:
        machines.again()
    assert process.returncode == 0, err
    assert "mpi_util: restarting without host h2: ssh: " in err and "; restart 1 of 1\n" in err
    assert out.count("on h1") == 1 + 3 and out.endswith("sum 900.0\n")


@pytest.mark.slow
def test_interrupts_reach_rank_0_on_another_host(machines, mpi):
    for signals, status, words in (([signal.SIGINT], 130, "rank 0: interrupted"), ([signal.SIGTERM] * 2, 143, "")):
        process = machines.start("h1", mpi, RANKS / "hosts.py", '{"hosts": "h2:2,h1:1"}', "work")
        wait_until_started(process)
        pid = machines.on("h1", "pgrep", "-o", "-f", "^[^ ]*python[^ ]* .*ranks/hosts.py").split()[0]
        for signum in signals:
            machines.on("h1", "kill", f"-{signum.value}", pid)
            time.sleep(0.5)
            if process.poll() is not None:
                break
        _, err = process.communicate(timeout=30)
        # the last signal may come when all has ended but the interpreter of the parent
        assert process.returncode in (status, -signals[-1]) and words in err and "Socket closed" not in err, err
        assert_nothing_is_left(machines)


@pytest.mark.slow
def test_nothing_is_left_when_the_parent_is_killed(machines, mpi):
    process = machines.start("h1", mpi, RANKS / "hosts.py", json.dumps(TWO), "work")
    wait_until_started(process)
    machines.on("h1", "sh", "-c", "kill -9 $(pgrep -o -f '^[^ ]*python[^ ]* .*ranks/hosts.py')")
    assert_nothing_is_left(machines, within=GONE_S)
    process.communicate()


@pytest.mark.slow
@pytest.mark.left_out(mpi="openmpi")  # all of it is found before an MPI starts
def test_hosts_that_cannot_be_used_have_a_line_each(machines, mpi, tmp_path):
    program = RANKS / "hosts.py"
    status, out, err = machines.run("h1", mpi, program, '{"hosts": "h1,h2,h9,10.77.0.2,10.77.0.9"}')
    assert status == 2 and not out
    assert "h1: it is localhost, by another name" in machines.run("h1", mpi, program, '{"hosts": "localhost,h1"}')[2]
    head, *lines = err.splitlines()
    assert head.endswith("HostError: these hosts cannot be used:") and len(lines) == 3
    assert re.search(r"^  h9: ssh: Could not resolve", err, re.M)
    assert re.search(r"^  10\.77\.0\.9: ssh: connect to host .*: No route to host", err, re.M)
    assert re.search(r"^  (h2|10\.77\.0\.2): it is (h2|10\.77\.0\.2), by another name$", err, re.M)
    begun = f"cd /tmp/here && {sys.executable} {{}}"
    machines.on("h1", "sh", "-c", f"rm -rf /tmp/here && mkdir /tmp/here && cp {program} /tmp/here")

    def wrong(there: str, command: str) -> str:
        machines.on("h2", "sh", "-c", there)
        process = machines.start("h1", mpi, "-c", "import os, sys; os.execvp('sh', ['sh', '-c', sys.argv[1]])", command)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 2 and not out, err
        return err.splitlines()[1]

    start = begun.format(f"hosts.py '{json.dumps(TWO)}'")
    assert wrong("rm -rf /tmp/here", start) == "  h2: it has no folder /tmp/here"
    assert wrong("mkdir /tmp/here", start) == "  h2: it has no /tmp/here/hosts.py"
    differs = wrong("echo 1 >/tmp/here/hosts.py", start)
    assert re.fullmatch(r"  h2: it has /tmp/here/hosts.py \w+; here it is \w+", differs)
    python = f"ln -sfn {sys.prefix} /tmp/env && cd /tmp && /tmp/env/bin/python {program} '{json.dumps(TWO)}'"
    assert wrong("true", python) == "  h2: it has no /tmp/env/bin/python"
    other = f"mkdir -p /tmp/copy && cp -r {ROOT}/mpi_util /tmp/copy/"
    machines.on("h1", "sh", "-c", other)
    machines.on("h2", "sh", "-c", f"{other} && echo >>/tmp/copy/mpi_util/__init__.py")
    copy = f"PYTHONPATH=/tmp/copy {sys.executable} {program} '{json.dumps(TWO)}'"
    assert re.fullmatch(r"  h2: it has mpi_util .*; here it is .*", wrong("true", copy))


OWN_CODE = """
import sys, mpi_util
if mpi_util.mpi_fork(hosts="h1:2,h2:2") == "parent": sys.exit()
import mine
try:
    print("first", mpi_util.bcast(1))
except mpi_util.RankMismatchError as error:
    print("caught", mpi_util.bcast(str(error)))
import mine.late, installed
mpi_util.bcast(1)
"""


def test_hosts_that_load_different_code_are_named(machines):
    """Modules of the program at the first call, and what is loaded later at the next; packages by their versions."""
    same = "mkdir -p /tmp/own/mine /tmp/own/site-packages && cd /tmp/own && touch mine/__init__.py mine/late.py"
    package = "echo '__version__ = \"1.{}\"' >site-packages/installed.py"
    machines.on("h1", "sh", "-c", f"{same} && {package.format('0+cpu')}")

    def run_own_code(there: str) -> tuple[int, list[str], str]:
        machines.on("h2", "sh", "-c", f"{same} && {there}")
        where = {"PYTHONPATH": f"{ROOT}:/tmp/own:/tmp/own/site-packages"}
        status, out, err = machines.run("h1", "mpich", "-c", OWN_CODE, env=where)
        return status, sorted(set(out.splitlines())), err

    status, (line,), err = run_own_code(f"{package.format('0+cuda')} && echo x=1 >mine/__init__.py")
    assert (status, err) == (0, "")
    assert re.search(r"^caught hosts have loaded different code, 1 in all: mine \(\w+ on h1, \w+ on h2\); give", line)
    status, out, err = run_own_code(f"{package.format(1)} && echo x=1 >mine/late.py; >mine/__init__.py")
    assert (status, out) == (1, ["first 1"])
    found = r"installed \(1.0 on h1, 1.1 on h2\), mine.late \(\w+ on h1, \w+ on h2\)"
    line, last = err.splitlines()
    assert re.fullmatch(rf"rank 0: .*RankMismatchError: hosts .* code, 2 in all: {found}; give .*", line)
    assert last == "mpi_util: all 4 ranks were stopped"


@pytest.mark.parametrize(
    ("slots", "n", "expected"),
    [
        ({"a": 2, "b": 2}, 4, {"a": [0, 1], "b": [2, 3]}),
        ({"a": 2, "b": 2}, 3, {"a": [0, 1], "b": [2]}),
        ({"a": 2, "b": 2}, 1, {"a": [0]}),
        ({"a": 1, "b": 3}, 8, {"a": [0, 1], "b": [2, 3, 4, 5, 6, 7]}),
        ({"a": 1, "b": 1}, 3, {"a": [0], "b": [1, 2]}),
    ],
)
def test_where_ranks_are(slots, n, expected):
    assert Hosts(slots).ranks_by_host(n) == expected


def test_which_hosts(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    file = tmp_path / "hostfile"
    file.write_text("# ours\nh1:4\n\nh2 slots=2 max_slots=4\nh3  # one\nh1\n")
    assert find(None, file).slots == {"h1": 5, "h2": 2, "h3": 1}
    assert find("a:2, b", None).slots == {"a": 2, "b": 1}
    monkeypatch.setenv("MPI_UTIL_HOSTS", "c:3")
    assert find(None, None).slots == {"c": 3} and find("a", None).slots == {"a": 1}
    assert hosts_module(None, None) and not hosts_module(None, None, nested=True)
    assert hosts_module("a", None, nested=True)
    monkeypatch.setenv("MPI_UTIL_HOSTS", "")
    assert not hosts_module(None, None)
    assert not find(None, None).slots
    for wrong in ("h1:0", "h1:x", "h1 slots=x", "h1;h2", ":3", ""):
        with pytest.raises(LaunchError, match="is no host"):
            find(wrong, None)
    with pytest.raises(LaunchError, match=r"is no host; .*; a user's name belongs in ~/.ssh/config"):
        find("ann@h1:2", None)
    for bad in (("a", file), (None, tmp_path / "none"), (None, tmp_path)):
        with pytest.raises(LaunchError):
            find(*bad)
    assert HostError({"a": "b"}).status == 2


def test_the_hosts_of_a_slurm_allocation(tmp_path, monkeypatch):
    for name in ("scontrol", "srun"):
        (tmp_path / name).write_text("#!/bin/sh\nprintf 'n1\\nn2\\nn3\\n'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("MPI_UTIL_HOSTS", raising=False)
    allocation = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "4(x2),1", "SLURM_JOB_NUM_NODES": "3"}
    for name, value in allocation.items():
        monkeypatch.setenv(name, value)
    assert hosts_module(None, None) and not hosts_module(None, None, nested=True)
    assert find(None, None).slots == {"n1": 4, "n2": 4, "n3": 1} and find(None, None).shell[0] == "srun"
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    assert not find(None, None).slots
