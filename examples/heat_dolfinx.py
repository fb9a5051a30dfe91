"""DOLFINx as an environment: four heaters bring a plate to a wanted temperature, on all ranks of a communicator.

    python train.py --nprocs 2 --env_command "mpirun -n 2 /usr/bin/python3 -m mpi_util.serve examples.heat_dolfinx:make"

u_t = laplace(u) + 40 sum_i a_i g_i on the unit square, u = 0 at its edge; implicit Euler and linear elements. For
Debian's python3-dolfinx, which has an MPI and a Python of its own: the environment runs there, the policy here.
"""

from typing import Any

import gymnasium as gym
import numpy as np
import ufl
from dolfinx import fem, mesh
from petsc4py import PETSc

PLACES = ((0.25, 0.25), (0.75, 0.25), (0.25, 0.75), (0.75, 0.75))  # of a heater g_i, which is a thermometer too
WIDTH, CELLS, TIME_STEP, STEPS = 0.12, 24, 0.02, 20


class Heat(gym.Env):
    """Observation: the temperature at four places, and the wanted one. Every rank of `comm` makes the same calls."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (len(PLACES) + 1,), np.float64)
    action_space = gym.spaces.Box(0.0, 1.0, (len(PLACES),), np.float64)

    def __init__(self, comm: Any):
        self.comm = comm
        domain = mesh.create_unit_square(comm, CELLS, CELLS)
        space = fem.FunctionSpace(domain, ("Lagrange", 1))
        edge = fem.locate_dofs_geometrical(space, lambda x: np.isclose(x[0] * (1 - x[0]) * x[1] * (1 - x[1]), 0.0))
        zero = fem.dirichletbc(PETSc.ScalarType(0.0), edge, space)
        x, u, v = ufl.SpatialCoordinate(domain), ufl.TrialFunction(space), ufl.TestFunction(space)

        def shape(a: Any, b: Any) -> Any:
            return ufl.exp(-0.5 * ((x[0] - a) ** 2 + (x[1] - b) ** 2) / WIDTH**2)

        self.u = fem.Function(space)
        self.heat = fem.Constant(domain, np.zeros(len(PLACES), PETSc.ScalarType))
        source = sum(40.0 * self.heat[i] * shape(*place) for i, place in enumerate(PLACES))
        left = u * v * ufl.dx + TIME_STEP * ufl.inner(ufl.grad(u), ufl.grad(v)) * ufl.dx
        right = (self.u + TIME_STEP * source) * v * ufl.dx
        options = {"ksp_type": "cg", "pc_type": "jacobi", "ksp_rtol": 1e-10}
        self.problem = fem.petsc.LinearProblem(left, right, bcs=[zero], u=self.u, petsc_options=options)
        self.place = fem.Constant(domain, np.zeros(2, PETSc.ScalarType))  # so that a form is compiled once for all
        self.seen = fem.form(self.u * shape(*self.place) * ufl.dx)
        self.weight = fem.form(shape(*self.place) * ufl.dx)

    def sum(self, form: Any) -> float:
        """An integral over the plate: the ranks' parts, added in rank order."""
        return float(sum(self.comm.allgather(fem.assemble_scalar(form))))

    def look(self) -> np.ndarray:
        seen = []
        for place in PLACES:
            self.place.value[:] = place
            seen.append(self.sum(self.seen) / self.sum(self.weight))
        return np.array([*seen, self.wanted])

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.wanted = self.comm.bcast(float(self.np_random.uniform(0.2, 0.8)))
        self.u.x.array[:] = 0.0
        self.t = 0
        return self.look(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.heat.value[:] = action
        self.problem.solve()
        self.u.x.scatter_forward()
        self.t += 1
        obs = self.look()
        return obs, -float(np.abs(obs[:-1] - self.wanted).mean()), False, self.t == STEPS, {}


def make(comm: Any) -> Heat:
    """The environment on the ranks of a communicator of mpi4py."""
    return Heat(comm)
