"""`python -m mpi_util.serve my_env:make`, in processes of its own: what `simulator(command=...)` starts.

The first rank speaks to the worker that has started them, and makes each call with the others, as a team does.
"""

import argparse
import contextlib
import os
import socket
from typing import Any

from .collectives.channel import open_teams
from .errors import UsageError
from .ranks import failure
from .ranks.identity import Role, under_launcher, world
from .ranks.state import state
from .simulators.team import Request, Team, last_lines
from .simulators.wire import ADDRESS, Wire


def main() -> None:
    """Serves until the worker ends, or closes the environment."""
    parser = argparse.ArgumentParser("python -m mpi_util.serve", description="what simulator(command=...) starts")
    parser.add_argument("make", metavar="MODULE:FUNCTION", help="makes the environment")
    parser.add_argument("--ranks", type=int, metavar="N", help="only the first N of COMM_WORLD serve (MPMD)")
    options = parser.parse_args()
    failure.install()
    if ADDRESS not in os.environ:
        raise UsageError("mpi_util.serve is for the command of mpi_util.simulator(command=...)")
    name, *key = os.environ.pop(ADDRESS).split()
    everyone: Any = world()
    if (size := options.ranks or state(Role).size) > 1 and under_launcher():
        open_teams(size, everyone.Create_group(everyone.Get_group().Incl(range(size))) if options.ranks else None)
    state(Role).ranks_per_env = size
    team = state(Team)
    if team.rank:
        team.serve(options.make)
    team.make_env = options.make
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(f"\0{name}")
        wire = Wire(sock, *key)
    with contextlib.suppress(EOFError, OSError):  # of the wire: the worker has ended
        while True:
            number, what = wire.receive()
            try:
                wire.send(number, ["result", team.call(Request(*what))])
            except Exception as error:
                wire.send(number, ["error", type(error).__name__, last_lines(error)])


if __name__ == "__main__":
    main()
