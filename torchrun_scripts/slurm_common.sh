# Read by the Slurm scripts beside it; docs/cluster.md says what they do together.

run_dir_in() {  # Prints the value of --run-dir among the arguments; nothing when it is not there.
    local found="" argument before=""
    for argument in "$@"; do
        [[ $before == --run-dir ]] && found=$argument
        [[ $argument == --run-dir=* ]] && found=${argument#*=}
        before=$argument
    done
    printf '%s' "$found"
}

resume_flag() {  # Prints --resume in a job that Slurm started again, where the run has something to go on from.
    local run=$1
    ((${SLURM_RESTART_COUNT:-0} > 0)) || return 0
    if compgen -G "$run/checkpoints/update_*[0-9]" > /dev/null; then
        echo --resume
    elif [[ -e $run ]]; then  # It ended before its first checkpoint: the folder makes room for a new run.
        mv "$run" "$run.start-$SLURM_RESTART_COUNT"
    fi
}

ask_ranks() {  # The ranks are torchrun's children: asked themselves, they may take as long as an update does.
    pkill -TERM -P "$child" || kill -TERM "$child"
}

ask_nodes() {  # srun hands USR1 on to slurm_node.sh on every node; TERM would end the step.
    kill -USR1 "$child"
}

run_until_asked() {  # HOW COMMAND...: runs a command; USR1, TERM: HOW lets it save and end. Sets `asked`.
    local code=0 how=$1
    asked=""
    trap 'asked=USR1; "$how"' USR1
    trap 'asked=${asked:-TERM}; "$how"' TERM INT
    # Slurm may send USR1 to all processes of a node, and it would end ranks. srun has to get it.
    ([[ $how == ask_nodes ]] || trap "" USR1; exec "${@:2}") &
    child=$!
    wait "$child" || code=$?
    while kill -0 "$child" 2> /dev/null; do  # A signal ended the wait, not the command.
        code=0
        wait "$child" || code=$?
    done
    if [[ $asked && $code -gt 128 ]]; then
        code=0
        wait "$child" || code=$?
    fi
    return "$code"
}

run_in_job() {  # As run_until_asked; USR1 (the time is nearly over) also puts the job back into the queue.
    local code=0
    run_until_asked "$@" || code=$?
    if [[ $asked == USR1 ]]; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
    return "$code"
}
