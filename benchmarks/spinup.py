"""train.py on the work of Spinning Up's PPO, against a loop written in that style, in turn.

    python -m benchmarks.spinup

An iteration on Humanoid-v4: 4000 steps, up to 80 full-batch steps of the policy with a stop by KL divergence, 80 of the
value function, 2x64 tanh networks. The loop (spinup_loop.py) has one torch inference per step and averages gradients
parameter by parameter with blocking MPI calls. Steps per second over whole iterations, the first two left out.
"""

import json
import shlex
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks import record

ENV = "Humanoid-v4"
WORK = "--batch_steps 4000 --num_envs 20 --algo ppo --minibatches 1 --epochs 80 --vf_epochs 80 --kl_targ 0.015"
WORK += " --lr 3e-4 --vf_lr 1e-3 --policy_hid_list 64,64 --valfunc_hid_list 64,64"
AT_LEAST = {2: 1.5, 10: 2.5}


def main() -> None:
    """Takes train.py in both modes and the loop in turn, and saves what they measured."""
    parser = record.command_line(__doc__, repeats=3, ranks="2,10")
    parser.add_argument("--iterations", type=int, default=10, help="of each run (default: 10)")
    args = parser.parse_args()

    def ours(n: int, mode: str) -> float:
        limit = ("--nprocs", n, "--parallel", mode, "--total_steps", 4000 * args.iterations)
        return record.steps_per_s(record.train(args.mpi[0], ENV, *WORK.split(), *limit))

    alternatives = {}
    for n in args.ranks:
        for mode in ("gather", "average"):
            alternatives[f"train.py --parallel {mode}, {n} ranks"] = partial(ours, n, mode)
        alternatives[f"the loop, {n} ranks"] = partial(run_loop, args.mpi[0], n, args.iterations)
    found = {name: record.spread(rates) for name, rates in record.in_turn(alternatives, args.repeats).items()}
    claims = []
    for n in args.ranks:
        loop = found[f"the loop, {n} ranks"]["median"]
        for mode in ("gather", "average"):
            ratio = found[f"train.py --parallel {mode}, {n} ranks"]["median"] / loop
            text = f"Spinning Up's PPO work, {n} ranks, --parallel {mode}: rate / the loop's"
            claims.append(record.claim(text, ratio, at_least=AT_LEAST.get(n, 1.0)))
    record.save(args, found, claims, unit="environment steps per second", work=WORK)


def run_loop(mpi: str, n: int, iterations: int) -> float:
    """Steps per second of the loop on `n` ranks.

    Raises:
        SystemExit: it failed; its output is shown.
    """
    from mpi_util.launch import fork
    from mpi_util.launch import launcher as mpi_launcher

    family, launcher = mpi_launcher.find_launcher()  # the one that belongs to mpi4py's library, with its flags
    environment = record.mpi_environment(mpi) | fork.rank_environment(family, 0.0, False)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "loop.json"
        program = Path(__file__).with_name("spinup_loop.py")
        command = [launcher, *family.flags, "-n", str(n), sys.executable, str(program)]
        command += ["--iterations", str(iterations), "--out", str(out)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{shlex.join(command)} ended with status {done.returncode}\n{done.stdout}{done.stderr}")
        return json.loads(out.read_text())["steps_per_s"]


if __name__ == "__main__":
    main()
