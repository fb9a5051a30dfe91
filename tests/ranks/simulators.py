"""An environment of K ranks for each worker: simulators.py N K team|process [ACT]. ACT: what is done with it; see ACTS.

Without it rank 0 prints what two iterations have collected, which is the same for any N, K and coupling.
"""

import hashlib
import json
import math
import os
import signal
import sys
import time
from pathlib import Path

import mpi_util

n, k, coupling, act = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], (sys.argv[4:] or ["play"])[0]
if mpi_util.mpi_fork(n, ranks_per_env=k if coupling == "team" else None) == "parent":
    sys.exit()
import coupled  # noqa: E402

from mpi_util.host import reap  # noqa: E402

SLEEP_S = 4
HERE = Path(__file__).parent
LAUNCHER = os.environ.get("TEST_LAUNCHER", "mpiexec").split()
SERVE = [*LAUNCHER, "-n", str(k)] * (k > 1) + [sys.executable, "-m", "mpi_util.serve"]


def simulator(make=coupled.make, **more):
    if coupling == "team":
        return mpi_util.simulator(make, **more)
    return mpi_util.simulator(command=[*SERVE, f"coupled:{make.__name__}"], cwd=HERE, **more)


def play():
    env = simulator(timeout=math.inf)
    assert env.metadata == coupled.Coupled.metadata and env.spec is None and env.gain == 1.0 and not hasattr(env, "no")
    assert env.observation_space == coupled.Coupled.observation_space
    assert env.action_space == env.unwrapped.action_space == coupled.Coupled.action_space
    assert list(env.action_space) == list(coupled.Coupled.action_space)
    assert env.render().tolist() == [[[k] * 3] * 2] * 2

    def episode(seed):
        env.action_space.seed(seed)
        obs, info = env.reset(seed=seed)
        assert info == {"ranks": k} and type(info["ranks"]) is coupled.np.int64
        rows, over = [obs], False
        while not over:
            obs, reward, _, over, info = env.step(env.action_space.sample())
            assert type(reward) is coupled.np.float64 and info == {"n": len(rows) // 2 + 1, "text": ("one", 2.5)}
            rows += [obs, obs + reward]
        return {"rows": coupled.np.array(rows)}

    for i in range(2):
        env.gain = 1.0 + i
        batch = mpi_util.collect(episode, episodes=5, weights={"w": coupled.np.zeros(2)}, seed=1)
        mpi_util.print0(batch and hashlib.sha256(batch["rows"].tobytes()).hexdigest())
    env.close()
    env.close()


def vector():
    import gymnasium

    envs = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.wrappers.TimeLimit(simulator(), 2)] * 2)
    obs, _ = envs.reset(seed=3)
    for _ in range(2):
        envs.action_space.seed(4)
        obs, _, _, over, _ = envs.step(envs.action_space.sample())
    print(obs.shape, over.tolist())
    envs.close()


def fault(name, rank=k - 1, **more):
    """The worker that has made the last simulator fails in step 2; what is raised is printed and another one made."""
    env = simulator(**more)
    for options in ({"fault": name, "rank": rank}, None):
        try:
            env.action_space.seed(1)
            env.reset(seed=1, options=options)
            steps = [env.step(env.action_space.sample())[1] for _ in range(coupled.STEPS)]
            print("played", len(steps), flush=True)
        except (mpi_util.SimulatorError, ValueError) as error:
            print("raised", type(error).__name__, error, flush=True)
            if coupling == "process" and not (name == "raise" and rank is None):  # it has ended
                env = simulator(**more)


def shares():
    """What members, or a paused program, use of a core while rank 0 does something else."""
    env = simulator()
    env.spin() if coupling == "process" else None
    before = env.cpu_s()
    time.sleep(SLEEP_S)
    shares = [(after - begun) / SLEEP_S for begun, after in zip(before, env.cpu_s())]
    print(json.dumps(shares[coupling == "team" :]))
    env.close()


def spinning():
    """A program that waits busily is paused while it is not called; and its log is bounded."""
    child = mpi_util.solver([sys.executable, "-c", "while True: pass"], cwd=HERE)

    def used():
        return sum(map(int, Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[11:13])) / 100

    found = []
    for turn in (child.resume, child.pause, child.resume):
        turn()
        before = used()
        time.sleep(1)
        found.append(used() - before)
    child.terminate()
    print(json.dumps({"used": found, "status": child.wait(10)}))


def flood():
    env = simulator(log_dir=os.environ.get("TEST_LOGS"))
    env.print_much(3)
    left = env.leave_child()
    env.reset(seed=1)
    env.close()
    time.sleep(0.2)
    print("left behind", reap.is_alive(left))


def closed():
    env, kept = simulator(), simulator()
    env.close()
    try:
        env.reset(seed=1)
    except mpi_util.SimulatorError as error:
        print(error)
    print(kept.reset(seed=1)[1])
    kept.close()


def complains():
    simulator(log_dir=os.environ["TEST_LOGS"]).complain()


def hosts():
    """Where the ranks of each worker's environment are; then as `play`."""
    print(mpi_util.rank, *simulator().hosts(), flush=True)
    play()


def killed():
    env = simulator()
    print(env.leave_child(), *env.pids(), flush=True)
    time.sleep(0.5)  # it is paused
    os.kill(os.getpid(), signal.SIGKILL)


def forks():
    """A process that the worker forks ends, and the worker's simulator goes on."""
    env = simulator()
    if not (child := os.fork()):
        sys.exit()
    os.waitpid(child, 0)
    print(env.pids())


def wrong():
    bad = {
        "both": lambda: mpi_util.simulator(coupled.make, command="x"),
        "neither": mpi_util.simulator,
        "timeout": lambda: simulator(timeout=-1),
        "command": lambda: mpi_util.simulator(command="/nowhere/mpiexec -n 2 x"),
        "target": lambda: mpi_util.simulator(command=[*SERVE, "coupled:mak"], cwd=HERE),
        "module": lambda: mpi_util.simulator(command=[*SERVE, "cupled:make"], cwd=HERE),
        "quote": lambda: mpi_util.simulator(command="mpiexec '"),
        "stop": lambda: simulator(timeout=5.0).stop(),  # which the start must keep too
        "log": lambda: simulator(log_dir=__file__),
        "start": lambda: mpi_util.simulator(command="sleep 100", timeout=0.5),
        "ends": lambda: mpi_util.simulator(command=[sys.executable, "-c", "print('no licence'); exit(7)"]),
        "no_environment": lambda: simulator(coupled.no_environment),
        "fails_everywhere": lambda: simulator(coupled.fails_everywhere),
        "without": lambda: mpi_util.simulator(coupled.make),
        "member_calls": lambda: mpi_util.all_sum(1),
        "world": lambda: mpi_util.all_sum(1, comm=__import__("mpi4py.MPI").MPI.COMM_WORLD) and simulator(),
    }
    bad[sys.argv[5]]()


ACTS = {"play": play, "vector": vector, "shares": shares, "spinning": spinning, "flood": flood, "killed": killed}
ACTS |= {
    "closed": closed,
    "complains": complains,
    "forks": forks,
    "hosts": hosts,
    "wrong": wrong,
    "late": lambda: fault(sys.argv[5], *map(int, sys.argv[6:]), timeout=5.0),  # which the start must keep too
    "fault": lambda: fault(*sys.argv[5:6]),
}
ACTS |= {"first": lambda: fault(sys.argv[5], 0), "everywhere": lambda: fault(sys.argv[5], None)}
ACTS[act]()
