# Each target does all the set-up it needs on a machine with Python 3.11+, git and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMPS := $(VENV)/.stamps
# A module is compiled when it is first imported: of the 12,000 that `make check` installs, most never are.
PIP    := $(BIN)/pip install --quiet --no-compile
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
NEWEST_TESTS := tests/cli/test_serve.py tests/runtime/server/test_app.py tests/pipeline/targets/cuda/test_writer.py

# Extras that an environment has; group `test` needs these.
EXTRAS := compiler,serve,structured,trace

.PHONY: help routers demo test bare left newest check lint types layers oracle bench wheel sanitize clean

help:
	@echo "make demo    build, measure and run the demo model (about a minute after the downloads)"
	@echo "make test    the tests that need neither torch nor transformers"
	@echo "make check   lint, types, layers, \`make test\` in an environment of its own, then the other tests: what CI runs"
	@echo "make newest  builds and serves with the newest version of each dependency that its bound allows"
	@echo "make bench   the CPU engines next to llama.cpp, onnxruntime-genai and OpenVINO GenAI (40 minutes)"
	@echo "make wheel   the sdist, and wheels for glibc and musl on each of $(ARCHITECTURES), in dist/"

$(STAMPS)/venv:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Ingot needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/ingot: $(STAMPS)/venv pyproject.toml hatch_build.py $(wildcard runtime/cpu/native/*.c runtime/cpu/native/*.h)
	$(PIP) --editable ".[$(EXTRAS)]"
	@touch $@

$(STAMPS)/test: $(STAMPS)/ingot
	$(PIP) --group test
	@touch $@

# Holds the group test too.
$(STAMPS)/dev: $(STAMPS)/ingot
	$(PIP) --group dev
	@touch $(STAMPS)/test $@

$(STAMPS)/wheel: $(STAMPS)/venv pyproject.toml
	$(PIP) --group wheel
	@touch $@

# torch first and alone: its pin keeps later installs from taking another build.
$(STAMPS)/oracle: $(STAMPS)/dev
	$(PIP) "torch==2.13.0"
	$(PIP) --group oracle --group wheel
	@touch $(STAMPS)/wheel $@

# Public routers, which tests start in front of servers: 290 MB.
ROUTERS := $(VENV)-routers

$(ROUTERS)/installed:
	$(PYTHON) -m venv $(ROUTERS)
	$(ROUTERS)/bin/pip install --quiet --no-compile vllm-router==0.1.17 sglang-router==0.3.2 smg==1.13.0 setproctitle
	@touch $@

routers: $(ROUTERS)/installed

demo: $(STAMPS)/ingot
	$(BIN)/ingot build demo

test: $(STAMPS)/test
	$(PYTEST) -m "not oracle and not gpu" $(PYTEST_OPTIONS)

bare:
	$(MAKE) VENV=$(BARE) PYTEST_OPTIONS="--left-to=$(LEFT)" test

lint: $(STAMPS)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/check_words.py
	$(BIN)/clang-tidy --quiet runtime/cpu/native/*.c -- -std=gnu11

types: $(STAMPS)/oracle
	$(BIN)/mypy --num-workers 2

layers: $(STAMPS)/dev
	$(BIN)/lint-imports

oracle: $(STAMPS)/oracle
	$(PYTEST)

# What `bare` has left out for lack of a package.
left: $(STAMPS)/oracle bare routers
	$(PYTEST) --only-left=$(LEFT)

newest: $(STAMPS)/venv
	rm -rf $(NEWEST)
	$(MAKE) VENV=$(NEWEST) EXTRAS=$(EXTRAS),cuda $(NEWEST)/.stamps/test
	$(NEWEST)/bin/pip list
	$(NEWEST)/bin/pytest --collect-only > $(NEWEST)/collected.txt || { cat $(NEWEST)/collected.txt; exit 1; }
	$(NEWEST)/bin/ingot build demo --output $(NEWEST)/demo
	$(NEWEST)/bin/pytest --numprocesses auto --dist worksteal $(NEWEST_TESTS)

oracle check newest: export CC := $(COMPILE_ONCE)
check: lint types layers left newest

bench: $(STAMPS)/ingot
	-$(BIN)/python -m benchmarks.cpu.setup_peers
	$(BIN)/python -m benchmarks.cpu.compare

# Minutes of compiling, then tests, damaged programs and planted faults under each sanitizer.
sanitize: $(STAMPS)/test
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
	rm -rf $(VENV) $(BARE) $(ROUTERS) $(NEWEST) build dist src/*.egg-info runtime/cpu/native/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
