"""Stable-Baselines3's on-policy algorithms on N ranks, in one line: `model = parallel(PPO)("MlpPolicy", make_env)`.

Read first: `parallel` in model.py.
"""

from .model import parallel

__all__ = ["parallel"]
