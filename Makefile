# Each target does its own set-up; `make demo` and `make test` work on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The CPU wheel of this torch needs no CUDA packages; where a torch in the range is installed already, it stays.
TORCH ?= torch>=2.13,<2.14
OLDEST ?= $(TORCH)
NEWEST ?= torch>=2.15,<2.16
LIGHTNING ?= lightning>=2.6.6,<2.7
OLDEST_LIGHTNING ?= lightning==2.6.6

# Else each process compiles the package, and each process of the tests compiles those, anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo test device nightly compatibility versions smoke bench gpu zoo chaos clusters draws docs pictures lint format check clean

help:  ## what can be made
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest
SIDE_BY_SIDE = --dist worksteal --numprocesses
# Cold interpreters compute for seconds before they can meet a deadline.
NUM_WAITING := $(if $(POLYPHASE_COLD),2,4)
# Those that measure seconds come first: the faults that they put into a run last longer, the busier the machine has been.
define run_parts
$(PYTEST) -m "$(1)" --part alone
$(PYTEST) -m "$(1)" --part unmarked $(SIDE_BY_SIDE) 3
$(PYTEST) -m "$(1)" --part deadlines $(SIDE_BY_SIDE) $(NUM_WAITING)
$(PYTEST) -m "$(1)" --part device $(SIDE_BY_SIDE) 2
endef
# A module is compiled when it is first imported: of the 20,000 that are installed, most never are.
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# uv takes a fifth of pip's time, but does not read its configuration: what it can't find, pip installs.
comma := ,
install_with = $(BIN)/uv pip install --quiet --python $(BIN)/python $(1) || $(PIP_INSTALL) $(1)

$(VENV)/.runs: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) "$(TORCH)" uv
	$(call install_with,"$(LIGHTNING)" --editable ".[cli$(comma)examples]")
	touch $@

$(VENV)/.installed: $(VENV)/.runs
	$(call install_with,"$(LIGHTNING)" --editable ".[dev]")
	# The compiler warns of its escapes, which is an error in the test that imports it first.
	$(BIN)/python -W ignore -m compileall -qq $(VENV)/lib/python3*/site-packages/torchao || true
	touch $@

install: $(VENV)/.installed  ## the package and all it needs, into .venv

demo: $(VENV)/.runs  ## handwritten digits with DDP on 2 CPU processes
	OMP_NUM_THREADS=1 $(BIN)/python examples/digits.py --strategy ddp --devices 2 --accelerator cpu

test: install  ## the tests; up to four at a time, but for those that measure seconds
	$(call run_parts,not nightly)

device: install  ## compiles the simulated device, which the tests on it do else
	$(BIN)/python -c "from tests.simulated_device import install; install()"

nightly: install  ## all combinations, all interpreters cold, patterns of others' code, random loaders; takes hours
	$(call run_parts,nightly)
	POLYPHASE_COLD=1 $(MAKE) test
	POLYPHASE_EXAMPLES=300 $(PYTEST) tests/engine/loop/test_equivalence.py
	$(MAKE) compatibility draws

compatibility: install  ## what other code does with a trainer, with Lightning's and with the engine; takes two minutes
	$(PYTEST) tests/compatibility

versions:  ## all tests on the oldest and the newest torch and Lightning, each in a .venv of its own; some 15 GB for CUDA
	$(MAKE) test VENV=.venv-oldest TORCH="$(OLDEST)" LIGHTNING="$(OLDEST_LIGHTNING)"
	$(MAKE) test VENV=.venv-newest TORCH="$(NEWEST)"

smoke: install  ## wheel and source distribution in fresh environments, with the oldest and the newest dependencies
	rm -rf build/dist build/fresh && $(BIN)/python -m build --installer uv --outdir build/dist .
	for resolution in lowest-direct highest; do for package in build/dist/*; do \
	  $(BIN)/uv pip compile --quiet --resolution $$resolution --no-emit-package torch --output-file build/needs.txt pyproject.toml && \
	  $(BIN)/uv venv --quiet --clear --python $(BIN)/python build/fresh && \
	  $(BIN)/uv pip install --quiet --python build/fresh/bin/python --constraints build/needs.txt "$(TORCH)" $$package && \
	  OMP_NUM_THREADS=1 build/fresh/bin/python release/smoke.py || exit 1; done; done

bench: install  ## what the engine costs per step, into benchmarks/results
	$(PIP_INSTALL) --editable ".[bench]"
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/overhead.py

gpu: $(if $(wildcard $(BIN)/python),,install)  ## checks and figures on the GPUs of this machine, into benchmarks/results; PART=1 to 4 for seven minutes of it
	$(BIN)/python -m benchmarks.gpu $(if $(PART),--part $(PART))

zoo: install  ## other people's models under every strategy, into benchmarks/results; takes half an hour
	$(PIP_INSTALL) "$(TORCH)" --editable ".[zoo]"
	$(PYTEST) tests/zoo/weights.py tests/zoo/exported.py
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.zoo

chaos: install  ## kills a training job 12 times in each of 25 configurations, and says what was lost; takes hours
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos.storm

clusters: install  ## two hosts that are cut off, powered off, slow or nameless; into benchmarks/results; as root, ten minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos.clusters

draws: install  ## 1,000 random loaders, stops and numbers of ranks against a plain loop; takes half an hour
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.engine.data.draws

docs: install  ## the documentation site, into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "build/site/index.html"

pictures: install  ## the pictures and the generated pages of the documentation
	$(BIN)/python -m docs.site

lint: install  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/typecheck.py

format: install  ## ruff's formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint docs test  ## what continuous integration runs

clean:  ## removes what was built; logs and checkpoints stay
	rm -rf $(VENV) .venv-oldest .venv-newest build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
