#!/bin/bash
# A quarter of an hour on a rented GPU (docs/how-to/first-contact.md): kernels, then decode steps of the engine.
#   tools/gpu/quarter_hour.sh OUT [MINUTES]
# Uses the machine's own Python (PYTHON=) and wheels in .whl/, if any; never the network. Leaves at most 8 files in OUT.
set -u
out=$(realpath -m "${1:?usage: tools/gpu/quarter_hour.sh OUT [MINUTES]}") minutes=${2:-9.3}
cd "$(dirname "$0")/../.." || exit 2
python=${PYTHON:-python3} scratch=${SCRATCH:-.cache/quarter_hour}
export PYTHONUNBUFFERED=1
mkdir -p "$out" "$scratch"
left() { awk -v total="$minutes" -v used="$SECONDS" 'BEGIN { printf "%.2f", total - used / 60 }'; }
at_least() { awk -v left="$(left)" -v least="$1" 'BEGIN { exit left < least }'; }

if compgen -G '.whl/*.whl' >/dev/null; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$scratch/site" .whl/*.whl || exit 2
  export PYTHONPATH=$scratch/site${PYTHONPATH:+:$PYTHONPATH}
fi
if ! "$python" -c 'import flax, jax'; then
  echo "$python needs jax with its CUDA plugin, and flax: install them, put their wheels into .whl/, or set PYTHON" >&2
  exit 2
fi

# 3.5 minutes are for the engine, if there are so many.
kernels=$(awk -v left="$(left)" 'BEGIN { print (left > 7 ? left - 3.5 : left) }')
"$python" -m tools.gpu --out="$out" --minutes="$kernels" --only=smoke,ceilings,check,time,sweep ${DRY_RUN:+--dry_run=$DRY_RUN} \
  ${MATCH:+"--match=$MATCH"}
code=$?
if [ $code -ne 0 ]; then
  echo "kernels: exit code $code. The engine is left out, and $(left) minutes are left for another try." >&2
  exit $code
fi
if ! at_least 2; then
  echo "engine: left out, with $(left) minutes left" >&2
  exit 0
fi
"$python" -m tools.gpu --out="$scratch/engine" --scratch="$scratch" --minutes="$(left)" --only=decode ${DRY_RUN:+--dry_run=$DRY_RUN}
code=$?
cp "$scratch"/engine/engine.{txt,json} "$out"
exit $code
