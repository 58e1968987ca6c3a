#!/usr/bin/env bash
# Rebuild every shipped weight file from nothing: simulator recordings, then models, then asyncrl/assets/tabletop.
#   WORK=/scratch/rebuild bash torchrun_scripts/rebuild_assets.sh
# Minutes with a GPU, a night without. Recordings stay in $WORK and are reused by a second run.
set -euo pipefail
WORK=${WORK:-rebuild}
ASSETS=${ASSETS:-asyncrl/assets/tabletop}
SCALE=${SCALE:-1}                                   # 0.01 = a quick dry run
n() { python3 -c "import sys; print(max(32, int(float(sys.argv[1]) * $SCALE)))" "$1"; }
have() { compgen -G "$1/part-*.h5" >/dev/null; }
asyncrl() { python3 -m asyncrl "$@"; }

# 1. What the policy imitates: a noisy and miscalibrated demonstrator, so that the clone is mediocre on purpose.
have "$WORK/demos" || asyncrl collect --out "$WORK/demos" --episodes "$(n "${DEMOS:-3000}")" --seed 0 \
    --expert.noise ${DEMO_NOISE:-0.02 0.1} --expert.offset ${DEMO_OFFSET:-0.012 0.0} --expert.spread "${DEMO_SPREAD:-0.01}"
# 2. What the world model learns from: the whole range from careful to clumsy, successes and failures.
have "$WORK/explore" || asyncrl collect --out "$WORK/explore" --episodes "$(n "${EXPLORE:-6000}")" --seed 100000 \
    --expert.noise 0.0 0.3 --expert.spread 0.015 --expert.retry
asyncrl fit policy --data "$WORK/demos" --out "$ASSETS/policy" --batch "${POLICY_BATCH:-512}" --steps "$(n "${POLICY_STEPS:-8000}")" &
policy=$!
asyncrl fit world --data "$WORK/explore" --out "$WORK/world0" --vae-batch 16 --vae-steps "$(n "${VAE_STEPS:-8000}")" --steps "$(n 200)"
wait $policy
# 3. Roll-outs of the cloned policy itself, warm and hot: what imagination will have to know best.
have "$WORK/rollouts" || asyncrl collect --out "$WORK/rollouts" --policy "$ASSETS/policy" --episodes "$(n "${ROLLOUTS:-3000}")" --seed 200000
have "$WORK/hot" || asyncrl collect --out "$WORK/hot" --policy "$ASSETS/policy" --episodes "$(n "${HOT:-2000}")" --seed 300000 --temperature 1.3
all=("$WORK/demos" "$WORK/explore" "$WORK/rollouts" "$WORK/hot")
asyncrl fit reward --data "${all[@]}" --world "$WORK/world0" --batch 128 --steps "$(n "${REWARD_STEPS:-6000}")" &
reward=$!
asyncrl fit world --refine "$WORK/world0" --data "${all[@]}" --out "$ASSETS/world" --steps "$(n "${WORLD_STEPS:-30000}")"
wait $reward
cp "$WORK"/world0/reward.* "$ASSETS/world/"
# 4. Start states: the first pictures of recordings no evaluation ever uses.
asyncrl fit starts --data "$WORK/demos" --out "$ASSETS/start_states.h5" --count 512
du -sh "$ASSETS"/*
