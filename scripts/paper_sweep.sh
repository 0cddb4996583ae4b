#!/usr/bin/env bash
# Runs a whole paper sweep and reports it; a batch job may call it, and calling it again goes on where it stopped.
#   ./scripts/paper_sweep.sh CONFIG OUTPUT_DIR [more options of `isobn-finetune sweep`]
#   ./scripts/paper_sweep.sh configs/paper_bert_base_cased.yaml runs/paper_bert --jobs 4
#   sbatch --gpus=4 --time=2-00:00:00 ./scripts/paper_sweep.sh configs/paper_roberta_large.yaml runs/paper_roberta --jobs 4
set -uo pipefail
if [ $# -lt 2 ]; then
  sed -n '2,5s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
config=$1 output=$2
shift 2
# A batch system runs a copy of this file from elsewhere; the folder it was submitted from is then the project's.
here=$(cd "$(dirname "$0")/.." && pwd)
[ -x "$here/.venv/bin/isobn-finetune" ] || here=${SLURM_SUBMIT_DIR:-$PWD}
command=isobn-finetune
[ -x "$here/.venv/bin/isobn-finetune" ] && command="$here/.venv/bin/isobn-finetune"
"$command" sweep --config "$config" --output-dir "$output" "$@"
code=$?
# 1: some runs failed, and the report says which; anything else means that there is nothing new to report.
[ "$code" -le 1 ] || exit "$code"
"$command" report "$output" --output-dir "$output/report" || exit $?
exit "$code"
