# The commands of Galley. `make help` lists them.

.DEFAULT_GOAL := help
.PHONY: help setup up test test-mooncake check bench clients clean

PYTHON := .venv/bin/python
MARKERS := not gpu and not system and not mooncake

# `make up NUM_BLOCKS=512` is `galley up num_blocks=512`: a variable of the command line that is no option of
# `galley up` is a setting of the services, and galley says so if no service has it.
GIVEN := $(foreach v,$(.VARIABLES),$(if $(filter command line,$(origin $v)),$v))
UP_OPTIONS := HOST PORT ROUTER_PORT PREFILL DECODE GATEWAYS TOPOLOGY CORES CONFIG RUN_DIR
NOT_SETTINGS := $(UP_OPTIONS) TORCH_INDEX NAME ARGS MARKERS CLIENTS
lower = $(shell printf '%s' '$1' | tr 'A-Z_' 'a-z-')
up_arguments = $(foreach v,$(filter $(UP_OPTIONS),$(GIVEN)),$(if $($v),--$(call lower,$v)='$($v)')) \
               $(foreach v,$(filter-out $(NOT_SETTINGS),$(GIVEN)),'$v=$($v)')

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "  make up PORT=8000 PREFILL=1 DECODE=1 TOPOLOGY=disaggregated|pooled|chunked|colocated|hybrid MODEL=<directory or hub id>"
	@echo "          DTYPE=float32 DEVICE=cpu|cuda CORES=0-3 CONFIG=galley.toml, and any setting of a service: NUM_BLOCKS=512"
	@echo "  make test ARGS='tests/unit -x'          make bench NAME=smoke ARGS='--json out.json'"

setup:  ## make .venv with pinned dependencies (DEVICE=cpu|cuda TORCH_INDEX=URL); second runs take no time
	@DEVICE='$(DEVICE)' TORCH_INDEX='$(TORCH_INDEX)' sh scripts/setup.sh

up: setup  ## start a whole cluster on this machine and serve until Ctrl-C
	@exec .venv/bin/galley up --with-parent $(up_arguments)

test: setup  ## run the tests that need neither a GPU nor root
	@$(PYTHON) -m pytest -m '$(MARKERS)' $(ARGS)

test-mooncake: setup  ## run the tests over a real Mooncake Store, which is installed if it is missing
	@$(PYTHON) -c 'import mooncake' 2>/dev/null || $(PYTHON) -m pip install -q -c requirements.lock -e '.[pool]'
	@$(PYTHON) -c 'import mooncake.store' || \
	  { echo "test-mooncake: sudo apt install libcurl4 libibverbs1 librdmacm1 libnuma1" >&2; exit 2; }
	@$(PYTHON) -m pytest -m mooncake tests/mooncake $(ARGS)

check: setup  ## lint, formatting and types
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@$(PYTHON) -m mypy

bench: setup  ## run one bench: NAME=smoke, with ARGS='--json FILE --url URL'
	@test -n '$(NAME)' || { echo "bench: say which: make bench NAME=smoke" >&2; exit 2; }
	@exec $(PYTHON) -m bench $(NAME) $(ARGS)

clients: setup  ## put guidellm, aiperf and vLLM's CPU build into venvs of their own (CLIENTS='guidellm aiperf' for some)
	@CLIENTS='$(CLIENTS)' TORCH_INDEX='$(TORCH_INDEX)' sh scripts/clients.sh

clean:  ## remove all that make made here: .venv, .venvs, logs, caches
	rm -rf .venv .venvs .galley build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
