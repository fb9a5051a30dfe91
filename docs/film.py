"""Makes the moving picture of README.md: some seconds of what a run has learned, small enough for a page.

    python train.py HalfCheetah-v4 --nprocs auto --total_steps 3e5 --name first
    python -m docs.film runs/HalfCheetah-v4/first-s0 docs/first.gif

It plays the policy in one process, in NumPy, and draws with what `train.py --watch` draws with.
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from trainer.play import choose_drawing, load_policy
from trainer.rollout import Episode

WIDTH, HEIGHT, COLORS = 320, 180, 48
SECONDS, PER_SECOND = 4.0, 20  # a picture each step of HalfCheetah


def pictures(run: Path, n: int, first: int) -> list[np.ndarray]:
    """`n` pictures, from step `first` of an episode on."""
    policy = load_policy(run)
    choose_drawing(policy)
    env = policy.make_env(render_mode="rgb_array", width=WIDTH, height=HEIGHT)
    player, found = policy.player(env), []
    player.start(Episode((0, 0)))
    player.run(first)
    for _ in range(n):
        found.append(env.render())
        player.run(1)
    env.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("out", type=Path, help="file, .gif")
    parser.add_argument(
        "--first", type=int, default=100, help="step of the episode with which it begins (default: 100)"
    )
    args = parser.parse_args()
    found = [Image.fromarray(each) for each in pictures(args.run, int(SECONDS * PER_SECOND), args.first)]
    palette = found[0].quantize(COLORS, dither=Image.Dither.NONE)
    first, *others = (each.quantize(COLORS, palette=palette, dither=Image.Dither.NONE) for each in found)
    first.save(args.out, save_all=True, append_images=others, duration=1000 / PER_SECOND, loop=0, optimize=True)
    print(f"{args.out}: {len(found)} pictures, {args.out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
