#!/usr/bin/env bash
# One node's part of slurm_nodes.sbatch, which starts it by srun: torchrun, with one rank per GPU of the node.
# USR1 or TERM: the ranks save and end. docs/cluster.md
set -euo pipefail

here=$(dirname "${BASH_SOURCE[0]}")
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
source "$here/slurm_common.sh"

# Of a node that has more GPUs than the job, srun says which ones are the job's.
devices=()
[[ ${CUDA_VISIBLE_DEVICES:-} ]] && IFS=, read -ra devices <<< "$CUDA_VISIBLE_DEVICES"
ranks=${#devices[@]}
((ranks)) || ranks=${SLURM_GPUS_ON_NODE:-1}

run_until_asked ask_ranks torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "$ranks" --rdzv-backend c10d \
    --rdzv-endpoint "$ASYNCRL_MEET_AT" --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    --local-addr "${SLURMD_NODENAME:-$(hostname -s)}" --max-restarts 0 "$here/train.sh" "$@"
