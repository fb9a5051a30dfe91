"""Whether train.py's advice is right: the speed it expects of another number of processes or mode, and the real one.

    python -m benchmarks.advice

The advice comes from a run's first iterations. Then the advised run and the first one take turns; where nothing better
is expected, a run that one might hope is faster takes the place of the advised one. Steps per second over whole
iterations, the first two left out.
"""

import re
import statistics
from functools import partial

from benchmarks import record

SEGMENTS = "--batch_steps 4000 --num_envs 20 --kl_targ "
PAIRS = {  # name: (settings, those of the advised run, those to compare with where nothing is advised)
    "HalfCheetah-v5, ppo, 2x64": (f"HalfCheetah-v5 {SEGMENTS} 0", "--nprocs 1", "--nprocs 2"),
    "HalfCheetah-v5, trpo, 2x64": (f"HalfCheetah-v5 {SEGMENTS} 0.01 --algo trpo", "--nprocs 1", "--nprocs 2"),
    "Humanoid-v5, ppo, 2x512": (
        f"Humanoid-v5 {SEGMENTS} 0 --epochs 3 --vf_epochs 3 --policy_hid_list 512,512 --valfunc_hid_list 512,512",
        "--nprocs 1",
        "--nprocs 2",
    ),
    "Humanoid-v5, ppo, 2x64, 2 processes": (f"Humanoid-v5 {SEGMENTS} 0", "--nprocs 2", "--nprocs 2 --parallel average"),
}  # fmt: skip
SAYS = re.compile(r"(--nprocs \d+(?: --overlap)?) is likely to be ([\d.]+) to ([\d.]+) x as fast")
SLACK = 1.15  # of a ratio of two rates on a machine with other work


def main() -> None:
    """Takes each pair in turn, and saves what was said and what was measured."""
    parser = record.command_line(__doc__, repeats=3)
    parser.add_argument("--iterations", type=int, default=8, help="of each run, 6 or more (default: 8)")
    parser.add_argument("--only", choices=PAIRS, help="one of the pairs")
    args = parser.parse_args()
    samples, claims, said = {}, [], {}
    for name in [args.only] if args.only else PAIRS:
        settings, before, hoped = PAIRS[name]
        limit = f"--total_steps {4000 * args.iterations}"

        def run(way: str, settings: str = settings, limit: str = limit) -> tuple[float, str]:
            rows, out = record.train_and_listen(args.mpi[0], *f"{settings} {way} {limit}".split())
            return record.steps_per_s(rows), out

        advised = SAYS.search(run(before)[1])
        after = advised[1] if advised else hoped
        found = record.in_turn({way: partial(run, way) for way in (before, after)}, args.repeats)
        samples[name] = {way: record.spread([rate for rate, _ in turns]) for way, turns in found.items()}
        ratio = samples[name][after]["median"] / samples[name][before]["median"]
        bands = [tuple(map(float, band.groups()[1:])) for _, out in found[before] if (band := SAYS.search(out))]
        bands = bands if advised else []
        low, high = (statistics.median(ends) for ends in zip(*bands)) if bands else (0.0, 1.0)
        said[name] = {"way": after, "low": low, "high": high} if bands else "nothing better"
        text = f"{name}: {after} / {before}, " + (f"said {low:.2f} to {high:.2f}" if bands else "nothing said")
        claims.append(record.claim(text, ratio, at_most=high * SLACK))
        if bands:
            claims.append(record.claim(text, ratio, at_least=low / SLACK))
    record.save(args, samples, claims, unit="environment steps per second", said=said, slack=SLACK)


if __name__ == "__main__":
    main()
