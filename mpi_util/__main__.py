"""python -m mpi_util doctor: will a job run here, and if not, what is to be done."""

import argparse
import sys

from .launch import doctor


def main() -> int:
    """Runs the command that the command line names; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m mpi_util", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    options = commands.add_parser(
        "doctor", help="check this machine, and run a real job of two ranks", description=doctor.examine.__doc__
    )
    options.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    options.add_argument(
        "--timeout", type=float, default=10.0, metavar="S", help="end within S seconds (default: %(default)s)"
    )
    args = parser.parse_args()
    if not 1 <= args.timeout < 1e6:
        options.error(f"--timeout is {args.timeout:g}; it must be a number of seconds, 1 or more")
    try:
        checks = doctor.examine(args.timeout)
    except OSError as error:  # not even its own parts could be started
        parser.exit(1, f"{parser.prog}: {error}; see the limits of `ulimit -a`\n")
    return doctor.report(checks, args.json)


if __name__ == "__main__":
    sys.exit(main())
