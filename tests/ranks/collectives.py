"""The checks of several programs in one start, which costs more than most of them."""

import importlib

from harness import fork

fork()
for program in ("gather", "weights", "averaging", "torch_grads", "running"):
    importlib.import_module(program)
