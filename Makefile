# One command a wish; each does its own set-up, once. See BUILD.md.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
READY := $(VENV)/.ready
# What .venv is made for: cpu, cuda12, cuda13 or tpu. Nothing: what it was made for, else what the machine has.
ACCELERATOR ?=
MADE_FOR := $(shell cat $(VENV)/.accelerator 2>/dev/null)
LOCK := $(patsubst requirements-cpu.lock,requirements.lock,requirements-$(or $(ACCELERATOR),$(MADE_FOR),cpu).lock)
# `make gpu` measures with the machine's own JAX.
PYTHON ?= python3
DEVICE_VENV := .venv-device
DEVICE_READY := $(DEVICE_VENV)/.ready
AUDIT_VENV := .venv-audit
AUDIT_READY := $(AUDIT_VENV)/.ready
CLIENTS_VENV := .venv-clients
LEVELS ?= x86-64-v3 x86-64-v4
CLIENTS_READY := $(CLIENTS_VENV)/.ready
PEERS := transformers openvino vllm llama_cpp

.PHONY: help setup wheel demo server test test-long check check-device audit parity docs clients peers bench bench-cloud chaos soak gpu clean setup-device setup-audit

help:
	@sed -n 's/^## //p' Makefile

## make demo      set up, start a server on the demo model, serve a mixed load, show it live
demo: $(READY)
	@$(PY) -m tools.demo $(ARGS)

## make server    a server on the demo model that keeps running (ARGS="--port=... --model=..."), on the machine's GPU or TPU where it has one (ACCELERATOR=cpu|cuda12|cuda13|tpu)
server: $(READY)
	@$(PY) -m server.main $(ARGS)

## make test      every check that a change must pass; types are checked beside the tests, and reported after them
test: $(READY)
	@$(PY) -m ruff check . && $(PY) -m ruff format --check .
	@said=$$(mktemp); trap 'rm -f "$$said"' EXIT; $(PY) -m pyright >"$$said" 2>&1 & pyright=$$!; \
	env -u PYTHONDONTWRITEBYTECODE $(PY) -m pytest -m "not long" -n 3 --dist loadfile --no-loadscope-reorder $(ARGS); \
	tests=$$?; wait $$pyright; types=$$?; echo "pyright:"; cat "$$said"; $(PY) -m tools.repository.check_protos && exit $$((tests | types))

## make test-long the soak tests, minutes each, and hypothesis' own choice of examples
test-long: $(READY)
	@$(PY) -m pytest -m "long or hypothesis" --hypothesis-profile=drawn $(ARGS)

## make check     ruff, pyright, buf
check: $(READY)
	@$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -m pyright && $(PY) -m tools.repository.check_protos

## make check-device  compile every step for an H200 and for TPUs with none of them here, and check the outcome (ARGS=--small)
check-device: $(DEVICE_READY)
	@$(DEVICE_VENV)/bin/python -m tools.check_device $(ARGS)

## make audit     ask whether a package of requirements.lock has a known hole (ARGS=--service=osv)
audit: $(AUDIT_READY)
	@$(AUDIT_VENV)/bin/python -m tools.repository.audit $(ARGS)

## make docs      write the pages and pictures of docs/ that the code makes
docs: $(READY)
	@$(PY) -m tools.repository.generate_documents

## make parity    compare with transformers live, in an environment of its own, and rewrite the golden files
parity: $(READY)
	@tools/parity/run.sh

## make clients   published clients (openai, LangChain, lm-eval, inference-perf, smg's stubs) against a server, in an environment of theirs
clients: $(READY) $(CLIENTS_READY)
	@$(PY) -m tools.clients $(ARGS)

## make peers     the same requests through vLLM, OpenVINO GenAI, llama.cpp and transformers on this CPU (ARGS=--shape=llama-15m)
peers: $(READY)
	@tools/peers/setup.sh $(PEERS) && $(PY) -m tools.peers $(ARGS)

## make bench     three figures of benchmarks/README.md: host time, attention, static against continuous
bench: $(READY)
	@$(PY) -m tools.bench.host && $(PY) -m tools.bench.attention && $(PY) -m tools.study.compare_batching

## make chaos     clients that vanish, servers that die, faults, overload: ten minutes, a table at the end (ARGS=--scenario=...)
chaos: $(READY)
	@$(PY) -m tools.chaos $(ARGS)

## make soak      the same mixed for hours, and what memory, threads and descriptors do (ARGS=--hours=8)
soak: $(READY)
	@$(PY) -m tools.chaos --soak $(ARGS)

## make gpu       on a machine with a Hopper GPU: check, time and tune the attention kernels; ARGS=--only=decode and others: the engine (PYTHON=, ARGS=)
gpu:
	@$(PYTHON) -m tools.gpu $(ARGS)

## make bench-cloud  on a rented GPU or TPU: known answers, kernels, engine, served load, peers; one JSON, one page (ARGS="--model=DIR", ARGS=--dry_run)
bench-cloud: $(READY)
	@$(PY) -m tools.bench_cloud $(ARGS)

## make wheel     the wheels of server and client in dist/, the first with the C++ kernels of these levels of x86-64 (LEVELS=); others are left to XLA there
wheel: $(READY)
	@$(PY) -m pallas_kernels.native $(LEVELS) && $(PY) -m tools.repository.make_wheel dist

## make clean     remove the virtual environments and caches
clean:
	rm -rf $(VENV) $(DEVICE_VENV) $(AUDIT_VENV) $(CLIENTS_VENV) .venv-peers-* .venv-parity pallas_kernels/built .cache .pytest_cache .ruff_cache .hypothesis

setup: $(READY)

setup-device: $(DEVICE_READY)

setup-audit: $(AUDIT_READY)

# The C++ kernels are built again when their sources change; a machine without a compiler is told, and goes on.
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
# Whoever asks for the CPU on a machine with a GPU or a TPU gets it; the server refuses it otherwise.
ifeq ($(ACCELERATOR),cpu)
export JAX_PLATFORMS ?= cpu
endif

$(DEVICE_READY): requirements-device.lock tools/setup_env.sh $(INSTALLED)
	@tools/setup_env.sh $(DEVICE_VENV) requirements-device.lock $(VENV) && touch $@

$(AUDIT_READY): requirements-audit.lock tools/setup_env.sh
	@tools/setup_env.sh $(AUDIT_VENV) requirements-audit.lock && touch $@

$(CLIENTS_READY): tools/clients/requirements.txt tools/setup_env.sh
	@tools/setup_env.sh $(CLIENTS_VENV) tools/clients/requirements.txt && touch $@
