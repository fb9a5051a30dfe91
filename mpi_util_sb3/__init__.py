"""For programs that train with Stable-Baselines3's PPO, A2C, or sb3-contrib's TRPO or MaskablePPO; `parallel(PPO)`."""

from .model import parallel

__all__ = ["parallel"]
