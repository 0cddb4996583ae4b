#!/usr/bin/env bash
# Runs all seven tasks of the paper for one model and one norm, and says at the end which failed.
#   ./scripts/all_tasks.sh MODEL NORM [more options of `isobn-finetune run`]
#   ./scripts/all_tasks.sh roberta-base isobn --seed 2
#   ./scripts/all_tasks.sh tiny isobn --epochs 1
set -uo pipefail
if [ $# -lt 2 ]; then
  sed -n '2,5s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
model=$1 norm=$2
shift 2
here=$(cd "$(dirname "$0")" && pwd)
command=isobn-finetune
[ -x "$here/../.venv/bin/isobn-finetune" ] && command="$here/../.venv/bin/isobn-finetune"
failed=()
# The smaller tasks first, so that a wrong option shows within minutes.
for task in rte mrpc cola stsb sst2 qnli mnli; do
  echo "== $task" >&2
  # A finished run is skipped and an interrupted one goes on, so this script can simply be started again.
  "$command" run --task "$task" --model "$model" --norm "$norm" --resume "$@" || {
    code=$?
    [ "$code" -eq 130 ] && exit 130
    failed+=("$task (exit $code)")
  }
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "Failed: ${failed[*]}" >&2
  exit 1
fi
echo "All seven tasks are done."
