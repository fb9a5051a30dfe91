"""The README's program runs as it is printed, and its commands are the ones that work."""

import configparser
import re
import sys

import pytest
from conftest import ROOT, mpi_environment, run

README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("n", [1, 4])
def test_the_eight_steps_are_a_program(tmp_path, mpi, n):
    program = tmp_path / "program.py"
    program.write_text("\n".join(re.findall(r"```python\n(.*?)```", README, re.DOTALL)))
    done = run([sys.executable, program, n], 60, mpi_environment(mpi))
    assert done.status == 0, done.err
    lines = done.out.splitlines()
    assert len(lines) == 10 and lines[-1].endswith("of 40 episodes")
    first, last = (float(re.search(r"return ([\d.]+)", line)[1]) for line in (lines[0], lines[-1]))
    assert last > 3 * first  # it learns


def test_every_public_name_is_in_the_readme():
    import mpi_util

    errors = {name for name in mpi_util.__all__ if name.endswith("Error")}
    assert all(name in README for name in set(mpi_util.__all__) - errors - {"usable_cores"})


def test_the_commands_name_extras_that_exist():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    named = set(re.findall(r"'\.\[(\w+)\]'", README))
    assert named == {"train", "test"} and named <= set(setup["options.extras_require"])
