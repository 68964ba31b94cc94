# The commands of the study. Each works on a fresh Linux machine with Python 3.11: what it needs, it installs into .venv.
#
#   make reproduce [SWEEP=momentum] [SCALE=quick]   train a sweep, log it to MLflow, write results/$(SCALE)/
#   make reproduce-all                              the paper's three tables
#   make report | ui | test | lint | bench | torture | slurm | slurm-down

SWEEP ?= momentum
SCALE ?= quick
PYTHON ?= $(shell command -v python3.11 || command -v python3)
STUDY := .venv/bin/study
INSTALLED := .venv/.installed
UV ?= uv==0.13.9
PIP := .venv/bin/pip install --quiet --disable-pip-version-check

.PHONY: help venv reproduce reproduce-all data report ui test lint bench torture slurm slurm-down
.DEFAULT_GOAL := help

help:
	@sed -n '3,5s/^# *//p' Makefile

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

test: data lint
	.venv/bin/pytest --numprocesses 2 --dist loadfile

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
