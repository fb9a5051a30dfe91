"""An environment whose ranks step it together, each with a part of its cells; and ways in which one of them fails.

`reset(options={"fault": NAME, "rank": K})`: that rank then fails so in step 2.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import gymnasium
import numpy as np

CELLS, STEPS = 12, 4


class Coupled(gymnasium.Env):
    """The bits of its observations do not depend on the number of its ranks."""

    metadata = {"render_modes": ["rgb_array"]}
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (CELLS,), np.float64)
    action_space = gymnasium.spaces.Dict(
        z=gymnasium.spaces.Box(-1, 1, (2,), np.float32), a=gymnasium.spaces.Discrete(3, start=1)
    )

    def __init__(self, comm, gain=1.0):
        self.comm, self.gain = comm, gain

    def whole(self):
        found = np.empty(CELLS)
        k = self.comm.Get_size()
        counts = [CELLS * (i + 1) // k - CELLS * i // k for i in range(k)]
        self.comm.Allgatherv(self.mine, [found, counts])
        return found

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        cells, i, k = self.np_random.normal(size=CELLS), self.comm.Get_rank(), self.comm.Get_size()
        self.mine, self.n = cells[CELLS * i // k : CELLS * (i + 1) // k], 0
        fault = options if options and options["rank"] in (None, i) else {}
        self.fault = fault.get("fault", "")
        return self.whole(), {"ranks": np.int64(k)}

    def step(self, action):
        self.n += 1
        if self.n == 2 and self.fault:
            FAULTS[self.fault]()
        self.mine = np.tanh(self.mine + self.gain * action["z"][0] + int(action["a"]))
        obs = self.whole()
        if self.n == 2 and self.fault == "afterwards":
            fail()
        return obs, obs.sum(), False, self.n == STEPS, {"n": self.n, "text": ("one", 2.5)}

    def render(self):
        return np.full((2, 2, 3), self.comm.Get_size(), np.uint8)

    def cpu_s(self):
        """Seconds of processor time that each rank has used."""
        times = os.times()
        return self.comm.allgather(times.user + times.system)

    def spin(self):
        """From now on each rank uses a core, as an MPI program does that waits."""
        threading.Thread(target=FAULTS["spin"], daemon=True).start()

    def print_much(self, megabytes):
        for _ in range(megabytes):
            os.write(1, b"flood of words\n" * 70_000)

    def hosts(self):
        """Of its ranks."""
        return self.comm.allgather(socket.gethostname())

    def complain(self):
        os.write(2, f"warning of rank {self.comm.Get_rank()}\n".encode())

    def leave_child(self):
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid

    def pids(self):
        return self.comm.allgather(os.getpid())

    def stop(self):
        """The last rank hangs."""
        if self.comm.Get_rank() == self.comm.Get_size() - 1:
            FAULTS["stop"]()
        self.comm.barrier()


def fail():
    raise ValueError("the solver diverged")


FAULTS = {
    "raise": fail,
    "afterwards": lambda: None,  # it fails, but no rank waits for it
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "gil": lambda: ctypes.PyDLL(None).sleep(100),  # in C, and no other thread of Python runs
    "exit": lambda: sys.exit(3),
    "spin": lambda: [time.perf_counter() for _ in iter(int, 1)],
    "leave": lambda: os._exit(0),
}


def make(comm):
    return Coupled(comm)


def fails_everywhere(comm):
    raise RuntimeError("no licence")


def no_environment(comm):
    return 3
