"""Slurm over two pretended hosts (slurm.sh): batch scripts, srun with each --mpi, scancel, requeue."""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import RANKS, ROOT, TESTS, mpi_environment
from machines import Machines

pytestmark = pytest.mark.slow  # Slurm starts a job within seconds, and takes some to see that it has ended
TOOLS = ("sbatch", "srun", "slurmctld", "slurmd", "munged")
PLACES = {f"rank {k} of 4 is on h{1 + k // 2}" for k in range(4)}


class Slurm:
    """Slurm on the pretended hosts; commands run on h1."""

    def __init__(self, hosts: Machines):
        self._hosts = hosts
        command = ["bash", str(TESTS / "cluster" / "slurm.sh"), "up", "2"]
        done = subprocess.run(command, env=hosts._environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        self._conf = done.stdout.strip().splitlines()[-1]

    def call(self, *words: object, status: int | None = 0) -> str:
        """What a command of Slurm prints."""
        command = self._hosts.command("h1", "env", self._conf, *words)
        environment = {name: value for name, value in self._hosts._environment.items() if name != "TMPDIR"}
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=90)
        assert status in (None, done.returncode), done.stdout + done.stderr
        return done.stdout + done.stderr

    def batch(self, folder: Path, mpi: str, *lines: str) -> tuple[str, Path]:
        """Submits a script that ends with these lines; returns the job's id and the file of its output."""
        script, output = folder / "job.sh", folder / "output.txt"
        variables = [f"export {name}={value}" for name, value in mpi_environment(mpi).items()]
        head = ["#!/bin/bash", "#SBATCH --nodes=2 --ntasks-per-node=2 --requeue --open-mode=append"]
        script.write_text("\n".join([*head, f"cd {ROOT}; export PYTHONPATH={ROOT}", *variables, *lines, ""]))
        return self.call("sbatch", "--parsable", "-o", output, script).strip(), output

    def wait(self, job: str, state: str = "") -> None:
        """Until the job is in that state; "": until it has ended."""
        end = time.monotonic() + 60
        while (now := self.call("squeue", "-h", "-o", "%T", "-j", job, status=None).strip()) != state:
            if "Invalid job" in now and not state:
                return
            assert time.monotonic() < end, now
            time.sleep(0.3)


@pytest.fixture(scope="module")
def slurm(machines: Machines) -> Iterator[Slurm]:
    """Slurm; skipped where it is not installed."""
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        pytest.skip(f"no {', '.join(missing)}: apt-get install slurm-wlm munge libpmix-dev")
    yield Slurm(machines)


def wait_for(output: Path, text: str) -> None:
    end = time.monotonic() + 60
    while not output.exists() or not re.search(text, output.read_text()):
        assert time.monotonic() < end, output.read_text() if output.exists() else "no output"
        time.sleep(0.2)


def test_a_batch_script_uses_the_whole_allocation(slurm, mpi, tmp_path):
    job, output = slurm.batch(tmp_path, mpi, f"""{sys.executable} {RANKS}/hosts.py '{{"n": 4}}'""")
    slurm.wait(job)
    assert set(output.read_text().splitlines()) == {*PLACES, "started", "sum 0.0"}


def test_the_ranks_of_a_team_are_on_one_host(slurm, mpi, tmp_path):
    job, output = slurm.batch(tmp_path, mpi, f"{sys.executable} {RANKS}/simulators.py 4 2 team hosts")
    slurm.wait(job)
    assert {"0 h1 h1", "1 h2 h2"} <= set(output.read_text().splitlines())


@pytest.mark.parametrize("option", ["--mpi=pmi2", "--mpi=pmix", "--mpi=none"])
def test_tasks_of_srun_are_ranks_or_are_refused(slurm, mpi, option):
    right = {"mpich": "--mpi=pmi2", "openmpi": "--mpi=pmix"}[mpi]
    variables = [f"{name}={value}" for name, value in (mpi_environment(mpi) | {"PYTHONPATH": str(ROOT)}).items()]
    program = (sys.executable, RANKS / "hosts.py", '{"n": 4}')
    text = slurm.call("env", *variables, "timeout", "60", "srun", option, "-N2", "-n4", *program, status=None)
    if option == right:
        assert len(set(re.findall(r"rank \d of 4 is on h\d", text))) == 4 and "sum 0.0" in text
    else:
        assert "rank 0 of" not in text
        assert text.count(f"use srun {right}") == text.count("LaunchError") == 1 and "Abort" not in text


def test_train_in_tasks_that_are_alone_says_so_once(slurm):
    words = ("srun", "-N2", "-n2", sys.executable, "train.py", "CartPole-v1", "--nprocs", "4")
    text = slurm.call("timeout", "60", *words, status=None)
    assert text.count("train.py: srun has started this program 2 times, and each of them is alone; use srun") == 1


@pytest.mark.parametrize("how", ["scancel", "scancel --signal=TERM --batch", "requeue"])
def test_a_signal_of_slurm_ends_training_in_order(slurm, mpi, tmp_path, how):
    run = tmp_path / "run"
    job, output = slurm.batch(
        tmp_path, mpi,
        f"if [ -e {run}/config.json ]; then set -- --resume {run} --total_steps 1000000000; ",
        f"else set -- CartPole-v1 --total_steps 1000000000 --run_dir {run}; fi",
        f'exec {sys.executable} train.py "$@" --nprocs 4',
    )  # fmt: skip
    wait_for(output, r"\n +3 ")
    if how == "requeue":
        slurm.call("scontrol", "requeue", job)
    else:
        slurm.call(*how.split(), job)
    wait_for(output, r"stopped: \d+ iterations")
    text = output.read_text()
    assert "second signal" not in text and "lost" not in text
    done = int(re.search(r"stopped: (\d+) iterations", text)[1])
    if how == "requeue":
        slurm.wait(job, "PENDING")
        slurm.call("scontrol", "release", job)
        slurm.call("scontrol", "update", f"jobid={job}", "starttime=now")
        wait_for(output, rf"\n +{done + 2} ")
        slurm.call("scancel", job)
    slurm.wait(job)
