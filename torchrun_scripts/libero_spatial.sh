#!/usr/bin/env bash
# LIBERO-Spatial from nothing: a weak base policy, a world that has seen how it fails, an audit, training in imagination.
#   bash torchrun_scripts/libero_spatial.sh                             # every stage in turn; what is there stays
#   WORK=/scratch/spatial bash torchrun_scripts/libero_spatial.sh world reward audit
#   SCALE=0.01 bash torchrun_scripts/libero_spatial.sh --anyway         # all of it, tiny, on two CPU cores
# Each stage ends in a line of figures and a go or a no-go; a no-go stops with exit code 3, unless --anyway.
# One GPU and 16 cores: about half an hour to the audit; a second GPU shares the fits. Before: pip install -e '.[libero]', asyncrl simulators lite libero_spatial.
set -uo pipefail
STAGES="data policy base rollouts world reward audit train evaluate"
WORK=${WORK:-libero_spatial}
SCALE=${SCALE:-1}                        # factor on episodes and optimizer steps
EPISODES=${EPISODES:-1}                  # factor on episodes alone, for fewer cores or less time
SIZE=${SIZE:-128}                        # pixels
BESIDE=${BESIDE:-0.1}                    # metres from the plate's centre (in -y) to where half of the demonstrations set the bowl down
WORKERS=${WORKERS:-$(nproc)}             # simulator processes in all
COMPILE=${COMPILE-$(command -v nvidia-smi >/dev/null && echo --compile)}    # COMPILE= leaves it out
UPDATES=${UPDATES:-15}
SEED=${SEED:-0}                          # of the training; each has a folder of its own
WORLD0_STEPS=${WORLD0_STEPS:-1200}       # of the transformer, before the roll-outs and after
WORLD_STEPS=${WORLD_STEPS:-7000}
IMAGINED_MEMORY=${IMAGINED_MEMORY:-0.5}  # of the second fit; see asyncrl fit world --help
PYTHON=${PYTHON:-python3}
ANYWAY=
visible=${CUDA_VISIBLE_DEVICES-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd,)}
IFS=, read -ra gpus <<<"$visible"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} MUJOCO_GL=${MUJOCO_GL:-egl}

