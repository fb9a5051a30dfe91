"""OpenFOAM as an environment: the lid of a cavity is moved so that the flow at a probe gets a wanted speed.

    python train.py examples.cavity_openfoam:make --nprocs 2 --ranks_per_env 1  # each starts `mpirun -np 2 icoFoam`

Each step writes the action into a file that the boundary condition reads, runs icoFoam on two ranks from the last time
that it wrote, and reads the probes. Needs OpenFOAM 1912 or later of openfoam.com (Debian: apt-get install openfoam).
"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import mpi_util

RANKS = 2
MPIRUN = shutil.which("mpirun.openmpi") or "mpirun"  # OpenFOAM's; Debian's name, as a venv has an mpirun of its own
SECONDS, STEPS = 0.05, 10  # of flow in a step; steps of an episode
PROBES = ((0.05, 0.08, 0.005), (0.02, 0.05, 0.005), (0.05, 0.02, 0.005), (0.08, 0.05, 0.005))
TARGET = 2  # the probe whose speed along x is wanted: below the vortex, where the flow goes against the lid
HEADER = "FoamFile {{ version 2.0; format ascii; class {}; object {}; }}\n"
CASE = {
    "system/controlDict": """
        application icoFoam; startFrom latestTime; stopAt endTime; endTime END; deltaT 0.005;
        writeControl runTime; writeInterval INTERVAL; writeFormat binary; timePrecision 8; purgeWrite 1;
        functions { probes {
            type probes; libs (sampling); fields (U); probeLocations (PLACES); writePrecision 12;
            writeControl writeTime;
        } }""",
    "system/blockMeshDict": """
        scale 0.1;
        vertices ((0 0 0) (1 0 0) (1 1 0) (0 1 0) (0 0 0.1) (1 0 0.1) (1 1 0.1) (0 1 0.1));
        blocks (hex (0 1 2 3 4 5 6 7) (20 20 1) simpleGrading (1 1 1));
        boundary (
            lid { type wall; faces ((3 7 6 2)); }
            walls { type wall; faces ((0 4 7 3) (2 6 5 1) (1 5 4 0)); }
            sides { type empty; faces ((0 3 2 1) (4 5 6 7)); }
        );""",
    "system/decomposeParDict": "numberOfSubdomains RANKS; method simple; simpleCoeffs { n (RANKS 1 1); delta 0.001; }",
    "system/fvSchemes": """
        ddtSchemes { default Euler; } gradSchemes { default Gauss linear; }
        divSchemes { default none; div(phi,U) Gauss linear; } laplacianSchemes { default Gauss linear orthogonal; }
        interpolationSchemes { default linear; } snGradSchemes { default orthogonal; }""",
    "system/fvSolution": """
        solvers {
            p { solver PCG; preconditioner DIC; tolerance 1e-06; relTol 0.05; }
            pFinal { $p; relTol 0; }
            U { solver smoothSolver; smoother symGaussSeidel; tolerance 1e-05; relTol 0; }
        }
        PISO { nCorrectors 2; nNonOrthogonalCorrectors 0; pRefCell 0; pRefValue 0; }""",
    "constant/transportProperties": "nu 0.01;",
    "0/p": """
        dimensions [0 2 -2 0 0 0 0]; internalField uniform 0;
        boundaryField { "(lid|walls)" { type zeroGradient; } sides { type empty; } }""",
    "0/U": """
        dimensions [0 1 -1 0 0 0 0]; internalField uniform (0 0 0);
        boundaryField {
            lid { type uniformFixedValue; uniformValue tableFile;
                  uniformValueCoeffs { file "<case>/lid"; outOfBounds clamp; } }
            walls { type noSlip; } sides { type empty; }
        }""",
}
CLASSES = {"0/p": "volScalarField", "0/U": "volVectorField"}


class Cavity(gym.Env):
    """Observation: x and y of the velocity at four probes, m/s, and the wanted speed. Action: the lid's, m/s."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2 * len(PROBES) + 1,), np.float64)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float64)

    def __init__(self, timeout: float = 60.0):
        self.timeout, self.t = timeout, 0
        self.case = Path(tempfile.mkdtemp(prefix="cavity-"))  # each worker has its own
        for name in CASE:
            self.write(name)
        self.move(0.0)
        self.call(["blockMesh"])
        self.call(["decomposePar"])

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.wanted, self.t = float(self.np_random.uniform(-0.15, -0.05)), 0
        for path in [*self.case.glob("processor*/0.*"), *self.case.glob("postProcessing")]:
            shutil.rmtree(path)
        return np.append(np.zeros(2 * len(PROBES)), self.wanted), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.move(float(action[0]))
        start, self.t = self.time(), self.t + 1
        self.write("system/controlDict")
        self.call([MPIRUN, "-np", str(RANKS), "icoFoam", "-parallel"])
        lines = (self.case / f"postProcessing/probes/{start}/U").read_text().splitlines()
        speeds = np.array([line.split(")")[i].split("(")[1].split() for line in lines[-1:] for i in range(len(PROBES))])
        speeds = speeds.astype(np.float64)
        reward = -10.0 * abs(float(speeds[TARGET, 0]) - self.wanted)
        return np.append(speeds[:, :2].ravel(), self.wanted), reward, False, self.t == STEPS, {}

    def time(self) -> str:
        """As OpenFOAM writes it."""
        return f"{self.t * SECONDS:.8g}"

    def move(self, speed: float) -> None:
        """Writes the lid's speed, a table with two times between which it is constant."""
        (self.case / "lid").write_text(f"((0 ({speed!r} 0 0)) (1e9 ({speed!r} 0 0)))\n")

    def write(self, name: str) -> None:
        path = self.case / name
        path.parent.mkdir(exist_ok=True)
        places = " ".join(f"({x} {y} {z})" for x, y, z in PROBES)
        text = CASE[name].replace("PLACES", places).replace("END", self.time()).replace("RANKS", str(RANKS))
        text = text.replace("INTERVAL", str(SECONDS))
        path.write_text(HEADER.format(CLASSES.get(name, "dictionary"), path.name) + text + "\n")

    def call(self, command: list[str]) -> None:
        """Runs a program of OpenFOAM in the case's folder.

        Raises:
            RuntimeError: it failed; the last lines of its output.
            subprocess.TimeoutExpired: it took longer than the time-out.
        """
        solver = mpi_util.solver(command, cwd=self.case)
        try:
            status = solver.wait(self.timeout)
        finally:
            solver.kill()  # what hangs, after an error of `wait`, or is left
        if status:
            raise RuntimeError(f"{' '.join(command)} ended with status {status}:\n{solver.tail()}")

    def close(self) -> None:
        shutil.rmtree(self.case, ignore_errors=True)


def make(**arguments: Any) -> Cavity:
    """The environment. OpenFOAM's programs are in PATH, as Debian has them, or its etc/bashrc has been sourced."""
    os.environ.setdefault("WM_PROJECT_DIR", "/usr/share/openfoam")
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")  # else ranks that outnumber cores wait for each other
    os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")  # in a container
    os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    return Cavity(**arguments)
