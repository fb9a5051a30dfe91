"""Environments that are MPI programs, as their users have them: a flow on several ranks, MPMD, OpenFOAM, DOLFINx."""

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import LAUNCHER, ROOT, mpi_environment, run

LIMIT_S = 200
FLOW = [sys.executable, "examples/simulators.py", "--iterations", "4", "--candidates", "12"]
SERVE, FLOWS = [sys.executable, "-m", "mpi_util.serve"], "examples.kuramoto:make"
OPTIONS = {"mpich": [], "openmpi": ["--allow-run-as-root", "--oversubscribe"]}
# One worker, or more, takes each of SEEDS, and prints a checksum of what it saw, which does not depend on who took it.
PLAY = """
import importlib, json, sys
import mpi_util
if mpi_util.mpi_fork(int(sys.argv[1]), ranks_per_env=1) == "parent":
    sys.exit()
import numpy as np
make, given, steps = sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])
if make:
    env = getattr(importlib.import_module(make), "make")()
else:
    env = mpi_util.simulator(**given)
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


def play(n: int, folder: Path, make: str = "", steps: int = 5, **given) -> str:
    """The checksum of two episodes that n workers have played; their observations are in obs-N.npy.

    Args: make: module with the environment; or given: what `simulator` is given.
    """
    program = folder / "play.py"
    program.write_text(PLAY)
    return checksum([sys.executable, program, n, make, json.dumps(given), steps, folder / f"obs-{n}.npy"])


@pytest.mark.slow_unless(n=2, k=1)
@pytest.mark.parametrize(("n", "k"), [(2, 1), (3, 1), (2, 2), (4, 2)])
def test_a_flow_has_the_same_bits_on_any_workers_and_ranks(n, k):
    found = checksum([*FLOW, "--nprocs", n, "--ranks_per_env", k])
    assert found == checksum([*FLOW, "--nprocs", 1])


@pytest.mark.slow
def test_a_flow_has_the_same_bits_as_a_process(mpi):
    command = with_variables(mpi_environment(mpi), str(LAUNCHER[mpi]), *OPTIONS[mpi], "-n", "2", *SERVE, FLOWS)
    assert checksum([*FLOW, "--command", shlex.join(command)]) == checksum([*FLOW, "--nprocs", 1])


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2])
def test_a_controller_and_a_solver_in_c_share_comm_world(mpi, k, tmp_path):
    mpicc = Path(LAUNCHER[mpi]).with_name("mpicc")
    if not mpicc.exists() or not shutil.which("gcc"):
        pytest.skip(f"no {mpicc}, or no gcc")
    solver = tmp_path / "kuramoto_solver"
    subprocess.run([mpicc, "-O2", "-o", solver, "examples/kuramoto_solver.c", "-lm"], cwd=ROOT, check=True)
    controller = ["-n", "1", *SERVE, "examples.kuramoto_mpmd:make", "--ranks", "1"]
    together = [str(LAUNCHER[mpi]), *OPTIONS[mpi], *controller, ":", "-n", str(k), str(solver)]
    command = with_variables(mpi_environment(mpi), *together)
    one, two = (play(n, tmp_path, command=command) for n in (1, 2))
    assert one == two
    (in_python := tmp_path / "python").mkdir()
    play(1, in_python, command=[*SERVE, FLOWS])
    np.testing.assert_allclose(np.load(tmp_path / "obs-1.npy"), np.load(in_python / "obs-1.npy"), atol=1e-9)


@pytest.mark.slow
def test_openfoam_on_two_ranks(tmp_path):
    if not shutil.which("icoFoam"):
        pytest.skip("no OpenFOAM: apt-get install openfoam")
    one, two = (play(n, tmp_path, make="examples.cavity_openfoam", steps=2) for n in (1, 2))
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
        one, two = (play(n, tmp_path, command=with_variables(env, *serve)) for n in (1, 2))
        seen[k] = np.load(tmp_path / "obs-1.npy")
        assert one == two or k > 1  # DOLFINx does not share a mesh among ranks in the same way each time
    np.testing.assert_allclose(seen[1], seen[2], atol=1e-6)
