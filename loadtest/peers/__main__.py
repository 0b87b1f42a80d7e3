"""Rivals beside us: `python -m loadtest.peers {steps,engines,differences,servers} --help`."""

import sys

from loadtest.peers import differences, in_process, servers, steps

PARTS = {
    "steps": steps.main,
    "engines": in_process.main,
    "servers": servers.main,
    "differences": differences.main,
}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in PARTS:
        sys.exit(f"usage: python -m loadtest.peers {{{','.join(PARTS)}}} …")
    sys.exit(PARTS[sys.argv[1]](sys.argv[2:]))
