#!/usr/bin/env bash
# RLHF from end to end: step 1 (supervised), step 2 (a reward model), step 3 (PPO against that model), on data made on
# the spot; then a judge that no model has seen, before and after step 3. The last line is one JSON object.
#
#     scripts/rlhf_e2e.sh [DIRECTORY]          # SmolLM2-135M, minutes on 2 cores
#     MODEL=./tiny EXAMPLES=8 PAIRS=8 STEPS=1 HELD_OUT=4 scripts/rlhf_e2e.sh out
#
# In the environment: PYTHON, MODEL, EXAMPLES, PAIRS, STEPS (of step 3), HELD_OUT, SEED, DTYPE. Without DIRECTORY
# everything is written to a new temporary one, which is named at the end. The first stage that fails ends the script
# with its exit code.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python}
model=${MODEL:-smollm2-135m} examples=${EXAMPLES:-256} pairs=${PAIRS:-1536} steps=${STEPS:-40}
held_out=${HELD_OUT:-200} seed=${SEED:-0} dtype=${DTYPE:-auto}
out=${1:-}
if [[ -z $out ]]; then
    out=$(mktemp -d "${TMPDIR:-/tmp}/rlhf_e2e.XXXXXX")
    made=$out
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

common=(--dtype "$dtype" --seed "$seed" --overwrite_output_dir)
plain=(--no_apply_chat_template)
stage=start

say() {
    stage=$*
    echo "==> $stage" >&2
}

end() {
    local status=$?
    ((status == 0)) || echo "==> failed, with exit code $status: $stage" >&2
    if [[ -n ${made:-} ]] && ! rmdir "$made" 2>/dev/null; then
        echo "==> models, metrics and data are in $made; remove it when they are of no more use" >&2
    fi
}
trap end EXIT

# The judge's score of a model's greedy answers to the held-out prompts.
score() {
    # Joined, because in a command substitution a command that fails does not end the script.
    "$python" "$root/recipes/generate.py" --model "$1" --prompts "$out/data/held_out.jsonl" --output "$out/$2.jsonl" \
        --temperature 0 --max_tokens 8 --dtype "$dtype" "${plain[@]}" >&2 &&
        "$python" "$root/scripts/larger_number.py" judge "$out/$2.jsonl"
}

say "data in $out/data"
rm -f "$out"/answers-*.jsonl
"$python" "$root/scripts/larger_number.py" data "$out/data" --examples "$examples" --pairs "$pairs" \
    --prompts 512 --held_out "$held_out" --seed "$seed"
base=$(score "$model" answers-base)

say "step 1: supervised fine-tuning"
"$python" "$root/recipes/rlhf_step1_sft.py" --actor "$model" --data "$out/data/examples.jsonl" \
    --output_dir "$out/step1" "${common[@]}" "${plain[@]}" >&2
before=$(score "$out/step1/actor" answers-before)

say "step 2: a reward model"
"$python" "$root/recipes/rlhf_step2_reward.py" --actor "$out/step1/actor" --data "$out/data/pairs.jsonl" \
    --eval_size "$((pairs / 12))" --examples_per_step 32 --learning_rate 1e-4 \
    --output_dir "$out/step2" "${common[@]}" "${plain[@]}" >&2

say "step 3: PPO against it"
"$python" "$root/recipes/rlhf_step3.py" --actor "$out/step1/actor" --reward "$out/step2/reward" \
    --prompts "$out/data/prompts.jsonl" --max_prompt_length 64 --max_completion_length 8 --total_steps "$steps" \
    --whiten_advantages --output_dir "$out/step3" "${common[@]}" "${plain[@]}" >&2
after=$(score "$out/step3/actor" answers-after)

reward_accuracy=$("$python" -c '
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
print([line["eval/accuracy"] for line in lines if "eval/accuracy" in line][-1])' "$out/step2/metrics.jsonl")
printf '{"judge_base": %s, "judge_before": %s, "judge_after": %s, ' "$base" "$before" "$after"
printf '"reward_accuracy": %s, "held_out": %s, "seconds": %s}\n' "$reward_accuracy" "$held_out" "$SECONDS"
