"""The program that a launcher runs in place of ssh: asks mpi_fork's parent to start the launcher's process on the host.

    python rsh.py FOLDER [options] HOST COMMAND...

It runs beside the launcher, on the first machine. FOLDER is the job's, in which the parent listens. It ends with the
status of the command, whose output it writes to stderr.
"""

import json
import os
import socket
import sys

if __name__ == "__main__":
    os.chdir(sys.argv[1])  # the path of a socket has to be short
    with socket.socket(socket.AF_UNIX) as parent:
        parent.connect("rsh")
        parent.sendall(json.dumps(sys.argv[2:]).encode() + b"\n")
        for line in parent.makefile():
            answer = json.loads(line)
            sys.stderr.write(answer.get("said", ""))
            sys.stderr.flush()
            if "status" in answer:
                sys.exit(answer["status"] & 0xFF)
    sys.exit(1)
