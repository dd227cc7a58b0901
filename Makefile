# Every target works on a machine with only make and Python 3.11 or 3.12: the environment is made on first use.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# the first of these that is a Python 3.11 or 3.12; override with: make PYTHON=/path/to/python
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && echo $$p && break; done)
# each file is compiled once, not by every process that the tests start, also where the environment keeps Python from it
TESTS := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: help install demo home-is-named drafters check smoke test test-full test-gpu kernels-triton36 lint audit pins clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    fetch SmolLM2-135M (93 MB) and sweep its draft heads in SGLang on this machine"
	@echo "make drafters RAYSPEC_HOME=FOLDER   train the drafters of configs/train; many hours on two cores"
	@echo "make test    the tests, on three workers; make test-full: all that they can try, and those marked slow as well"
	@echo "make check   lint, and the tests that start neither SGLang nor Ray nor a server: four minutes, the inner loop"
	@echo "make lint    ruff and mypy"
	@echo "make smoke   check and one engine, for another Python: PYTHON=python3.12 VENV=.venv-3.12"
	@echo "make test-gpu           the kernels' tests, compiled, on the GPU of this machine"
	@echo "make kernels-triton36   the kernels under Triton 3.6: their tests, and what it compiles for an H100"
	@echo "make audit   known vulnerabilities of what constraints.txt pins (asks PyPI)"
	@echo "make pins    write constraints.txt from the installed environment"

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "rayspec needs Python 3.11 or 3.12; none found (make PYTHON=/path/to/python)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "Installing SGLang, PyTorch, Ray and MLflow at the versions of constraints.txt (several GB)"
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev]'
	@touch $@

install: $(STAMP)

demo: $(STAMP)
	$(BIN)/rayspec fetch smollm2-135m
	$(BIN)/rayspec sweep --config configs/sweep/demo.yaml

# all but further trainings of the drafter that ships, each behind what it stands on; cut off, the same command goes on
STANDING_ON_THEM := heads vocabtrim_t vocabtrim_t_masked last_hidden slim_trees specformer independent eagle
train = RAYSPEC_HOME="$(RAYSPEC_HOME)" $(BIN)/rayspec train --config configs/train/$(1).yaml

home-is-named:
	@test -n "$(RAYSPEC_HOME)" || { echo "name a folder other than the demo's: make drafters RAYSPEC_HOME=FOLDER"; exit 1; }

drafters: home-is-named $(STAMP)
	RAYSPEC_HOME="$(RAYSPEC_HOME)" $(BIN)/rayspec fetch smollm2-135m
	$(call train,drafters)
	RAYSPEC_HOME="$(RAYSPEC_HOME)" $(BIN)/rayspec calibrate --config configs/calibrate/smollm2.yaml
	$(foreach name,$(STANDING_ON_THEM),$(call train,$(name)) && )true

test: $(STAMP)
	$(TESTS) --numprocesses 3 -m "not slow"

check: lint
	$(TESTS) --numprocesses 2 -m "not slow and not engine"

smoke: check
	$(TESTS) tests/sglang_ext/test_plain.py

test-full: $(STAMP)
	RAYSPEC_TESTS=full $(TESTS) --numprocesses 2

test-gpu: $(STAMP)
	RAYSPEC_TESTS=gpu $(TESTS) tests/kernels tests/sglang_ext/test_fused_heads.py tests/sglang_ext/test_side_stream.py

# beside the pinned PyTorch, in a folder that comes before the environment's own Triton
TRITON36 := build/triton-3.6
under_triton36 = PYTHONPATH=$(TRITON36):.:kernels:tests/kernels

$(TRITON36)/.installed: $(STAMP)
	rm -rf $(TRITON36)
	$(BIN)/python -m pip install --quiet --no-deps --target $(TRITON36) 'triton==3.6.*'
	@touch $@

kernels-triton36: $(TRITON36)/.installed
	$(under_triton36) $(BIN)/python -c 'import triton; assert triton.__version__.startswith("3.6."), triton.__version__'
	$(under_triton36) $(TESTS) tests/kernels -m "not slow"
	$(under_triton36) $(BIN)/python tests/kernels/compile_for_hopper.py
	$(under_triton36) $(BIN)/python docs/experiments/loop_instructions.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# the only check of the dependencies that needs the network: their known vulnerabilities
audit:
	python3 -m venv $(VENV)/audit
	$(VENV)/audit/bin/python -m pip install --quiet pip-audit==2.10.1
	$(VENV)/audit/bin/pip-audit --no-deps --disable-pip --requirement constraints.txt

pins: $(STAMP)
	@{ echo "# Exact pins of everything that rayspec installs (Python 3.11 and 3.12). Regenerate: make pins"; \
	   $(BIN)/python -m pip freeze --exclude-editable --exclude rayspec; } > constraints.txt.new
	@mv constraints.txt.new constraints.txt

clean:
	rm -rf $(VENV) $(TRITON36) .pytest_cache .ruff_cache .mypy_cache
