# Sourced by demo.sh and test.sh: makes .venv with the tested versions, or leaves it as it is when nothing changed.
#   create_venv ""      the package
#   create_venv "[dev]" with what the tests need
create_venv() {
  local extra=$1 python=${PYTHON:-python3} stamp wanted
  if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
    echo "Python 3.11, 3.12 or 3.13 is needed; found $("$python" --version 2>&1). Set PYTHON=/path/to/python3.11" >&2
    return 1
  fi
  stamp=.venv/.installed$extra
  wanted=$(cat pyproject.toml constraints.txt isobn_finetune/version.py | "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
  if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    return 0
  fi
  echo "Setting up .venv (once; a few minutes, most of them for torch) ..." >&2
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".$extra"
  echo "$wanted" > "$stamp"
}
