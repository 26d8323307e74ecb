#!/bin/sh
# Makes the server's virtual environment for an accelerator. Usage: tools/setup_server_env.sh VENV [ACCELERATOR]
# The default ACCELERATOR is VENV's last one, else the machine's own (tools.find_accelerator).
# VENV/.accelerator keeps the name. A change of accelerator recreates VENV, since old packages would stay in it.
set -eu
venv=$1 accelerator=${2:-} held=
[ ! -f "$venv/.accelerator" ] || held=$(cat "$venv/.accelerator")

run_python() {
  # Python 3.9 or later is enough here; the server needs a newer one.
  for name in python3.12 python3.13 python3.14 python3 python; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 9))' >/dev/null 2>&1; then "$name" "$@"; return; fi
  done
  uv --version >/dev/null 2>&1 || { echo cpu; return; }  # tools/setup_env.sh reports what is missing
  uv run --quiet --no-project --python 3.12 python "$@"
}

if [ -z "$accelerator" ] && [ -n "$held" ]; then
  accelerator=$held
else
  accelerator=$(run_python -m tools.find_accelerator --accelerator="$accelerator")
fi
if [ -n "$held" ] && [ "$held" != "$accelerator" ] && [ -f "$venv/pyvenv.cfg" ]; then
  echo "removing $venv, which was made for $held"
  rm -rf "$venv"
fi
lock=requirements.lock
[ "$accelerator" = cpu ] || lock=requirements-$accelerator.lock
tools/setup_env.sh "$venv" "$lock"
echo "$accelerator" >"$venv/.accelerator"
