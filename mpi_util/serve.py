"""`python -m mpi_util.serve my_env:make`, in processes of its own: what `simulator(command=...)` starts."""

import sys

from .simulators.served import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
