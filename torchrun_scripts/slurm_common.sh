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

stop_ranks() {  # The ranks are torchrun's children: asked themselves, they may take as long as an update does.
    pkill -TERM -P "$torchrun" || kill -TERM "$torchrun"
}

run_in_job() {  # Runs torchrun. USR1 (the time is nearly over): saves, and back into the queue. TERM: saves.
    local code=0 signalled="" requeue=""
    trap 'signalled=yes requeue=yes; stop_ranks' USR1
    trap 'signalled=yes; stop_ranks' TERM INT
    "$@" &
    torchrun=$!
    wait "$torchrun" || code=$?
    while kill -0 "$torchrun" 2> /dev/null; do  # A signal ended the wait, not torchrun.
        code=0
        wait "$torchrun" || code=$?
    done
    if [[ $signalled && $code -gt 128 ]]; then
        code=0
        wait "$torchrun" || code=$?
    fi
    if [[ $requeue ]]; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
    return "$code"
}
