# Each target does all the set-up it needs on a machine with Python 3.11+, git and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMPS := $(VENV)/.stamps
INSTALL := .ci/install $(VENV)
# A worker a core; one that is done takes tests from another's end, so that files, and what they build, stay together.
PYTEST := $(BIN)/pytest --numprocesses auto --dist worksteal

# The wheels: zig compiles the CPU engine's library for each architecture, with glibc 2.28 and with musl.
ARCHITECTURES := x86_64 aarch64
PLATFORMS     := manylinux_2_28:linux-gnu.2.28 musllinux_1_2:linux-musl

# The tests build the C library again, in wheels: a source that was compiled once is not compiled again.
COMPILER     := $(if $(filter default,$(origin CC)),$(firstword $(foreach name,cc gcc clang,$(shell command -v $(name))) cc),$(CC))
COMPILE_ONCE := $(abspath $(BIN))/python $(CURDIR)/tests/packaging/compile_once.py $(COMPILER)

# Containers often set it; without it, the processes that the tests start need not compile Ingot's modules again.
unexport PYTHONDONTWRITEBYTECODE

# Packages that the product does without may hide what it lacks: the everyday tests run where they are not installed.
BARE := $(VENV)-bare
LEFT := $(abspath $(BARE))/left.txt

# A new version may break what an older one does, as Triton 3.9 did, and the oracle's group pins some.
NEWEST       := $(VENV)-newest
NEWEST_TESTS := tests/cli/runtime/test_serve.py tests/runtime/server/test_app.py tests/pipeline/targets/cuda/test_writer.py \
	tests/pipeline/targets/cuda/test_cubins.py
# The interpreter needs torch, which the group `oracle` has: its environment, with the newest Triton in front.
NEWEST_KERNELS := tests/kernels/test_kernels.py

NEWEST_SOURCES = $(sort $(wildcard kernels/*.py pipeline/targets/cuda/*.py pipeline/targets/cuda/*/*.py)) $(NEWEST_TESTS) $(NEWEST_KERNELS)

# Extras that an environment has; group `test` needs these.
EXTRAS := compiler,serve,structured,trace
comma  := ,

.PHONY: help routers demo test bare prove proofs sample left newest newest-versions check style lint fast mutants types layers oracle \
	bench wheel sanitize clean

help:
	@echo "make demo    build, measure and run the demo model (about a minute after the downloads)"
	@echo "make test    the everyday tests, which need neither torch nor transformers"
	@echo "make fast    the linters and tests of one file: make fast FILE=runtime/kv/blocks.py"
	@echo "make mutants small random mutants of the code, and those that no test of their module kills"
	@echo "make check   lint, types, layers, and the tests but for proofs that are up to date: what CI runs"
	@echo "make prove   the heavy tests whose sources changed, and their records"
	@echo "make newest  builds and serves with the newest version of each dependency that its bound allows"
	@echo "make bench   the CPU engines next to six peers (an hour; QUICK=1: 25 minutes)"
	@echo "make wheel   the sdist, and wheels for glibc and musl on each of $(ARCHITECTURES), in dist/"

