"""The checks of several programs in one start, which costs more than most of them; without torch those of arrays."""

import importlib
import importlib.util

from harness import fork

fork()
with_torch = ("weights", "torch_grads", "running") if importlib.util.find_spec("torch") else ()
for program in ("gather", "averaging", *with_torch):
    importlib.import_module(program)
