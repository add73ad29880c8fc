# The first interpreter that works, 3.11 before the others; `make PYTHON=...` names another.
PYTHON ?= $(shell for p in python3.11 python3 python3.13 python3.12 python3.10; do \
	  $$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' \
	    >/dev/null 2>&1 && { echo $$p; break; }; done)
# How many random sequences `make oracle` compares.
SEEDS ?= 3000
# Test files at a time. Much of a test is waiting for a process.
JOBS ?= 2

# How long `make soak` lasts.
SOAK_SECONDS ?= 1800

BIN := .venv/bin
KVDEPOT_ORACLE_VENV ?= .oracle-venv
ORACLE := $(abspath $(KVDEPOT_ORACLE_VENV))
export KVDEPOT_ORACLE_VENV := $(ORACLE)
# Where it is set, every process that a test starts would compile all it imports anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-slow soak check static fmt proto bench oracle clean
.DELETE_ON_ERROR:

help:
	@echo 'demo       start a server, drive it as schedulers do, and say what happened'
	@echo 'test       check and every test but the long ones (makes the oracle when it is missing)'
	@echo 'test-slow  the long tests'
	@echo 'soak       a server under load for SOAK_SECONDS=$(SOAK_SECONDS), its memory watched'
	@echo 'check      formatting, types, import directions, protos; changes nothing'
	@echo 'fmt        put the sources in form'
	@echo 'proto      regenerate the code beside the protos'
	@echo 'bench      print the figures; JSON=1 writes them to benchmarks/results, too'
	@echo 'oracle     compare with vLLM over SEEDS=$(SEEDS) random sequences'
	@echo 'clean      remove caches and builds, but no virtual environment'

.venv/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || test -n "$(PYTHON)" || { echo 'no Python 3.10 to 3.13 here' >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo 'making .venv; the first time takes some minutes' >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints.txt -e '.[server,dev]'
	@touch $@

# The script writes .ready last; one that is older may lack something.
$(ORACLE)/.ready: tests/oracle/setup.sh
	@tests/oracle/setup.sh '$(ORACLE)'

demo: .venv/.installed
	@$(BIN)/kvdepot demo

# What else `check` looks at, tests look at, too.
test:
	+@$(MAKE) --no-print-directory -j2 static $(ORACLE)/.ready
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m 'not slow and not gpu'

test-slow: .venv/.installed $(ORACLE)/.ready
	$(BIN)/python -m pytest -m 'slow and not gpu'

soak: .venv/.installed
	KVDEPOT_SOAK_SECONDS=$(SOAK_SECONDS) $(BIN)/python -m pytest tests/faults/test_soak.py -m slow -rP

check: static
	$(BIN)/lint-imports --no-logo
	$(BIN)/buf lint
	$(BIN)/python -m pytest -q tests/test_house.py -k proto

static: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fmt: .venv/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/buf format -w

proto: .venv/.installed
	$(BIN)/python -m grpc_tools.protoc -I proto \
	  --python_out=proto --pyi_out=proto --grpc_python_out=proto \
	  $(sort $(wildcard proto/kvdepot/v1/*.proto))

bench: .venv/.installed $(ORACLE)/.ready
	@$(BIN)/python -m benchmarks $(if $(JSON),--json benchmarks/results/$(shell date +%Y%m%d-%H%M%S).json)

oracle: .venv/.installed $(ORACLE)/.ready
	KVDEPOT_ORACLE_SEEDS=$(SEEDS) $(BIN)/python -m pytest tests/oracle -m oracle --timeout=0

clean:
	rm -rf build dist .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -not -path './.oracle-venv/*' -prune -exec rm -rf {} +
