#!/bin/sh
# Compares Sluice with transformers live and rewrites tests/golden: `make parity`. Usage: tools/parity/run.sh [PYTHON]
# PYTHON is Sluice's own; tools/peers/setup.sh makes transformers' environment, once.
set -eu
python=${1:-.venv/bin/python}

tools/peers/setup.sh transformers
checkpoints=$(mktemp -d)
trap 'rm -rf "$checkpoints"' EXIT
"$python" -m tools.parity.write_checkpoints --output="$checkpoints"
.venv-parity/bin/python tools/parity/run_transformers.py --checkpoints="$checkpoints" --output=tests/golden
"$python" -m pytest tests/models/test_parity.py tests/tools/test_quantize.py -s
