#!/usr/bin/env bash
# Sets everything up, then lint, types and tests.
#   ./scripts/test.sh [options of pytest]
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/create_venv.sh
create_venv "[dev]"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/python -m pytest -q "$@"
