#!/usr/bin/env bash
# Rebuild every shipped weight file from nothing: simulator recordings, then models, then asyncrl/assets/tabletop.
#   WORK=/scratch/rebuild bash torchrun_scripts/rebuild_assets.sh
# About an hour with one data-centre GPU and 16 cores; days without. Recordings stay in $WORK and are reused.
# The files in this repository were made stage by stage with these settings; the whole was not yet run in one go.
set -euo pipefail
WORK=${WORK:-rebuild}
ASSETS=${ASSETS:-asyncrl/assets/tabletop}
SCALE=${SCALE:-1}                                   # 0.01 = a quick dry run
COMPILE=${COMPILE:-$(command -v nvidia-smi >/dev/null && echo --compile || true)}
n() { python3 -c "import sys; print(max(32, int(float(sys.argv[1]) * $SCALE)))" "$1"; }
record() { # record NAME EPISODES FIRST_SEED FLAGS...
    compgen -G "$WORK/$1/part-*.h5" >/dev/null ||
        python3 -m asyncrl collect --out "$WORK/$1" --episodes "$(n "$2")" --seed "$3" "${@:4}"
}
fit() { python3 -m asyncrl fit "$@"; }
noise="--expert.noise 0.02 0.08 --expert.spread 0.008"

# 1. A policy that can do the task, and a world model that has seen the whole range from careful to clumsy.
record careful 16000 0 $noise --expert.offset 0.012 0.0
record explore 8000 100000 --expert.noise 0.0 0.4 --expert.spread 0.015 --expert.retry --horizon 64
fit policy --data "$WORK/careful" --out "$WORK/policy0" --batch 512 --steps "$(n 12400)" $COMPILE
fit world --data "$WORK/explore" --out "$WORK/world0" --vae-steps "$(n 6900)" --vae-batch 48 \
    --steps "$(n 6950)" --batch 512 --context-sigma 0.1 $COMPILE

# 2. What a missed grasp looks like: a demonstrator who grasps off-centre, one of mixed aim, and a clone's roll-outs.
record misses 12000 0 $noise --expert.offset 0.023 0.0
record aims 10000 120000 --expert.noise 0.02 0.08 --expert.spread 0.02
fit policy --data "$WORK/misses" --out "$WORK/policy1" --batch 512 --steps "$(n 8000)" $COMPILE
record misses-rollouts 5000 200000 --policy "$WORK/policy1"
record misses-hot 3000 300000 --policy "$WORK/policy1" --temperature 1.3
fit world --refine "$WORK/world0" --out "$WORK/world1" --batch 1024 --steps "$(n 15000)" --context-sigma 0.05 \
    --data "$WORK"/{misses,explore,aims,misses-rollouts,misses-hot} $COMPILE

# 3. The mediocre clone that is shipped: its demonstrator sets the cube down 3.6 cm beside the plate's centre.
record demos 4000 0 $noise --expert.place-offset 0.0 0.036 --expert.place-spread 0.012
fit policy --refine "$WORK/policy0" --world "$WORK/world1" --data "$WORK/demos" --out "$ASSETS/policy" \
    --batch 512 --steps "$(n 1500)" --learning-rate 5e-4

# 4. The world model and the reward model that judge it: its own roll-outs, and cubes set down all around plates.
record places 6000 120000 --expert.noise 0.02 0.1 --expert.spread 0.015 \
    --expert.place-offset 0.0 0.018 --expert.place-spread 0.025
record rollouts 3000 200000 --policy "$ASSETS/policy"
record hot 2000 300000 --policy "$ASSETS/policy" --temperature 1.3
record clumsy 2000 100000 --expert.noise 0.0 0.4 --expert.spread 0.015 --expert.retry --horizon 64
fit world --refine "$WORK/world1" --out "$ASSETS/world" --batch 1024 --steps "$(n 7500)" --context-sigma 0.05 \
    --data "$WORK"/{demos,clumsy,places,rollouts,hot} $COMPILE
fit reward --data "$WORK"/{places,rollouts,hot} --world "$ASSETS/world" --batch 128 --steps "$(n 5000)"

# 5. Start states: the first pictures of recordings that no evaluation ever uses.
fit starts --data "$WORK/demos" --out "$ASSETS/start_states.h5" --count 512

# 6. The world's tiny decoder, distilled from the full one on episodes that the world imagines from these start states.
fit decoder --world "$ASSETS/world" --policy "$ASSETS/policy" --start-states "$ASSETS/start_states.h5" \
    --episodes "$(n 600)" --held-out 64 --imagine-batch 150 --steps "$(n 7000)" --batch 16
du -sh "$ASSETS"/*
