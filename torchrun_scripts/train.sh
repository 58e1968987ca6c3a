#!/usr/bin/env bash
# Bash runs the quoted lines and never gets past the second exec; Python reads them as plain strings and goes on.
# So torchrun can run this file itself, and bash starts torchrun on it, or only Python when torchrun started bash.
"export" "OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}"
"eval" 'if [ -n "${RANK:-}" ]; then exec "${PYTHON_EXEC:-python3}" "$0" "$@"; fi'
"exec" "torchrun" "--standalone" "--nproc-per-node=${NPROC:-1}" "$0" "$@"

# Train, with the arguments of `asyncrl train`. All of these work:
#   torchrun torchrun_scripts/train.sh --updates 10                     # learner and actor on one rank
#   torchrun --nproc-per-node 3 torchrun_scripts/train.sh               # 1 learner + 2 actors
#   NPROC=3 bash torchrun_scripts/train.sh configs/NAME.toml            # the same
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).resolve().parents[1]))  # A checkout works without being installed.

if __name__ == "__main__":  # Child processes import this file again.
    from asyncrl.__main__ import start

    start("train")
