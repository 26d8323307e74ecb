#!/bin/sh
# Compares Sluice with transformers live and rewrites tests/golden: `make parity`. Usage: tools/parity/run.sh PYTHON VENV
# PYTHON is Sluice's own; VENV is made for transformers (Python 3.11, torch for CPU) and kept until its list changes.
set -eu
python=${1:-.venv/bin/python} venv=${2:-.venv-parity} list=tools/parity/requirements.txt

if ! cmp -s "$list" "$venv/.ready"; then
  echo "setting up $venv with torch and transformers (about 1 GB, some minutes, once)"
  if command -v python3.11 >/dev/null 2>&1 && python3.11 -c 'import venv, ensurepip' 2>/dev/null; then
    python3.11 -m venv --clear "$venv"
  elif command -v uv >/dev/null 2>&1; then
    uv venv --quiet --clear --seed --python 3.11 "$venv"
  else
    echo "sluice: make parity needs python3.11 on PATH, or uv: install one of them and run it again" >&2
    exit 1
  fi
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input \
    --extra-index-url https://download.pytorch.org/whl/cpu -r "$list"
  cp "$list" "$venv/.ready"
fi

checkpoints=$(mktemp -d)
trap 'rm -rf "$checkpoints"' EXIT
"$python" -m tools.parity.write_checkpoints --output="$checkpoints"
"$venv/bin/python" tools/parity/run_transformers.py --checkpoints="$checkpoints" --output=tests/golden
"$python" -m pytest tests/models/test_parity.py -s
