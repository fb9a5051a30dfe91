"""`python -m mpi_util.serve`: serves an environment to the worker that has started it, in processes of its own.

The first rank speaks to the worker, and makes each call with the others as a worker does with its team.
"""

import argparse
import os
import socket
from typing import Any

from ..collectives.channel import open_teams
from ..errors import UsageError
from ..ranks import failure
from ..ranks.identity import Role, under_launcher, world
from ..ranks.state import state
from .calls import Request, last_lines
from .team import Team
from .wire import ADDRESS, KEY, KEY_BYTES, KIND, Wire


def main(arguments: list[str]) -> int:
    """Serves until the worker ends, or closes the environment. Returns the exit status."""
    parser = argparse.ArgumentParser("python -m mpi_util.serve", description="what simulator(command=...) starts")
    parser.add_argument("target", help="module:function, which makes the environment, or a Gymnasium id")
    parser.add_argument("--ranks", type=int, default=0, help="of COMM_WORLD only the first so many serve (MPMD)")
    options = parser.parse_args(arguments)
    failure.install()
    if ADDRESS not in os.environ:
        raise UsageError("python -m mpi_util.serve is started by mpi_util.simulator(command=...), and not by hand")
    folder, key = os.environ.pop(ADDRESS), bytes.fromhex(os.environ.pop(KEY))
    if under_launcher():
        comm: Any = world()
        if (size := options.ranks or comm.Get_size()) > 1:
            open_teams(size, comm.Create_group(comm.Get_group().Incl(range(options.ranks))) if options.ranks else None)
    state(Role).ranks_per_env = 1
    team, make = state(Team), options.target
    if team.rank:
        team.serve(make)
    with socket.socket(*KIND) as sock:
        fd = os.open(folder, os.O_RDONLY)
        sock.connect(f"/proc/self/fd/{fd}/socket")
        os.close(fd)
        wire = Wire(sock)
        if wire.prove(key[:KEY_BYTES], key[KEY_BYTES:]):
            _serve(wire, team, make)
    return 0


def _serve(wire: Wire, team: Team, make: Any) -> None:
    team.environments.make = make
    while True:
        try:
            number, what = wire.receive()
        except EOFError:
            return
        try:
            answer: list[Any] = ["result", team.call(Request(*what))]
        except (Exception, SystemExit) as error:
            answer = ["error", type(error).__name__, last_lines(error)]
        try:
            wire.send(number, answer)
        except UsageError as error:  # a result that cannot be sent
            wire.send(number, ["error", "UsageError", str(error)])
