# Commands of the project; `make help` lists them.
VENV    ?= .venv
PYTHON  ?= python3
BIN     := $(VENV)/bin
CONFIG  ?= deployments.yaml
PROTOS  := protos/inference.proto protos/speculation.proto
# Extra flags for every `pip install`, for example --index-url.
PIP_FLAGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-all chart lint format proto bench bench-peers slo chaos gpu-check

help: ## List the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(VENV)/.installed ## Create .venv and install pinned packages (an installed torch is left alone)

$(VENV)/.installed: pyproject.toml constraints.txt .ci/setup
	PYTHON="$(PYTHON)" VENV="$(VENV)" PIP_FLAGS="$(PIP_FLAGS)" .ci/setup
	@touch $@

serve: setup ## Check CONFIG (deployments.yaml) and serve it
	$(BIN)/python -m deployments.check $(CONFIG)
	$(BIN)/serve run $(CONFIG)

test: setup ## Run the tests (15 minutes at most)
	$(BIN)/python -m pytest

test-all: setup ## Run every test, the slow ones too
	$(BIN)/python -m pytest -m "slow or not slow"

chart: setup ## Run the Helm chart's tests: make chart [CRD=the schema of the RayService CRD, as JSON]
	$(BIN)/python -m pytest tests/unit/test_chart.py

lint: setup ## Check style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: setup ## Regenerate the modules of protos/
	$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

bench-peers: setup ## Rivals beside us, each in an environment of its own: steps, engines, servers (50 minutes)
	for part in steps engines differences servers; do \
	  $(BIN)/python -m loadtest.peers $$part --config $(CONFIG) --pip-flags="$(PIP_FLAGS)" || exit 1; \
	done

chaos: setup ## Kill processes and pull cables for five minutes under load (root, for network namespaces)
	$(BIN)/python -m loadtest.chaos

gpu-check: setup ## Whether this machine's GPU serves well: make gpu-check [MODEL=folder] [DRAFT=folder]
	$(BIN)/python -m workers.device_check --device cuda \
	  $(if $(MODEL),--model $(MODEL)) $(if $(DRAFT),--draft $(DRAFT))

PROMPTS ?= loadtest/prompts/six_kinds.jsonl
TTFT    ?= 500
TPOT    ?= 40
bench: setup ## Speculation on and off through the front door: make bench [PROMPTS=path]
	$(BIN)/python -m loadtest.bench --config $(CONFIG) --prompts $(PROMPTS)

slo: setup ## Highest rate that keeps the limits: make slo TTFT=500 TPOT=40 (ms, p99) [PROMPTS=path]
	$(BIN)/python -m loadtest.slo --config $(CONFIG) --prompts $(PROMPTS) --slo-ttft-ms $(TTFT) --slo-tpot-ms $(TPOT)