$(STAMPS)/venv:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Ingot needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/ingot: $(STAMPS)/venv pyproject.toml hatch_build.py $(wildcard runtime/cpu/native/*.c runtime/cpu/native/*.h)
	@echo "Installing Ingot in $(VENV): downloads, and a minute of C compiler for the CPU engine"
	$(INSTALL) --editable ".[$(EXTRAS)]"
	@touch $@

$(STAMPS)/test: $(STAMPS)/ingot
	$(INSTALL) --group test
	@touch $@

# Holds the group test too.
$(STAMPS)/dev: $(STAMPS)/ingot
	$(INSTALL) --group dev
	@touch $(STAMPS)/test $@

# benchmarks/ is a project of its own, which brings what only benchmarks need.
$(STAMPS)/benchmarks: $(STAMPS)/ingot benchmarks/pyproject.toml
	$(INSTALL) --editable benchmarks
	@touch $@

$(STAMPS)/wheel: $(STAMPS)/venv pyproject.toml
	$(INSTALL) --group wheel
	@touch $@

# torch first and alone: its pin keeps later installs from taking another build.
$(STAMPS)/oracle: $(STAMPS)/dev $(STAMPS)/benchmarks
	$(INSTALL) "torch==2.13.0"
	$(INSTALL) --group oracle --group wheel
	@touch $(STAMPS)/wheel $@

ROUTERS := $(VENV)-routers

$(ROUTERS)/installed: benchmarks/pyproject.toml
	$(PYTHON) -m venv $(ROUTERS)
	.ci/install $(ROUTERS) --group benchmarks/pyproject.toml:routers
	@touch $@

routers: $(ROUTERS)/installed

demo: $(STAMPS)/ingot
	$(BIN)/ingot build demo

test: $(STAMPS)/test
	$(PYTEST) -m "not oracle and not gpu" --everyday $(PYTEST_OPTIONS)

bare:
	$(MAKE) VENV=$(BARE) PYTEST_OPTIONS="--left-to=$(LEFT)" test

# Heavy tests, whose results .ci/proofs.json records with a key: `prove` runs those whose sources changed.
prove: $(STAMPS)/oracle routers
	$(BIN)/python .ci/proofs.py prove

proofs: $(STAMPS)/oracle
	$(BIN)/python .ci/proofs.py check

# A key may miss what a proof depends on: two run again in each check.
sample: $(STAMPS)/oracle routers
	$(BIN)/python .ci/proofs.py sample

lint: $(STAMPS)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/check_words.py
	$(BIN)/python .ci/ceilings.py
	$(BIN)/clang-tidy --quiet runtime/cpu/native/*.c -- -std=gnu11

# Small random mutants over all layers: make mutants COUNT=20 SEED=1
COUNT ?= 20
SEED  ?= 0

mutants: $(STAMPS)/dev
	-$(BIN)/python .ci/mutants.py $(COUNT) --seed $(SEED)

# The linters and tests of one file: make fast FILE=runtime/kv/blocks.py
fast: $(STAMPS)/dev
	$(BIN)/python .ci/fast.py $(FILE)

types: $(STAMPS)/oracle
	$(BIN)/mypy --num-workers 2

layers: $(STAMPS)/dev
	$(BIN)/lint-imports

oracle: $(STAMPS)/oracle
	$(PYTEST)

# What `bare` has left out for lack of a package.
left: $(STAMPS)/oracle | $(LEFT)
	$(PYTEST) --everyday --only-left=$(LEFT)

$(LEFT):
	$(MAKE) bare

# Runs again once a release, a bound or a source of GPU programs changes: .ci/newest.txt has those of the last run.
newest: $(STAMPS)/oracle
	.ci/install --versions $(VENV) $(addprefix --extra ,$(subst $(comma), ,$(EXTRAS),cuda)) --group test > $(VENV)/newest.txt
	cat $(NEWEST_SOURCES) | sha256sum >> $(VENV)/newest.txt
	@if cmp --silent $(VENV)/newest.txt .ci/newest.txt; then echo "newest: the versions and sources of the last run"; \
	else $(MAKE) newest-versions && cp $(VENV)/newest.txt .ci/newest.txt; fi

newest-versions:
	rm -rf $(NEWEST)
	$(MAKE) VENV=$(NEWEST) EXTRAS=$(EXTRAS),cuda $(NEWEST)/.stamps/test
	$(NEWEST)/bin/pip list
	$(NEWEST)/bin/pytest --collect-only > $(NEWEST)/collected.txt || { cat $(NEWEST)/collected.txt; exit 1; }
	$(NEWEST)/bin/ingot build demo --output $(NEWEST)/demo
	$(NEWEST)/bin/pytest --numprocesses auto --dist worksteal $(NEWEST_TESTS)
	mkdir -p $(NEWEST)/triton && ln -sfn $(abspath $(NEWEST))/lib/python3*/site-packages/triton $(NEWEST)/triton/triton
	PYTHONPATH=$(NEWEST)/triton $(BIN)/pytest $(NEWEST_KERNELS)

# Proofs that are stale run here, too. Linters and types run next to the tests, which wait for other processes at times.
oracle check prove sample left newest: export CC := $(if $(findstring compile_once,$(COMPILER)),$(COMPILER),$(COMPILE_ONCE))
check: $(STAMPS)/venv
	$(MAKE) VENV=$(BARE) $(BARE)/.stamps/test
	$(MAKE) --jobs 2 bare style
	$(MAKE) left
	$(MAKE) prove
	$(MAKE) sample
	$(MAKE) newest

# One after the other: they share the second job.
style: $(STAMPS)/oracle
	$(MAKE) lint
	$(MAKE) types
	$(MAKE) layers

bench: $(STAMPS)/benchmarks
	-$(BIN)/python -m benchmarks.cpu.setup_peers
	$(BIN)/python -m benchmarks.cpu.compare --prepare
	$(BIN)/python -m benchmarks.cpu.compare $(if $(QUICK),--quick) $(if $(RESUME),--resume)

# Minutes of compiling, then tests, damaged programs and planted faults under each sanitizer.
sanitize: $(STAMPS)/test $(STAMPS)/benchmarks
	$(BIN)/python -m benchmarks.cpu.sanitize

# The last command fails when the library needs a newer glibc; the tag that auditwheel names may be older than 2.28. It does
# not read musl's wheels on a system with glibc: tests/packaging/test_release_wheels.py does.
wheel: $(STAMPS)/wheel
	rm -rf dist
	set -e; for arch in $(ARCHITECTURES); do \
		for platform in $(PLATFORMS); do \
			CC="$(abspath $(BIN))/python -m ziglang cc -target $$arch-$${platform#*:}" CFLAGS= LDFLAGS= \
			INGOT_WHEEL_PLATFORM=$${platform%:*}_$$arch $(BIN)/python -m build; \
		done; \
		$(BIN)/auditwheel show dist/*-manylinux_2_28_$$arch.whl | tee /dev/stderr | \
			grep -E "\"manylinux_2_([0-9]|1[0-9]|2[0-8])_$$arch\"" > /dev/null; \
	done

clean:
	rm -rf $(VENV) $(BARE) .venv-uv $(ROUTERS) $(NEWEST) build dist src/*.egg-info runtime/cpu/native/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