simulator="--simulator libero_spatial --simulator-settings scene=light wrist=false"
decisions=22                             # 176 steps: what is recorded and imagined; evaluation plays the official 220
n() { "$PYTHON" -c "import sys; print(max(int(sys.argv[2]), int($SCALE * int(sys.argv[1]))))" "$1" "${2:-1}"; }
e() { "$PYTHON" -c "import sys; print(max(int(sys.argv[2]), int($SCALE * $EPISODES * int(sys.argv[1]))))" "$1" "${2:-1}"; }
part() { echo $(((WORKERS * $1 + 99) / 100)); }     # a percentage of the simulator processes
on() { # on N COMMAND: where there are several GPUs, on the Nth alone
    if ((${#gpus[@]} < 2)); then "${@:2}"; else CUDA_VISIBLE_DEVICES=${gpus[$1 % ${#gpus[@]}]} "${@:2}"; fi
}
a() { "$PYTHON" -m asyncrl "$@"; }
collect() { a collect $simulator --image-size "$SIZE" --horizon $((8 * decisions)) "$@"; }
evaluate() { # evaluate POLICY TRIALS TEMPERATURE WORKERS FILE
    a evaluate "$1" $simulator --image-size "$SIZE" --trials "$(e "$2")" --temperature "$3" --workers "$4" --json "$5"
}

run() { # run NAME COMMAND...: unless it was done; what it prints goes to $WORK/NAME.log
    local name=$1 began=$SECONDS
    [ -e "$WORK/$name.done" ] && return
    rm -rf "${WORK:?}/$name"             # of a run that was interrupted
    if "${@:2}" >"$WORK/$name.log" 2>&1; then
        echo $((SECONDS - began)) >"$WORK/$name.done"
    else
        echo "[$name] failed after $((SECONDS - began)) s; the end of $WORK/$name.log:" >&2
        tr '\r' '\n' <"$WORK/$name.log" | grep -v '^ *$' | tail -n 15 >&2
        return 1
    fi
}
needs() { # needs STAGE NAME...
    local name
    for name in "${@:2}"; do
        [ -e "$WORK/$name.done" ] || { echo "$WORK/$name is not there. Make it: WORK=$WORK bash $0 $1" >&2; exit 2; }
    done
}
together() { # Wait for what was started with &; any failure ends the script.
    local job
    for job in "$@"; do wait "$job" || exit 1; done
}
figures() { # figures STAGE: print its line, note it in $WORK/figures.jsonl, and stop at a no-go
    local code=0
    "$PYTHON" - "$WORK" "$1" "$SEED" <<'PY' || code=$?
import json, re, sys
from pathlib import Path
import h5py
work, stage, seed = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
def recorded(pattern):
    tasks = {}
    for path in sorted(work.glob(f"{pattern}/part-*.h5")):
        with h5py.File(path) as file:
            ends = file["offsets"][1:] - 1
            for task, solved in zip(file["task_ids"][:], file["success"][:][ends]):
                tasks.setdefault(int(task), []).append(int(solved))
    return tasks
def rate(tasks):
    every = [one for solved in tasks.values() for one in solved]
    return 100 * sum(every) / max(1, len(every)), len(every)
def evaluated(name):
    rate = json.loads((work / f"{name}.json").read_text())["overall"]
    return 100 * rate["successes"] / rate["episodes"], f"[{100 * rate['low']:.1f}, {100 * rate['high']:.1f}]"
def last_number(name, pattern):
    return float(re.findall(pattern, (work / f"{name}.log").read_text())[-1])
row, go, change = {}, True, ""
if stage == "data":
    tasks = recorded("demos-*")
    for task, solved in recorded("beside-*").items():
        tasks[task] = tasks.get(task, []) + solved
    row = {"solved": rate(tasks)[0], "episodes": rate(tasks)[1], "tasks": {k: round(rate({0: v})[0]) for k, v in tasks.items()}}
    go, change = 40 <= row["solved"] <= 60, "the exact expert solves nearly all of its half"
if stage == "policy":
    row = {"nats_per_token": last_number("policy", r"([\d.]+) nats")}
    go, change = row["nats_per_token"] < 2, "less noise in the demonstrations, a longer fit"
if stage == "base":
    for name in ("base1", "base0"):
        row[name], row[name + "_interval"] = evaluated(name)
    go, change = all(30 <= row[name] <= 55 for name in ("base1", "base0")), "the share of demonstrations that miss"
if stage == "rollouts":
    own = [rate(recorded(name)) for name in ("rollouts", "hot")]
    others = sum(rate(recorded(name))[1] for name in ("demos-*", "beside-*", "places", "clumsy"))
    row = {"solved": own[0][0], "solved_hot": own[1][0], "share": (own[0][1] + own[1][1]) / (own[0][1] + own[1][1] + others)}
    go, change = row["share"] >= 1 / 3, "more roll-outs"
if stage == "world":
    row = {"autoencoder": last_number("world0", r"absolute error ([\d.]+)"), "velocity_error": last_number("world", r"velocity error ([\d.]+)")}
if stage == "reward":
    row = {"cross_entropy": last_number("reward", r"cross-entropy ([\d.]+)")}
if stage == "audit":
    for name in ("audit1", "audit0"):
        found = json.loads((work / f"{name}.json").read_text())["audits"][0]
        for key in ("imagined_success", "true_success", "wrong", "wrong_on_true_frames"):
            one = found[key]
            row[f"{name}_{key}"] = [round(100 * one[k], 1) for k in ("rate", "low", "high")]
        row[f"{name}_gap"] = round(row[f"{name}_imagined_success"][0] - row[f"{name}_true_success"][0], 1)
    # A verdict that never changes is wrong in the true successes, or in all others.
    constant = {name: min(row[f"{name}_true_success"][0], 100 - row[f"{name}_true_success"][0]) for name in ("audit1", "audit0")}
    go = all(abs(row[f"{name}_gap"]) <= 10 and row[f"{name}_wrong"][0] < wrong for name, wrong in constant.items())
    change = "longer fit of the world, more roll-outs: nothing is trained in a world that says otherwise than the truth"
if stage == "train":
    updates = [json.loads(line) for line in (work / f"train-{seed}" / "metrics.jsonl").read_text().splitlines()]
    imagined = [one["env/success_once"] for one in updates if "env/success_once" in one]
    row = {"seed": int(seed), "updates": len(imagined), "imagined_first": 100 * imagined[0], "imagined_last": 100 * imagined[-1]}
if stage == "evaluate":
    row = {"seed": int(seed)}
    for name in ("base1", "base0", f"after-{seed}-1", f"after-{seed}-0"):
        row[name], row[name + "_interval"] = evaluated(name)
    row["gain"] = max(row[f"after-{seed}-{t}"] for t in (1, 0)) - max(row["base1"], row["base0"])
    go, change = row["gain"] >= 20, "see docs/libero_spatial.md"
row = {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}
text = " ".join(f"{key}={value}" for key, value in row.items())
print(f"[{stage}] {text}: " + ("go" if go else f"NO-GO, change: {change}"), flush=True)
with (work / "figures.jsonl").open("a") as file:
    file.write(json.dumps({"stage": stage, "go": go, **row}) + "\n")
sys.exit(0 if go else 3)
PY
    [ $code = 0 ] || { [ $code = 3 ] && [ -n "$ANYWAY" ]; } || exit $code
}

demos() { for task in 0 1 2 3 4 5 6 7 8 9; do echo "$WORK/demos-$task" "$WORK/beside-$task"; done; }
everything() { demos; echo "$WORK/places" "$WORK/clumsy" "$WORK/rollouts" "$WORK/hot"; }

demonstrate() { # demonstrate NAME-TASK SEED METRES: 40 episodes whose bowls land so far beside the plate's centre
    local task=${1##*-} y
    y=$("$PYTHON" -c "print(-0.011 - $3)")    # without an offset they land at (-0.7, 1.1) cm, one start of each task
    on "$task" run "$1" collect --tasks "$task" --episodes "$(e 40 1)" --seed "$2" --out "$WORK/$1" --workers "$(part 3)" \
        --expert.noise 0 0.03 --expert.place-offset 0.007 "$y" --expert.place-spread 0.009
}
data() { # Demonstrations with little noise: half of them set the bowl down on the plate, half clearly beside it. Beside
    # them, for the world alone: set-downs all around, missed and repeated grasps.
    local jobs=() task others
    run places collect --episodes "$(e 300 4)" --seed 20000 --out "$WORK/places" --workers "$(part 25)" \
        --expert.noise 0 0.12 --expert.spread 0.01 --expert.place-spread 0.04 & others=$!
    run clumsy collect --episodes "$(e 120 4)" --seed 30000 --out "$WORK/clumsy" --workers "$(part 15)" \
        --expert.noise 0.1 0.4 --expert.spread 0.02 --expert.retry --expert.place-spread 0.02 & others+=" $!"
    for task in 0 1 2 3 4 5 6 7 8 9; do
        demonstrate "demos-$task" 0 0 & jobs+=($!)
        demonstrate "beside-$task" 10000 "$BESIDE" & jobs+=($!)
        ((${#jobs[@]} % WORKERS)) || { together "${jobs[@]}"; jobs=(); }
    done
    together "${jobs[@]}" $others
    run starts.h5 a fit starts --data $(demos) --out "$WORK/starts.h5" --count 512 || exit 1
}
first_world() {
    on 1 run world0 a fit world --data $(demos) "$WORK/places" "$WORK/clumsy" --out "$WORK/world0" --size small --vae-batch "$(n 48 2)" \
        --vae-steps "$(n 3500 4)" --batch "$(n 512 8)" --steps "$(n "$WORLD0_STEPS" 4)" $COMPILE
}
policy() { # The GPU fits a world beside it that has not seen the policy.
    needs data places clumsy starts.h5
    first_world & later=$!
    on 0 run policy a fit policy --data $(demos) --out "$WORK/policy" --size small --batch "$(n 512 8)" --steps "$(n 4000 4)" $COMPILE || exit 1
}
both() { # both NAME POLICY: evaluate at temperatures 1 and 0
    on 1 run "$1"1 evaluate "$2" 20 1 "$(part 50)" "$WORK/$1"1.json & local one=$!
    on 0 run "$1"0 evaluate "$2" 20 0 "$(part 50)" "$WORK/$1"0.json & together $one $!
}
base() {
    needs policy policy
    both base "$WORK/policy"
}
rollouts() { # The policy's own episodes, also hotter than it will ever act.
    needs policy policy
    on 1 run hot collect --policy "$WORK/policy" --temperature 1.3 --episodes "$(e 250 4)" --seed 60000 --out "$WORK/hot" --workers "$(part 30)" & local hot=$!
    on 0 run rollouts collect --policy "$WORK/policy" --episodes "$(e 600 4)" --seed 40000 --out "$WORK/rollouts" --workers "$(part 70)" & together $hot $!
}
world() { # The same autoencoder serves the reward model, which is fitted beside.
    needs rollouts rollouts hot
    [ -z "${later:-}" ] || together "$later"
    first_world || exit 1
    base & local measured=$!
    on 1 run reward a fit reward --data $(everything) --world "$WORK/world0" --size small --steps "$(n 2000 4)" --batch "$(n 256 8)" & local judge=$!
    on 0 run world a fit world --refine "$WORK/world0" --data $(everything) --out "$WORK/world" --batch "$(n 512 8)" --steps "$(n "$WORLD_STEPS" 4)" \
        --context-sigma 0.2 --imagined-memory "$IMAGINED_MEMORY" $COMPILE || exit 1
    together $judge $measured
}
reward() {
    needs world world reward
    cp "$WORK"/world0/reward.* "$WORK/world"
}
audit() {
    needs world world reward
    local name=audit1 jobs=()
    for name in audit1 audit0; do
        on "${name: -1}" run "$name" a audit "$WORK/policy" $simulator --world "$WORK/world" --start-states "$WORK/starts.h5" --trials "$(e 10)" \
            --rows "$(n 50 4)" --max-decisions $decisions --success-frames last --temperature "${name#audit}" --workers "$(part 50)" --json "$WORK/$name.json" &
        jobs+=($!)
    done
    together "${jobs[@]}"
}
train() {
    needs audit audit1 audit0
    run "train-$SEED" "$PYTHON" -m torch.distributed.run --standalone "$(dirname "$0")/train.sh" --policy "$WORK/policy" --world "$WORK/world" --start-states "$WORK/starts.h5" \
        --run-dir "$WORK/train-$SEED" --seed "$SEED" --updates "$(n "$UPDATES" 2)" --actor.max-decisions $decisions --actor.slots 128 --imagination.precision bf16 \
        --guard.kind lasting --algorithm.kl-coef 0.02 || exit 1
}
evaluate_both() {
    needs train "train-$SEED"
    needs base base1 base0
    both "after-$SEED-" "$WORK/train-$SEED"
}

chosen=()
for word in "$@"; do
    case $word in
    --anyway) ANYWAY=1 ;;
    *) [[ " $STAGES " == *" $word "* ]] || { echo "$word is none of the stages: $STAGES" >&2; exit 2; }; chosen+=("$word") ;;
    esac
done
mkdir -p "$WORK"
settings="SCALE=$SCALE EPISODES=$EPISODES SIZE=$SIZE BESIDE=$BESIDE"
[ -e "$WORK/settings" ] || echo "$settings" >"$WORK/settings"
[ "$(cat "$WORK/settings")" = "$settings" ] || { echo "$WORK was made with other settings: $(cat "$WORK/settings"). Use those, or another WORK." >&2; exit 2; }
for stage in ${chosen[@]:-$STAGES}; do
    began=$SECONDS
    if [ $stage = evaluate ]; then evaluate_both; else "$stage"; fi
    figures "$stage"
    echo "[$stage] $((SECONDS - began)) s"
done
wait
