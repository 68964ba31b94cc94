"""Start a program that ends with its launcher: ``python child.py LAUNCHER_PID PROGRAM ARGUMENT …``.

A launcher that is killed cannot stop its children, so the kernel does it: it sends SIGTERM to the program when its
parent dies, and a trainer then saves and leaves. The wish is made here, in the child, and survives the exec.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Never returns: it becomes the program, or exits with 143 when the launcher is gone already."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux alone has it
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != int(sys.argv[1]):
        sys.exit(128 + signal.SIGTERM)
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
