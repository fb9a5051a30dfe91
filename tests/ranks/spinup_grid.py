"""A script that runs experiments: python spinup_grid.py WHAT N_CPU MAX_PARALLEL, in the folder for their results."""

import sys
import time
from pathlib import Path

if "without_cloudpickle" in sys.argv:
    sys.modules["cloudpickle"] = None  # importing it fails

from mpi_util_spinup.logx import EpochLogger
from mpi_util_spinup.mpi_tools import mpi_sum, num_procs, proc_id
from mpi_util_spinup.run_utils import ExperimentError, ExperimentGrid, call_experiment

FACTOR = 10  # a global of the script, which the function uses


def train(logger_kwargs, seed, lr=0.0, ac_kwargs=None, fail_at=None, wait_s=0.0, env_fn=None):
    logger = EpochLogger(**logger_kwargs)
    logger.save_config(locals())
    if proc_id() == 0:
        print(f"seed {seed} on {num_procs()} ranks", flush=True)
    if wait_s:
        Path(f"waiting-{seed}-{proc_id()}").touch()
        time.sleep(wait_s)
    if seed == fail_at:
        raise RuntimeError("bad luck")
    logger.store(X=FACTOR * seed + proc_id())
    logger.log_tabular("X", with_min_and_max=True)
    logger.log_tabular("Sum", mpi_sum(lr))
    if env_fn:
        logger.log_tabular("ObsDim", env_fn().observation_space.shape[0])
    logger.dump_tabular()


def main(what, num_cpu, max_parallel):
    grid = ExperimentGrid("try")
    if what == "grid":
        grid.add("seed", [0, 1, 2])
        grid.add("lr", 0.5)
        grid.add("ac_kwargs:hidden_sizes", [(32, 32)], in_name=True)
        grid.add("fail_at", 1)
        grid.run(train, num_cpu=num_cpu, max_parallel=max_parallel)
    elif what == "wait":
        grid.add("seed", [0, 1, 2])
        grid.add("wait_s", 60.0)
        grid.run(train, num_cpu=num_cpu, max_parallel=max_parallel)
    elif what == "call":
        result = call_experiment("cart", train, seed=3, num_cpu=num_cpu, env_name="CartPole-v1")
        print(result.status, result.folder)
        try:
            call_experiment("cart", train, seed=4, fail_at=4)
        except ExperimentError as error:
            print("caught:", error)
        call_experiment("closure", lambda logger_kwargs, seed: print("closure", seed + num_cpu), seed=5)
    elif what == "registered":
        import gymnasium

        class Mine(gymnasium.Env):
            observation_space, action_space = gymnasium.spaces.Box(-1, 1, (5,)), gymnasium.spaces.Discrete(2)

        gymnasium.register("Mine-v0", Mine)
        call_experiment("registered", train, seed=6, num_cpu=num_cpu, env_name="Mine-v0")
    elif what == "empty":
        grid.run(train)
    elif what == "named":
        grid.add("alg", [train])
        print(grid.run("alg")[0])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
