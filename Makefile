# One command for each task; each sets up its own environment, once. See BUILD.md.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
READY := $(VENV)/.ready
# Accelerator of .venv: cpu, cuda12, cuda13 or tpu. Empty: that of the existing .venv, else the machine's own.
ACCELERATOR ?=
MADE_FOR := $(shell cat $(VENV)/.accelerator 2>/dev/null)
LOCK := $(patsubst requirements-cpu.lock,requirements.lock,requirements-$(or $(ACCELERATOR),$(MADE_FOR),cpu).lock)
# `make gpu` measures with the machine's own JAX.
PYTHON ?= python3
DEVICE_VENV := .venv-device
DEVICE_READY := $(DEVICE_VENV)/.ready
RAY_VENV := .venv-ray
RAY_READY := $(RAY_VENV)/.ready
AUDIT_VENV := .venv-audit
AUDIT_READY := $(AUDIT_VENV)/.ready
CLIENTS_VENV := .venv-clients
NODE_CLIENTS := .node-clients
LEVELS ?= x86-64-v3 x86-64-v4
CLIENTS_READY := $(CLIENTS_VENV)/.ready
CLIENTS_OPENAI2_VENV := .venv-clients-openai2
CLIENTS_OPENAI2_READY := $(CLIENTS_OPENAI2_VENV)/.ready
PEERS := transformers openvino vllm llama_cpp

.PHONY: help setup wheel demo server router test test-kernels test-long check check-device audit parity docs clients peers bench bench-cloud chaos ray fleet host-losses soak gpu tpu clean setup-device setup-audit setup-ray

help:
	@sed -n 's/^## //p' Makefile

## make demo      set up, start a server on the demo model, serve a mixed load, show it live
demo: $(READY)
	@$(PY) -m tools.demo $(ARGS)

## make server    run a server on the demo model (ARGS="--port=... --model=..."), on the machine's GPU or TPU if it has one (ACCELERATOR=cpu|cuda12|cuda13|tpu)
server: $(READY)
	@$(PY) -m server.main $(ARGS)

## make router    run a router before several servers (ARGS="--replicas=HOST:PORT,HOST:PORT")
router: $(READY)
	@$(PY) -m server.router $(ARGS)

## make test      run every check that a change must pass, but test-kernels; pyright runs beside the tests and reports after them
test: $(READY)
	@$(PY) -m ruff check . && $(PY) -m ruff format --check .
	@said=$$(mktemp); trap 'rm -f "$$said"' EXIT; $(PY) -m pyright >"$$said" 2>&1 & pyright=$$!; \
	env -u PYTHONDONTWRITEBYTECODE $(PY) -m pytest -m "not long and not kernels" -n 3 --dist loadfile --no-loadscope-reorder $(ARGS); \
	tests=$$?; wait $$pyright; types=$$?; echo "pyright:"; cat "$$said"; $(PY) -m tools.repository.check_protos && exit $$((tests | types))

## make test-kernels  run GPU and TPU kernels in an interpreter, and C++ kernels with seeded bugs, which tests must notice
test-kernels: $(READY)
	@$(PY) -m pytest -m "kernels and not long" -n 3 $(ARGS)

## make test-long run the soak tests, minutes each, and property tests with random examples
test-long: $(READY)
	@$(PY) -m pytest -m "long or hypothesis" --hypothesis-profile=drawn $(ARGS)

## make check     run ruff, pyright and buf
check: $(READY)
	@$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -m pyright && $(PY) -m tools.repository.check_protos

## make check-device  compile every step for an H200 and for TPUs, without these devices, and check the executables (ARGS=--small)
check-device: $(DEVICE_READY)
	@$(DEVICE_VENV)/bin/python -m tools.check_device $(ARGS)

## make audit     check the packages of requirements.lock for known vulnerabilities (ARGS=--service=osv)
audit: $(AUDIT_READY)
	@$(AUDIT_VENV)/bin/python -m tools.repository.audit $(ARGS)

## make docs      write the generated pages and pictures of docs/
docs: $(READY)
	@$(PY) -m tools.repository.generate_documents

## make parity    compare with transformers in a separate environment, and rewrite the golden files
parity: $(READY)
	@tools/parity/run.sh

## make clients   test published clients (openai, LangChain, LlamaIndex, AI SDK, Codex, lm-eval, gRPC in Go, ...) against a server, in separate environments (ARGS="--only=openai,llm")
clients: $(READY) $(CLIENTS_READY) $(CLIENTS_OPENAI2_READY) $(NODE_CLIENTS)/.ready
	@$(PY) -m tools.clients $(ARGS)

## make peers     run the same requests on vLLM, OpenVINO GenAI, llama.cpp and transformers on this CPU (ARGS=--shape=llama-15m)
peers: $(READY)
	@tools/peers/setup.sh $(PEERS) && $(PY) -m tools.peers $(ARGS)

## make bench     measure host time, attention, and static against continuous batching (benchmarks/README.md)
bench: $(READY)
	@$(PY) -m tools.bench.host && $(PY) -m tools.bench.attention && $(PY) -m tools.study.compare_batching

