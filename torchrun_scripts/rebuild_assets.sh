#!/usr/bin/env bash
# Rebuild every shipped weight file from nothing: simulator recordings, then models, then asyncrl/assets/tabletop*.
#   WORK=/scratch/rebuild bash torchrun_scripts/rebuild_assets.sh
#   ONLY="opensora evac" WORK=/scratch/rebuild bash torchrun_scripts/rebuild_assets.sh    # only these stages
#   ONLY=evac STEPS=0.2 bash torchrun_scripts/rebuild_assets.sh                  # a fifth of the steps: rougher, sooner
# About an hour with one data-centre GPU and 16 cores, and one more for OpenSora and EVAC; days without. Recordings stay
# in $WORK and are reused: a stage makes those that it needs and that are not there. What another stage makes must be.
# The files in this repository were made stage by stage with these settings; the whole was not yet run in one go.
set -euo pipefail
WORK=${WORK:-rebuild}
ASSETS=${ASSETS:-asyncrl/assets/tabletop}
stages="clone misses policy world starts decoder opensora evac"
ONLY=${ONLY:-$stages}
SCALE=${SCALE:-1}                                   # 0.01 = a quick dry run: of episodes and steps
STEPS=${STEPS:-$SCALE}                              # factor on the steps alone
COMPILE=${COMPILE-$(command -v nvidia-smi >/dev/null && echo --compile || true)}    # COMPILE= leaves it out
times() { python3 -c "import sys; print(max(32, int(float(sys.argv[1]) * float(sys.argv[2]))))" "$1" "$2"; }
e() { times "$1" "$SCALE"; }                        # episodes
n() { times "$1" "$STEPS"; }                        # steps
record() { # record NAME EPISODES FIRST_SEED FLAGS...
    compgen -G "$WORK/$1/part-*.h5" >/dev/null ||
        python3 -m asyncrl collect --out "$WORK/$1" --episodes "$(e "$2")" --seed "$3" "${@:4}"
}
fit() { python3 -m asyncrl fit "$@"; }

noise="--expert.noise 0.02 0.08 --expert.spread 0.008"
clumsy="--expert.noise 0.0 0.4 --expert.spread 0.015 --expert.retry"
recordings() { # recordings NAME...: those that are not there yet
    local name
    for name; do
        case $name in
        careful) record careful 16000 0 $noise --expert.offset 0.012 0.0 ;;
        explore) record explore 8000 100000 $clumsy --horizon 64 ;;
        misses) record misses 12000 0 $noise --expert.offset 0.023 0.0 ;;
        aims) record aims 10000 120000 --expert.noise 0.02 0.08 --expert.spread 0.02 ;;
        misses-rollouts) record misses-rollouts 5000 200000 --policy "$WORK/policy1" ;;
        misses-hot) record misses-hot 3000 300000 --policy "$WORK/policy1" --temperature 1.3 ;;
        demos) record demos 4000 0 $noise --expert.place-offset 0.0 0.036 --expert.place-spread 0.012 ;;
        places) record places 6000 120000 --expert.noise 0.02 0.1 --expert.spread 0.015 \
            --expert.place-offset 0.0 0.018 --expert.place-spread 0.025 ;;
        rollouts) record rollouts 3000 200000 --policy "$ASSETS/policy" ;;
        hot) record hot 2000 300000 --policy "$ASSETS/policy" --temperature 1.3 ;;
        clumsy) record clumsy 2000 100000 $clumsy ;;
        esac
    done
}

# 1. A policy that can do the task, and a world model that has seen the whole range from careful to clumsy.
clone() {
    recordings careful explore
    fit policy --data "$WORK/careful" --out "$WORK/policy0" --batch 512 --steps "$(n 12400)" $COMPILE
    fit world --data "$WORK/explore" --out "$WORK/world0" --vae-steps "$(n 6900)" --vae-batch 48 \
        --steps "$(n 6950)" --batch 512 --context-sigma 0.1 $COMPILE
}

# 2. What a missed grasp looks like: a demonstrator who grasps off-centre, one of mixed aim, and a clone's roll-outs.
misses() {
    recordings misses aims
    fit policy --data "$WORK/misses" --out "$WORK/policy1" --batch 512 --steps "$(n 8000)" $COMPILE
    recordings explore misses-rollouts misses-hot
    fit world --refine "$WORK/world0" --out "$WORK/world1" --batch 1024 --steps "$(n 15000)" --context-sigma 0.05 \
        --data "$WORK"/{misses,explore,aims,misses-rollouts,misses-hot} $COMPILE
}

# 3. The mediocre clone that is shipped: its demonstrator sets the cube down 3.6 cm beside the plate's centre.
policy() {
    recordings demos
    fit policy --refine "$WORK/policy0" --world "$WORK/world1" --data "$WORK/demos" --out "$ASSETS/policy" \
        --batch 512 --steps "$(n 1500)" --learning-rate 5e-4
}

# 4. The world model and the reward model that judge it: its own roll-outs, and cubes set down all around plates.
world() {
    recordings demos clumsy places rollouts hot
    fit world --refine "$WORK/world1" --out "$ASSETS/world" --batch 1024 --steps "$(n 7500)" --context-sigma 0.05 \
        --data "$WORK"/{demos,clumsy,places,rollouts,hot} $COMPILE
    fit reward --data "$WORK"/{places,rollouts,hot} --world "$ASSETS/world" --batch 128 --steps "$(n 5000)"
}

# 5. Start states: the first pictures of recordings that no evaluation ever uses.
starts() {
    recordings demos
    fit starts --data "$WORK/demos" --out "$ASSETS/start_states.h5" --count 512
}

# 6. The world's tiny decoder, distilled from the full one on episodes that the world imagines from these start states.
decoder() {
    fit decoder --world "$ASSETS/world" --policy "$ASSETS/policy" --start-states "$ASSETS/start_states.h5" \
        --episodes "$(e 600)" --held-out 64 --imagine-batch 150 --steps "$(n 7000)" --batch 16
}

# 7. OpenSora and EVAC on the same table, with a reward model that has seen what their autoencoder draws. Recordings
#    without poses are from before there were any: delete them.
other() { # other KIND BATCH FLAGS...
    recordings explore aims demos clumsy places rollouts hot
    fit world --kind "$1" --data "$WORK"/{explore,aims,demos,clumsy,places,rollouts,hot} --out "${ASSETS}_$1/world" \
        --batch "$2" "${@:3}"
}
opensora() {
    other opensora 512 --vae-steps "$(n 7000)" --vae-batch 48 --steps "$(n 30000)" $COMPILE
    fit reward --data "$WORK"/{places,rollouts,hot} --world "${ASSETS}_opensora/world" --batch 128 --steps "$(n 5000)"
}
evac() { # frames are the same latents in both: a second autoencoder, or another judge of what it draws, would learn nothing else
    other evac 128 --autoencoder "${ASSETS}_opensora/world" --steps "$(n 20000)" # not compiled, which takes minutes
    cp "${ASSETS}_opensora/world"/reward.{json,safetensors} "${ASSETS}_evac/world"
    fit starts --data "$WORK/demos" --out "${ASSETS}_evac/start_states.h5" --count 512 # they say where the hand is
}

for stage in $ONLY; do
    [[ " $stages " == *" $stage "* ]] || { echo "ONLY names $stage, which is none of: $stages" >&2; exit 2; }
done
for stage in $ONLY; do "$stage"; done
du -sh "$ASSETS"*/*
