"""`python -m mpi_util doctor`, or `mpi-util doctor`, in a process of its own: will a job run on this machine."""

import importlib
import sys

USAGE = """usage: python -m mpi_util doctor [--json] [--timeout S]

  doctor   will a job run on this machine, and if not, what is to be done"""


def main() -> int:
    """Runs the command that the command line names; returns the exit status."""
    command, *arguments = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help"):
        print(USAGE)
        return 0
    if command != "doctor":
        print(f"mpi_util: unknown command {command!r}; there is one: doctor", file=sys.stderr)
        return 2
    try:
        return int(importlib.import_module(".doctor.checks", __package__).main(arguments))
    except ModuleNotFoundError as error:
        hint = "this copy of mpi_util lacks that folder" if "doctor" in str(error) else f"pip install {error.name}"
        print(f"mpi_util doctor: {error}; {hint}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
