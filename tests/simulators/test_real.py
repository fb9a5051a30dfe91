"""Environments that are MPI programs, as their users have them: a flow on several ranks, MPMD, OpenFOAM, DOLFINx."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import LAUNCHER, ROOT, mpi_environment, run

LIMIT_S = 200
FLOW = [sys.executable, "examples/simulators.py", "--iterations", "5", "--candidates", "12"]
SERVE, FLOWS = [sys.executable, "-m", "mpi_util.serve"], "examples.kuramoto:make"
OPTIONS = {"mpich": [], "openmpi": ["--allow-run-as-root", "--oversubscribe"]}
# One worker, or more, takes each of SEEDS, and prints a checksum of what it saw, which does not depend on who took it.
PLAY = """
import importlib, json, sys
import mpi_util
n, k, steps = map(int, sys.argv[1:4])
if mpi_util.mpi_fork(n * k, ranks_per_env=k) == "parent":
    sys.exit()
import numpy as np
module, command = json.loads(sys.argv[4])
make = getattr(importlib.import_module(module), "make") if module else None
env = mpi_util.simulator(make, command=command)
def play(seed, rng):
    rows, rewards = [env.reset(seed=seed)[0]], []
    for _ in range(steps):
        obs, rew, *_ = env.step(rng.uniform(env.action_space.low, env.action_space.high))
        rows.append(obs)
        rewards.append(rew)
    return {"obs": np.stack(rows), "rew": np.array(rewards)}
batch = mpi_util.collect(play, episodes=2, weights={"w": np.zeros(1)}, seed=3)
if batch is not None:
    assert np.isfinite(batch["obs"]).all() and np.ptp(batch["rew"]) > 0
    np.save(sys.argv[5], batch["obs"])
    print("checksum", mpi_util.chksum({key: np.asarray(x) for key, x in batch.items()}))
env.close()
"""


def with_variables(variables: dict[str, str], *command: str) -> list[str]:
    return ["env", *(f"{name}={value}" for name, value in variables.items()), *command]


def checksum(command: list, **more) -> str:
    done = run(command, LIMIT_S, **more)
    assert done.status == 0, f"{done.out}\n{done.err}"
    return re.search(r"^checksum (\w{16})$", done.out, re.MULTILINE)[1]


def play(folder: Path, n: int, module: str = "", command: list[str] | None = None, k: int = 1, steps: int = 5) -> str:
    """The checksum of two episodes that n workers have played; their observations are in obs-N.npy.

    Args: module, k: its `make`, on k ranks; or command: what serves the environment.
    """
    (program := folder / "play.py").write_text(PLAY)
    return checksum([sys.executable, program, n, k, steps, json.dumps([module, command]), folder / f"obs-{n}.npy"])


@pytest.mark.slow
def test_the_example_learns_with_the_same_bits_on_any_workers():
    one, three = (run([*FLOW, "--nprocs", n], LIMIT_S) for n in (1, 3))
    assert one.status == 0 and one.out == three.out, one.err + three.err
    returns = [float(x) for x in re.findall(r"return (\S+)$", one.out, re.MULTILINE)]
    assert returns[-1] > returns[0] + 200


@pytest.mark.slow_unless(mpi="mpich", n=1)
@pytest.mark.left_out(mpi="openmpi", n=1)
@pytest.mark.parametrize("n", [1, 2])
def test_a_flow_has_the_same_bits_on_any_workers_and_ranks(mpi, n, tmp_path, monkeypatch):
    alone = play(tmp_path, 1, "examples.kuramoto")
    command = with_variables(mpi_environment(mpi), str(LAUNCHER[mpi]), *OPTIONS[mpi], "-n", "2", *SERVE, FLOWS)
    assert play(tmp_path, n, command=command) == alone
    for name, value in mpi_environment(mpi).items():
        monkeypatch.setenv(name, value)
    assert play(tmp_path, n, "examples.kuramoto", k=2) == alone


@pytest.mark.slow
@pytest.mark.parametrize(("mpi", "k"), [("mpich", 1), ("openmpi", 2)], indirect=["mpi"])
def test_a_controller_and_a_solver_in_c_share_comm_world(mpi, k, tmp_path):
    mpicc = Path(LAUNCHER[mpi]).with_name("mpicc")
    if not mpicc.exists() or not shutil.which("gcc"):
        pytest.skip(f"no {mpicc}, or no gcc")
    solver = tmp_path / "kuramoto_solver"
    subprocess.run([mpicc, "-O2", "-o", solver, "examples/kuramoto_solver.c", "-lm"], cwd=ROOT, check=True)
    controller = ["-n", "1", *SERVE, "examples.kuramoto_mpmd:make", "--ranks", "1"]
    together = [str(LAUNCHER[mpi]), *OPTIONS[mpi], *controller, ":", "-n", str(k), str(solver)]
    command = with_variables(mpi_environment(mpi), *together)
    one, two = (play(tmp_path, n, command=command) for n in (1, 2))
    assert one == two
    (in_python := tmp_path / "python").mkdir()
    play(in_python, 1, command=[*SERVE, FLOWS])
    np.testing.assert_allclose(np.load(tmp_path / "obs-1.npy"), np.load(in_python / "obs-1.npy"), atol=1e-9)


@pytest.mark.slow
def test_openfoam_on_two_ranks(tmp_path):
    if not shutil.which("icoFoam"):
        pytest.skip("no OpenFOAM: apt-get install openfoam")
    one, two = (play(tmp_path, n, "examples.cavity_openfoam", steps=2) for n in (1, 2))
    assert one == two


DEBIAN = "/usr/bin/python3"
NEEDS = ("gymnasium", "cloudpickle", "farama_notifications", "typing_extensions")  # all of them plain Python


@pytest.mark.slow
def test_dolfinx_under_an_mpi_and_a_python_of_its_own(tmp_path):
    if subprocess.run([DEBIAN, "-c", "import dolfinx"], capture_output=True).returncode:
        pytest.skip("no DOLFINx: apt-get install python3-dolfinx")
    for name in NEEDS:
        found = Path(importlib.util.find_spec(name).origin)
        found = found.parent if found.name == "__init__.py" else found
        (tmp_path / found.name).symlink_to(found)
    env = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "OMPI_MCA_mpi_yield_when_idle": "1"}
    env |= dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    seen = {}
    for k in (1, 2):
        serve = ["mpirun.openmpi", "-n", str(k), DEBIAN, "-m", "mpi_util.serve", "examples.heat_dolfinx:make"]
        one, two = (play(tmp_path, n, command=with_variables(env, *serve)) for n in (1, 2))
        seen[k] = np.load(tmp_path / "obs-1.npy")
        assert one == two or k > 1  # DOLFINx does not share a mesh among ranks in the same way each time
    np.testing.assert_allclose(seen[1], seen[2], atol=1e-6)
