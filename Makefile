# The commands of the study. Each works on a fresh Linux machine with Python 3.11: what it needs, it installs into .venv.
#
#   make reproduce [SWEEP=momentum] [SCALE=quick]   train a sweep, log it to MLflow, write results/$(SCALE)/
#   make reproduce-all                              the paper's three tables
#   make golden                                     the golden runs anew, after NUMERICS was raised
#   make report | ui | test | test-hostile | lint | bench | torture | slurm | slurm-down

SWEEP ?= momentum
SCALE ?= quick
PYTHON ?= $(shell command -v python3.11 || command -v python3)
STUDY := .venv/bin/study
INSTALLED := .venv/.installed
UV ?= uv==0.13.9
PIP := .venv/bin/pip install --quiet --disable-pip-version-check

.PHONY: help venv reproduce reproduce-all data report ui test test-hostile lint golden bench torture slurm slurm-down
.DEFAULT_GOAL := help

help:
	@sed -n '3,6s/^# *//p' Makefile

venv: $(INSTALLED)

$(INSTALLED): requirements.txt pyproject.toml
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@# uv takes a sixth of pip's time. Where it cannot be had, or does not find a package, pip does it: `make venv UV=`.
	test -n "$(UV)" && $(PIP) $(UV) && .venv/bin/uv pip install --quiet --python .venv/bin/python -r requirements.txt \
	  || $(PIP) -r requirements.txt
	$(PIP) --no-deps --editable .
	touch $@

data: $(INSTALLED)
	$(STUDY) data get fashion-mnist

reproduce: data
	$(STUDY) sweep submit sweeps/$(SWEEP).yaml --scale $(SCALE) --cluster local --wait
	$(STUDY) runs export $(SWEEP)-$(SCALE)
	$(STUDY) report --show $(SWEEP)-$(SCALE)

reproduce-all: data
	for sweep in momentum mechanisms batch; do $(MAKE) reproduce SWEEP=$$sweep || exit; done

report: $(INSTALLED)
	$(STUDY) report

ui: $(INSTALLED)
	$(STUDY) runs ui

lint: $(INSTALLED)
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy && .venv/bin/lint-imports --no-logo --no-cache

# The tests' images lie in data/ and nowhere else, whatever the user's shell says.
test test-hostile: export STUDY_DATA := data

test: data lint
	.venv/bin/pytest --numprocesses 2 --dist loadfile

# What reads its environment, in a shell in which every setting is wrong: the answers must be the same.
test-hostile: data
	env STUDY_DATA=/nowhere STUDY_HEARTBEAT_S=soon STUDY_SNAPSHOT=/nowhere GIT_DIR=/nowhere TZ=Asia/Kathmandu \
	  MLFLOW_TRACKING_URI=http://127.0.0.1:9 MLFLOW_EXPERIMENT_NAME=another MLFLOW_RUN_ID=0 \
	  SLURM_JOB_ID=1 SLURM_ARRAY_JOB_ID=1 SLURM_ARRAY_TASK_ID=1 SLURM_CONF=/nowhere SQUEUE_FORMAT=%i \
	  LANG=tr_TR.ISO-8859-9 LC_ALL=C PYTHONUTF8=0 PYTHONIOENCODING=ascii COLUMNS=20 NO_COLOR=1 FORCE_COLOR=1 \
	  OMP_NUM_THREADS=64 MKL_NUM_THREADS=64 MPLBACKEND=nonsense CUDA_VISIBLE_DEVICES=7 RANK=1 WORLD_SIZE=2 \
	  .venv/bin/pytest --numprocesses 2 --dist loadfile tests/config tests/launch/test_plan.py tests/slurm/test_fake.py \
	  tests/run/test_provenance.py tests/run/test_export.py tests/tracking/test_store.py

golden: data
	.venv/bin/python tests/helpers/golden.py

bench: data
	$(STUDY) bench

torture: data
	.venv/bin/python tests/helpers/torture.py

# make slurm ACCOUNTING=0 MAX_ARRAY_SIZE=5 CPUS=8 for a cluster without accounting, with short arrays, of so many cores.
slurm: $(INSTALLED)
	.venv/bin/python -m study.slurm.onenode up $(strip $(if $(filter 0,$(ACCOUNTING)),--no-accounting) \
	  $(if $(MAX_ARRAY_SIZE),--max-array-size $(MAX_ARRAY_SIZE)) $(if $(CPUS),--cpus $(CPUS)))

slurm-down: $(INSTALLED)
	.venv/bin/python -m study.slurm.onenode down
