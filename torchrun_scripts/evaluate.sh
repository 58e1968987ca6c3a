#!/usr/bin/env bash
# Bash runs the quoted lines and never gets past the second exec; Python reads them as plain strings and goes on.
# So torchrun can run this file itself, and bash starts torchrun on it, or only Python when torchrun started bash.
"export" "OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}"
"eval" 'if [ -n "${RANK:-}" ]; then exec "${PYTHON_EXEC:-python3}" "$0" "$@"; fi'
"exec" "torchrun" "--standalone" "--nproc-per-node=1" "$0" "$@"

# Success rate of a checkpoint in the true simulator, with the arguments of `asyncrl evaluate`. All of these work:
#   torchrun torchrun_scripts/evaluate.sh runs/NAME --episodes 100
#   bash torchrun_scripts/evaluate.sh tabletop --simulator tabletop
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).resolve().parents[1]))  # A checkout works without being installed.

if __name__ == "__main__":  # Child processes import this file again.
    from asyncrl.__main__ import start

    start("evaluate")
