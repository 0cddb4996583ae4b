#!/usr/bin/env bash
# Sets everything up and fine-tunes the built-in encoder on the built-in STS-B with IsoBN. No network after the set-up.
#   ./scripts/demo.sh [more options of `isobn-finetune run`]
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/create_venv.sh
create_venv ""
.venv/bin/isobn-finetune run --config configs/smoke.yaml --output-dir runs/demo --overwrite "$@"
echo
echo "Look at runs/demo/curves.png, runs/demo/result.json and runs/demo/predictions/validation.jsonl."
