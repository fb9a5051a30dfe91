"""Control of the Kuramoto-Sivashinsky equation: an environment that is an MPI program.

    python train.py examples.kuramoto:make --nprocs 2 --ranks_per_env 1  # 2 workers; one rank steps an environment
    python train.py examples.kuramoto:make --nprocs 4 --ranks_per_env 2  # 2 workers; two ranks step one together

    u_t = -u u_x - u_xx - u_xxxx + sum_i a_i g(x - x_i)        on a ring of length 22, where it is chaotic

Four actuators g push the flow, one part against the others; eight sensors show its mean over an eighth of the ring. The
reward of a step is 1 - mean(u^2) - 0.1 mean(a^2): about -0.7 without control, 1 for a flow at rest (Bucci et al. 2019,
arXiv:1906.07672).

Each rank has its part of the ring, and gets two points of each neighbour before a time step. Sums are made in the order
of the sensors, so that the bits are the same for 1, 2, 4 and 8 ranks.
"""

from typing import Any

import gymnasium as gym
import numpy as np

LENGTH, POINTS = 22.0, 32
SENSORS, ACTUATORS, WIDTH = 8, 4, 1.4  # WIDTH: standard deviation of an actuator's Gaussian
TIME_STEP, SUBSTEPS = 0.02, 12  # explicit Euler is stable up to 0.03 with these points
START, STEPS = 80, 200  # steps without control in a reset, and with it in an episode
HALO = 2  # points of each neighbour, which the fourth derivative needs


class Kuramoto(gym.Env):
    """Every rank of `comm` makes the same calls; what the first one returns counts.

    Args:
        comm: of mpi4py; its size divides 8.
        lengths: the ring's length in units of 22, with as many times more points.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (SENSORS,), np.float64)
    action_space = gym.spaces.Box(-1.0, 1.0, (ACTUATORS,), np.float64)

    def __init__(self, comm: Any, lengths: int = 1):
        self.comm, self.points = comm, lengths * POINTS
        if SENSORS % comm.size:
            raise ValueError(f"{comm.size} ranks: {SENSORS} sensors are shared by 1, 2, 4 or 8 ranks")
        n_own, length, self.dx = self.points // comm.size, lengths * LENGTH, LENGTH / POINTS
        self.own = slice(comm.rank * n_own, (comm.rank + 1) * n_own)
        self.u = np.zeros(n_own + 2 * HALO)
        centres = (np.arange(ACTUATORS) + 0.5) * length / ACTUATORS
        apart = np.abs(np.arange(self.points) * self.dx - centres[:, None])
        apart = np.minimum(apart, length - apart)  # the shorter way round the ring
        push = np.exp(-0.5 * (apart / WIDTH) ** 2)
        self.actuators = (push - push.mean(axis=1, keepdims=True))[:, self.own]  # they leave the mean of u as it is

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        waves = np.arange(1, 5)[:, None] * np.linspace(0.0, 2.0 * np.pi, self.points, endpoint=False)
        size = self.np_random.normal(size=(2, 4, 1))
        self.begin((size[0] * np.sin(waves) + size[1] * np.cos(waves)).sum(axis=0))
        self.t = 0
        for _ in range(START):
            self.advance(np.zeros(ACTUATORS))
        return self.look()[0], {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.advance(action)
        self.t += 1
        obs, energy = self.look()
        return obs, 1.0 - energy - 0.1 * float(np.mean(np.square(action))), False, self.t == STEPS, {}

    def begin(self, field: np.ndarray) -> None:
        """Takes the first rank's: without a seed each has random numbers of its own."""
        self.u[HALO:-HALO] = self.comm.bcast(field)[self.own]

    def advance(self, action: np.ndarray) -> None:
        """SUBSTEPS of explicit Euler with central differences."""
        u, a2, a4 = self.u, 1.0 / self.dx**2, 1.0 / self.dx**4
        here, force = u[2:-2], sum(a * g for a, g in zip(action, self.actuators))
        for _ in range(SUBSTEPS):
            self.exchange()
            near, outer = u[3:-1] + u[1:-3], u[4:] + u[:-4]
            slope = (u[3:-1] - u[1:-3]) * near * (0.25 / self.dx)  # of u^2 / 2
            here += TIME_STEP * ((2 * a2 - 6 * a4) * here + (4 * a4 - a2) * near - a4 * outer - slope + force)

    def exchange(self) -> None:
        """Sends the outermost own points to the neighbours, and receives theirs."""
        u, size = self.u, self.comm.size
        left, right = (self.comm.rank - 1) % size, (self.comm.rank + 1) % size
        self.comm.Sendrecv(u[-2 * HALO : -HALO], right, recvbuf=u[:HALO], source=left)
        self.comm.Sendrecv(u[HALO : 2 * HALO], left, recvbuf=u[-HALO:], source=right)

    def look(self) -> tuple[np.ndarray, float]:
        """What the sensors show, and the mean of u^2."""
        cells = self.u[HALO:-HALO].reshape(SENSORS // self.comm.size, -1)
        own = np.stack([cells.mean(axis=1), np.square(cells).mean(axis=1)], axis=1)
        every = np.empty((SENSORS, 2))
        self.comm.Allgather(own, every)  # in rank order, whichever rank is first
        return every[:, 0].copy(), float(every[:, 1].mean())

    def field(self) -> np.ndarray:
        """The whole of u, shape (points,)."""
        return np.concatenate(self.comm.allgather(self.u[HALO:-HALO]))


def make(comm: Any, lengths: int = 1) -> Kuramoto:
    """The environment on the ranks of a communicator of mpi4py."""
    return Kuramoto(comm, lengths)