## make chaos     test lost clients, killed servers, faults and overload for ten minutes; prints a table (ARGS=--scenario=...)
chaos: $(READY)
	@$(PY) -m tools.chaos $(ARGS)

## make ray       run Ray on this machine, lose replicas and servers under load, scale up and down; prints a table (ARGS=--scenario=...)
ray: $(RAY_READY)
	@$(RAY_VENV)/bin/python -m tools.ray_check $(ARGS)

## make fleet     run two Ray replicas, a router, a prefill and a decode server on this machine, and lose each under load
fleet: $(READY) $(RAY_READY)
	@$(RAY_VENV)/bin/python -m tools.fleet $(ARGS)

## make host-losses  lose a host of two under load by kill, stop, changed bits and delay, and start again (ARGS="--rounds=100")
host-losses: $(READY)
	@$(PY) -m tools.host_losses $(ARGS)

## make soak      mix these scenarios for hours and watch memory, threads and descriptors (ARGS=--hours=8)
soak: $(READY)
	@$(PY) -m tools.chaos --soak $(ARGS)

## make gpu       check, time and tune the attention kernels on a Hopper GPU; ARGS=--only=decode and others: the engine (PYTHON=, ARGS=)
gpu:
	@$(PYTHON) -m tools.gpu $(ARGS)

## make tpu       check and time the attention kernels on a TPU (ARGS="--only=smoke --out=DIR")
tpu: $(READY)
	@$(PY) -m tools.tpu $(ARGS)

## make bench-cloud  test answers and kernels and measure engine, server and peers on a rented GPU or TPU; writes one JSON file and one page (ARGS="--model=DIR", ARGS=--dry_run)
bench-cloud: $(READY)
	@$(PY) -m tools.bench_cloud $(ARGS)

## make wheel     build the wheels of server and client in dist/; the server's holds the C++ kernels of these x86-64 levels (LEVELS=), and other CPUs use XLA
wheel: $(READY)
	@$(PY) -m pallas_kernels.native $(LEVELS) && $(PY) -m tools.repository.make_wheel dist

## make clean     remove the virtual environments and caches
clean:
	rm -rf $(VENV) $(DEVICE_VENV) $(RAY_VENV) $(AUDIT_VENV) $(CLIENTS_VENV) $(CLIENTS_OPENAI2_VENV) $(NODE_CLIENTS) .venv-peers-* .venv-parity pallas_kernels/built .cache .pytest_cache .ruff_cache .hypothesis

setup: $(READY)

setup-device: $(DEVICE_READY)

setup-audit: $(AUDIT_READY)

setup-ray: $(RAY_READY)

# Rebuilds the C++ kernels when their sources change; without a compiler it prints a line and continues.
$(READY): $(INSTALLED) $(wildcard pallas_kernels/*.h pallas_kernels/*/*.cc) pallas_kernels/native.py
	@$(PY) -m pallas_kernels.native && touch $@

$(INSTALLED): $(wildcard $(LOCK)) tools/setup_env.sh tools/setup_server_env.sh
	@tools/setup_server_env.sh $(VENV) $(ACCELERATOR) && touch $@

ifneq ($(ACCELERATOR),)
ifneq ($(ACCELERATOR),$(MADE_FOR))
.PHONY: another-accelerator
$(INSTALLED): another-accelerator
endif
endif
# ACCELERATOR=cpu selects the CPU on a machine with a GPU or TPU; the server does not fall back to the CPU by itself.
ifeq ($(ACCELERATOR),cpu)
export JAX_PLATFORMS ?= cpu
endif

$(DEVICE_READY): requirements-device.lock tools/setup_env.sh $(INSTALLED)
	@tools/setup_env.sh $(DEVICE_VENV) requirements-device.lock $(VENV) && touch $@

$(RAY_READY): requirements-ray.lock tools/setup_env.sh $(INSTALLED)
	@tools/setup_env.sh $(RAY_VENV) requirements-ray.lock $(VENV) && touch $@

$(AUDIT_READY): requirements-audit.lock tools/setup_env.sh
	@tools/setup_env.sh $(AUDIT_VENV) requirements-audit.lock && touch $@

# Without npm the clients for Node are left out.
$(NODE_CLIENTS)/.ready: tools/clients/package.json tools/clients/package-lock.json
	@mkdir -p $(NODE_CLIENTS) && cp $^ $(NODE_CLIENTS)
	@if npm --version >/dev/null 2>&1; then npm ci --silent --no-audit --no-fund --prefix $(NODE_CLIENTS); \
	else echo "sluice: no npm, so the clients for Node are left out"; fi
	@touch $@

$(CLIENTS_READY): tools/clients/requirements.txt tools/setup_env.sh
	@tools/setup_env.sh $(CLIENTS_VENV) tools/clients/requirements.txt && touch $@

$(CLIENTS_OPENAI2_READY): tools/clients/requirements-openai2.txt tools/setup_env.sh
	@tools/setup_env.sh $(CLIENTS_OPENAI2_VENV) tools/clients/requirements-openai2.txt && touch $@
