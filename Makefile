# One environment per MPI library: MPI=mpich (the default) or MPI=openmpi.

MPI ?= mpich
RANKS ?= 2
PYTHON ?= python3
ARGS ?=
# Of train-torch, and the requirement by which PyTorch is installed for it.
JOB ?= ddp
TORCH ?= torch

ifeq ($(filter $(MPI),mpich openmpi),)
$(error MPI=$(MPI) is unknown. Use MPI=mpich or MPI=openmpi)
endif

ifeq ($(shell printf %s '$(subst ','\'',$(RANKS))' | grep -cxE '[1-9][0-9]*'),0)
$(error RANKS=$(RANKS) is no number of ranks. Use RANKS=1, RANKS=2, ...)
endif

VENV := $(if $(filter mpich,$(MPI)),.venv,.venv-$(MPI))
PY := $(VENV)/bin/python
# An installation takes minutes, and says meanwhile what it does.
INSTALL := set -o pipefail; $(PY) -m pip install --disable-pip-version-check --progress-bar off
SHOW := | { grep --line-buffered -v '^Requirement already satisfied' || true; }
LAUNCH := $(PY) -m mpistrat.testing
SHELL := /bin/bash
export OMP_NUM_THREADS := 1
export OPENBLAS_NUM_THREADS := 1
# Each of the many processes would compile the package again.
unexport PYTHONDONTWRITEBYTECODE
# Tests have more ranks than cores: one that waits in MPI lets another run at once.
test-%: export MPIR_CVAR_POLLS_BEFORE_YIELD := 1
test-%: export OMPI_MCA_mpi_yield_when_idle := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help house train test test-serial test-quick test-full test-off test-launch test-slow test-slurm test-thorough lint types bench scaling wheels docs clean pictures site-check gpu-report gpu-wheels test-standin test-devices test-cupy test-keras test-watch test-kills

help:  ## print this list
	@echo "make TARGET [MPI=mpich|openmpi] [RANKS=2] [ARGS=...]"
	@sed -n 's/^\([a-z%-]*\):.*## \(.*\)/  \1 \2/p' $(MAKEFILE_LIST) | \
	  while read -r target text; do printf '  %-12s %s\n' "$$target" "$$text"; done

train: $(VENV)/.jobs data/digits.h5  ## train on the digits with RANKS ranks; ARGS go to the job
	RANKS=$(RANKS) PYTHON=$(PY) timeout --kill-after=10 1800 jobs/local.sh $(ARGS)

train-torch: $(VENV)/.jobs data/digits.h5  ## train with PyTorch, by JOB=ddp, fsdp, fabric or accelerate
	$(LAUNCH) -n $(RANKS) --limit 1800 -- jobs/train_torch_$(JOB).py $(ARGS)

# The files that have tests of a marker, unless ARGS names some: to collect all takes as long as many
# of the tests.
marked = $(if $(findstring tests/,$(ARGS)),,$(shell grep -rlE 'mark\.$(1)\b' tests --include='test_*.py' | sort))

# Of the serial tests; a second -m in ARGS replaces it.
SERIAL := not launches and not slurm and not slow

test: test-quick  ## run the serial tests, 3 ranks, and one launch for each kind of failure
	+$(MAKE) test-serial ARGS="-m '$(SERIAL) and not thorough' $(ARGS)"
	+$(MAKE) test-3 ARGS="-q -m 'not thorough'"

test-serial: $(VENV)/.test  ## run pure code, and what needs ranks on one, without mpiexec
	timeout --kill-after=10 900 $(PY) -m pytest -q -n 2 --dist loadfile --with-mpi -m "$(SERIAL)" $(ARGS)

test-quick: $(VENV)/.test  ## run one launch for each kind of failure
	timeout --kill-after=10 900 $(PY) -m pytest -q -n 2 --dist loadfile -m quick $(call marked,quick) $(ARGS)

thorough = $(shell grep -rlE 'mark\.thorough|thorough_but$(1)' tests --include='test_*.py' | sort)

# Hypothesis draws fewer examples where "not thorough" is asked for.
test-thorough: $(VENV)/.test  ## run what `make test` leaves out, on 1 and 3 ranks
	+$(MAKE) test-serial ARGS="-m '(thorough or hypothesis) and $(SERIAL)' $(call thorough,|@given)"
	+$(MAKE) test-3 ARGS="-q -m thorough $(filter-out tests/typing/% tests/test_%,$(call thorough))"

test-full: test-serial test-1 test-2 test-3 test-4 test-off test-launch  ## run all but test-slow and test-slurm

test-%: $(VENV)/.test  ## run under mpiexec what needs ranks, on so many, as in make test-3
	$(LAUNCH) -n $* --limit 900 -- -m pytest --with-mpi -p no:cacheprovider $(ARGS)

test-off: $(VENV)/.test  ## run on 2 ranks what needs ranks, without the fast paths
	MPISTRAT_FAST_PATHS=off $(LAUNCH) -n 2 --limit 900 -- -m pytest --with-mpi -p no:cacheprovider -m "not thorough" $(ARGS)

test-launch: $(VENV)/.test  ## run the tests that start MPI programs of their own
	timeout --kill-after=10 1800 $(PY) -m pytest -n 2 --dist loadfile -m "launches and not slow" --durations=15 $(call marked,launches) $(ARGS)

test-slow: $(VENV)/.test  ## run the long tail of the tests
	timeout --kill-after=10 1800 $(PY) -m pytest -n 2 --dist loadfile -m slow $(call marked,slow) $(ARGS)

test-slurm: $(VENV)/.test  ## run the tests on a Slurm cluster of two nodes on this machine
	timeout --kill-after=10 1200 $(PY) -m pytest tests/programs/slurm -m slurm --require-slurm $(ARGS)

house: $(VENV)/.test  ## measure the layout of the package against its limits
	$(PY) -m tools.house

lint: $(VENV)/.test  ## check the style of the code
	$(PY) -m ruff check .

types: $(VENV)/.test  ## check the types of the package
	$(PY) -m mypy

bench: $(VENV)/.test  ## measure the package beside its peers on RANKS ranks; ARGS go to the benchmarks
	$(LAUNCH) -n $(RANKS) --limit 900 -- -m benchmarks $(ARGS)

scaling: $(VENV)/.test  ## count the messages of reductions on RANKS ranks; ARGS go to tools/scaling
	$(LAUNCH) -n $(RANKS) --limit 900 -- -m tools.scaling $(ARGS)

wheels: $(VENV)/.wheels  ## build wheels and the source archive in dist/; ARGS=--try installs and tries them
	$(PY) -m tools.wheels $(ARGS)

pictures: $(VENV)/.test  ## draw docs/images; with RECORD=1 make the runs again that they show
	$(PY) -m tools.pictures $(if $(RECORD),--record) $(ARGS)

# WHEELS=.whl, made by gpu-wheels elsewhere, is for a machine without a network: PYTHON has CuPy there.
gpu-report: $(if $(WHEELS),,$(VENV)/.gpu)  ## try the GPUs of this machine, and write gpu-report.md, which you can send
	$(if $(WHEELS),PYTHON=$(PYTHON) tools/gpu_report.sh $(WHEELS),$(PY) -m tools.gpu_report) $(ARGS)

gpu-wheels: $(VENV)/.test  ## collect in .whl what gpu-report needs on a machine without a network
	PY=$(PY) tools/gpu_wheels.sh

test-standin: $(VENV)/.test  ## run what works on devices with a strict stand-in for CuPy, on RANKS ranks
	PYTHONPATH=tests/standin FAKE_CUPY_GPUS=$(or $(GPUS),$(RANKS)) MPISTRAT_SHARE_GPUS=on \
	  $(LAUNCH) -n $(RANKS) --limit 600 -- -m pytest --with-mpi -q -p no:cacheprovider tests/gpu tests/comm/test_gpu_reducers.py $(ARGS)

# The suites that depend on no device, with strategies on devices.
DEVICE_SUITES := $(addprefix tests/,optimizers variables metrics layers collectives data checkpoint strategies testing/test_conformance.py test_values.py)

test-devices: $(VENV)/.test  ## run the suites of all devices with the stand-in for CuPy, on RANKS ranks
	PYTHONPATH=tests/standin FAKE_CUPY_GPUS=$(or $(GPUS),$(RANKS)) MPISTRAT_SHARE_GPUS=on \
	  $(LAUNCH) -n $(RANKS) --limit 600 -- -m pytest --with-mpi -q -p no:cacheprovider --device=gpu -m "not thorough" $(DEVICE_SUITES) $(ARGS)

test-cupy: .venv-cupy/.cupy  ## check names and kernels against the real CuPy, without a GPU
	.venv-cupy/bin/python -m pytest -q --with-mpi tests/gpu/test_real_cupy.py $(ARGS)

test-keras: $(VENV)/.keras  ## run the tests of Keras and of trainers, on further numbers of ranks too
	timeout --kill-after=10 900 $(PY) -m pytest -q -m "launches or campaign" --durations=10 tests/keras tests/trainers tests/programs/jobs/test_keras_job.py $(ARGS)

test-watch: $(VENV)/.test  ## run hanging and healthy programs under the watch, on further numbers of ranks too
	timeout --kill-after=10 3000 $(PY) -m pytest -q -m "launches or slow or campaign" --durations=10 tests/watch $(ARGS)

test-kills: $(VENV)/.test  ## kill writers of output files and whole jobs, several hundred times
	timeout --kill-after=10 3000 $(PY) -m pytest -q -m campaign tests/data/hdf5_writer $(ARGS)

docs: $(VENV)/.docs  ## check the sentences, and build the documentation in docs/_build/html
	$(PY) -m tools.sentences
	$(PY) -m tools.figures
	$(PY) -m codespell_lib --ignore-words-list=coo,improbe --skip='*.svg,*/_build/*,*/banned-phrases.txt' \
	  README.md CHANGELOG.md docs mpistrat
	$(PY) -m sphinx -W --keep-going -q -b html docs docs/_build/html

site-check: $(VENV)/.site docs  ## look at the built documentation in Chromium; ARGS=--screenshots=DIR
	$(PY) -m tools.site_check docs/_build/html $(ARGS)

clean:  ## remove environments, data, runs and caches
	rm -rf .venv .venv-openmpi .venv-cupy .whl data runs build dist docs/_build docs/reference/api *.egg-info
	rm -f mpistrat/optimizers/_host_kernels*.so mpistrat/_native*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

data/digits.h5: jobs/prepare_digits.py | $(VENV)/.jobs
	$(PY) jobs/prepare_digits.py --output $@

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "mpistrat needs Python 3.10 or newer; set PYTHON=" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make environments: install the package python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	touch $@

# What the installation is made from: the metadata and the compiled kernels.
SOURCES := pyproject.toml setup.py mpistrat/optimizers/kernels.py $(wildcard mpistrat/native/*.[ch]) $(wildcard mpistrat/native/recorder/*.[ch])

$(VENV)/.jobs: $(SOURCES) | $(VENV)/.python
	@echo 'installing .[$(MPI),jobs] into $(VENV)'
	@$(INSTALL) -e ".[$(MPI),jobs]" $(SHOW)
	touch $@

$(VENV)/.test: $(SOURCES) | $(VENV)/.python
	@echo 'installing .[$(MPI),jobs,test] into $(VENV)'
	@$(INSTALL) -e ".[$(MPI),jobs,test]" $(SHOW)
	touch $(VENV)/.jobs $@

# What the jobs with PyTorch need. The requirement keeps pip from choosing another build.
$(VENV)/.jobs-torch: $(SOURCES) | $(VENV)/.python
	@echo 'installing .[$(MPI),jobs,jobs-torch] and $(TORCH) into $(VENV)'
	@$(INSTALL) -e ".[$(MPI),jobs,jobs-torch]" "$(TORCH)" $(SHOW)
	touch $(VENV)/.jobs $@

# Keras distributes over PyTorch from 3.16 on. Until that is released, a nightly of a fixed date.
KERAS ?= keras-nightly==3.16.0.dev2026102704
$(VENV)/.keras: $(SOURCES) | $(VENV)/.test
	@echo 'installing $(TORCH) and $(KERAS) into $(VENV)'
	@$(INSTALL) "$(KERAS)" "$(TORCH)" $(SHOW)
	touch $@

$(VENV)/.docs: $(SOURCES) | $(VENV)/.jobs
	@echo 'installing .[$(MPI),jobs,docs] into $(VENV)'
	@$(INSTALL) -e ".[$(MPI),jobs,docs]" $(SHOW)
	touch $@

$(VENV)/.wheels: $(SOURCES) | $(VENV)/.python
	@echo 'installing .[$(MPI),wheels] into $(VENV)'
	@$(INSTALL) -e ".[$(MPI),wheels]" $(SHOW)
	touch $@

# CuPy for the CUDA of the driver, where there is one.
$(VENV)/.gpu: $(SOURCES) | $(VENV)/.test
	@cuda=$$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: \([0-9]*\).*/\1/p'); \
	  [ -z "$$cuda" ] || { [ "$$cuda" -ge 13 ] && cuda=13 || cuda=12; \
	  echo "installing .[cuda$${cuda}x] into $(VENV)"; $(INSTALL) -e ".[$(MPI),cuda$${cuda}x]" $(SHOW); }
	touch $@

# CuPy and the compiler of CUDA, which need no GPU to check names and kernels.
.venv-cupy/.cupy: $(SOURCES)
	$(PYTHON) -m venv .venv-cupy
	.venv-cupy/bin/python -m pip install --quiet cupy-cuda13x nvidia-cuda-nvrtc nvidia-nccl-cu13
	.venv-cupy/bin/python -m pip install --quiet -e ".[mpich,test]"
	touch $@

$(VENV)/.site: $(SOURCES) | $(VENV)/.docs
	@echo 'installing .[$(MPI),jobs,docs,site] into $(VENV)'
	@$(INSTALL) -e ".[$(MPI),jobs,docs,site]" $(SHOW)
	touch $(VENV)/.jobs $(VENV)/.docs $@
