PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: train test check slow nano clean

# A fresh machine: make the venv, install, train a tool-using agent on the CPU. ARGS="--seed 1" passes settings on.
train: $(VENV)/.installed
	$(BIN)/agentrl train --env math-tools $(ARGS)

# The quick suite. ARGS="tests/test_tool.py -x" narrows it.
test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

# Trainings to their numbers, plugins in venvs of their own.
slow: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m slow $(ARGS)

check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Pre-train the embedded policy again: about a quarter of an hour.
nano: $(VENV)/.installed
	$(BIN)/python -m agentrl_envs.nano.pretrain --out envs/agentrl_envs/nano/weights

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.installed-test: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[test]"
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache
