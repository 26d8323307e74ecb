#!/bin/sh
# Makes a virtual environment of the checkout from a lock file. Usage: tools/setup_env.sh VENV LOCKFILE [BASE]
# With uv where it is installed, else with a Python >= 3.12 on PATH or under pyenv's versions, else one line and exit 1.
# With BASE, a virtual environment, VENV adds to what that one holds: just what the lock lists goes in, no dependencies.
set -eu
venv=$1 lock=$2 base=${3:-}

fits() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }

interpreter() { "$1" -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))'; }

# Links are resolved: the path file must outlast a checkout that links to another one's environment.
packages() { "$1" -c 'import os, sysconfig; print(os.path.realpath(sysconfig.get_path("purelib")))'; }

find_python() {
  if [ -n "$base" ]; then interpreter "$base/bin/python"; return; fi
  for name in python3.12 python3.13 python3.14 python3 python \
      "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[3-9]*/bin/python; do
    # The interpreter itself: uv takes neither a shim of pyenv nor the python of another environment by name.
    if fits "$name"; then interpreter "$name"; return; fi
  done
  return 1
}

if [ -z "${SLUICE_NO_UV:-}" ] && uv --version >/dev/null 2>&1; then
  python=$(find_python) || python=3.12  # uv brings one where the machine has none
  echo "setting up $venv with uv and $python"
  uv venv --quiet --allow-existing --python "$python" "$venv"
  uv pip install --quiet ${base:+--no-deps} --python "$venv/bin/python" -r "$lock"
elif python=$(find_python); then
  echo "setting up $venv with $python (a minute or two, once)"
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input ${base:+--no-deps} -r "$lock"
else
  echo "sluice: found neither uv nor a Python >= 3.12 (on PATH or under pyenv): install one of them and run make again" >&2
  exit 1
fi
# A path file: no flag of venv, uv or pip lets one virtual environment see the packages of another.
[ -z "$base" ] || packages "$base/bin/python" >"$(packages "$venv/bin/python")/base.pth"
