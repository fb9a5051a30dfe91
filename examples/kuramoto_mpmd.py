"""kuramoto.py's environment as two programs that share COMM_WORLD: this controller, and a solver in C.

    mpicc -O2 -o kuramoto_solver examples/kuramoto_solver.c -lm
    python train.py --nprocs 2 --env_command \
        "mpiexec -n 1 python -m mpi_util.serve examples.kuramoto_mpmd:make --ranks 1 : -n 2 ./kuramoto_solver"

Both programs need one MPI: the one of mpicc. `mpi_util.serve` is this controller, on rank 0 of COMM_WORLD; the solver
has the ranks from 1 on. Each call of the environment is a command that rank 0 broadcasts; rank 1 answers.
"""

from typing import Any

import numpy as np

from examples.kuramoto import ACTUATORS, POINTS, SENSORS, Kuramoto

STOP, RESET, STEP = range(3)  # as in kuramoto_solver.c


class Controller(Kuramoto):
    """Kuramoto on one rank, where another program has the flow."""

    def __init__(self, world: Any):
        self.world, self.points = world, POINTS
        world.Split(0)  # the solver makes a communicator of its own, in which all ranks of COMM_WORLD take part
        self.answer = np.empty((SENSORS, 2))

    def tell(self, command: int, action: Any = (0.0,) * ACTUATORS) -> None:
        self.world.Bcast(np.array([command, *action], np.float64))

    def begin(self, field: np.ndarray) -> None:
        self.tell(RESET)
        self.world.Bcast(field)
        self.world.Recv(self.answer, source=1)

    def advance(self, action: np.ndarray) -> None:
        self.tell(STEP, action)
        self.world.Recv(self.answer, source=1)

    def look(self) -> tuple[np.ndarray, float]:
        return self.answer[:, 0].copy(), float(self.answer[:, 1].mean())

    def close(self) -> None:
        self.tell(STOP)


def make() -> Controller:
    """The environment on rank 0 of COMM_WORLD."""
    from mpi4py import MPI

    return Controller(MPI.COMM_WORLD)
