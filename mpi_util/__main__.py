"""python -m mpi_util doctor: will a job run here, and if not, what is to be done."""

import argparse
import sys

from .collectives import trial
from .launch import doctor


def main() -> int:
    """Runs the command that the command line names; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m mpi_util", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    told = commands.add_parser(
        "doctor", help="check this machine, and run a real job of two ranks", description=doctor.examine.__doc__
    )
    told.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    told.add_argument(
        "--timeout", type=float, default=10.0, metavar="S", help="end within S seconds (default: %(default)s)"
    )
    told.add_argument("--part", choices=[*doctor.PARTS, doctor.TRIAL], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part == doctor.TRIAL:
        return trial.run()
    return doctor.write_part(args.part) if args.part else doctor.report(doctor.examine(args.timeout), args.json)


if __name__ == "__main__":
    sys.exit(main())
