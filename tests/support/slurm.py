"""Parts of programs that stand in for Slurm's."""

from __future__ import annotations

AWAIT_TASKS = """
code=0
for task in "${tasks[@]}"; do
    while kill -0 "$task" 2> /dev/null; do wait "$task" && last=0 || last=$?; done
    ((last)) && code=$last
done
exit "$code"
"""
"""End of an srun: waits for all `tasks`, also when a signal ends a wait, with the last code that is not 0."""
