# Commands of this project. `make` without a target lists them.
#
# `make demo` and `make test` work on a fresh machine: they create .venv, install the pinned requirements, and build
# the native prover. They check the prerequisites first and print one line for each missing one.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=

# System programs that tests and campaigns use: command=package.
SYSTEM := strace=strace
# Programs for the examples in deploy/ and for PostgreSQL. If systemd is running, installing a proxy or a database would
# start it, so they are used only if they are already installed.
INITDB := $(firstword $(wildcard /usr/lib/postgresql/*/bin/initdb) initdb)
DEPLOY := $(if $(wildcard /run/systemd/system),,nginx=nginx-light caddy=caddy systemd-analyze=systemd $(INITDB)=postgresql buildah=buildah tor=tor promtool=prometheus)
# Programs for tests/deploy, which boots systemd in a container. It runs only if ARGS names it (20 to 60 minutes).
BOOT := $(if $(findstring tests/deploy,$(ARGS)),debootstrap=debootstrap systemd-nspawn=systemd-container \
  podman=podman runc=runc iptables=iptables $(addprefix /usr/lib/podman/,netavark=netavark aardvark-dns=aardvark-dns))
# Tests of `make test-full`: campaigns and documents with real processes, killed databases, proxies, planted faults,
# and the audit of a round with real proofs.
LONG := tests/acceptance tests/campaign/test_quick.py tests/tor $(addprefix tests/integration/test_, \
  circuit_selection.py client_address_memory.py conformance.py crash.py encryption_kill.py outage.py postgres_failover.py \
  postgres_network.py proxies.py roles.py round_archive.py)
# Of these, tests that must run alone: real proofs with time limits, latency requirements, and cost limits.
ALONE := tests/campaign/test_quick_alone.py $(addprefix tests/integration/test_,demo.py history.py known_shares.py \
  performance_guard.py tree_restart.py)
CARGO_TEST := cargo test --release --lib --locked --quiet --manifest-path proofs/Cargo.toml
# Browser tests: whether to run them, and the test wallet that they need.
WITH_BROWSER := $(if $(strip $(ARGS)),$(findstring browser,$(ARGS)),browser)
WALLET := build/browser/keplr.js
MODULES := ui/node_modules/.package-lock.json

export VIRTUAL_ENV := $(abspath $(VENV))
export PATH := $(abspath $(BIN)):$(PATH)
unexport CONDA_PREFIX
# Tests and campaigns start the service thousands of times; without compiled modules each start costs 1.2 s more CPU.
unexport PYTHONDONTWRITEBYTECODE

DIST := dist
# Listed individually, so that secret files next to the compose files are not copied.
DEPLOY_FILES := $(addprefix deploy/,caddy/Caddyfile container/Containerfile container/compose.cluster.yaml \
  container/compose.yaml grafana/svote-helper.json nginx/svote-helper.conf prometheus/alerts.yaml \
  prometheus/original_names.yaml systemd/svote-helper-onion.socket systemd/svote-helper.service \
  systemd/svote-helper.socket systemd/svote-helper.sysusers tor/torrc)

NATIVE_SOURCES := $(wildcard proofs/src/*.rs proofs/src/*/*.rs) proofs/Cargo.toml proofs/Cargo.lock pyproject.toml

.DEFAULT_GOAL := help
.PHONY: help demo test test-python test-others test-full campaign simulation explorer check format ui wheel release release-check package bench lock docs pictures clean

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

demo: $(VENV)/.native ## run a vote on an embedded chain with real proofs (ARGS='--circuit k11 --voters 5')
	@$(if $(findstring postgres,$(ARGS)),sh scripts/system_packages.sh $(filter %=postgresql,$(DEPLOY)))
	@$(BIN)/svote-helper demo $(ARGS)

test: $(VENV)/.native $(if $(WITH_BROWSER),$(WALLET)) ## run the tests that a change needs, warnings as errors (ARGS='-k name' is passed to pytest)
	@sh scripts/system_packages.sh $(SYSTEM) $(DEPLOY) $(BOOT) $(if $(WITH_BROWSER),chromium=chromium)
ifeq ($(strip $(ARGS)),)
	@$(MAKE) --no-print-directory -j2 test-python test-others; status=$$?; cat build/test-others.log; exit $$status
else
	$(BIN)/python -m pytest $(ARGS)
	$(CARGO_TEST)
endif

# The two parts of `test` run side by side, because a browser mostly waits. They call make, so its variables are unset.
test-python:
	@unset MAKEFLAGS; $(BIN)/python -m pytest -n 3 --dist worksteal \
	  $(addprefix --ignore=,$(LONG) $(ALONE) tests/browser tests/deploy)

test-others:
	@mkdir -p build
	@unset MAKEFLAGS; { $(BIN)/python -m pytest tests/browser && sh scripts/page.sh && $(CARGO_TEST); } \
	  >build/test-others.log 2>&1

test-full: $(VENV)/.native ## run the long tests, which `make test` omits: campaigns, failover, proxies, 900 more seeds
	@sh scripts/system_packages.sh $(SYSTEM) $(DEPLOY)
	$(BIN)/python -m pytest -n 3 --dist worksteal $(LONG)
	$(BIN)/python -m pytest $(ALONE)
	$(BIN)/python -m tests.simulation --seeds 100-999

check: $(VENV)/.native ## check lint, types, imports and format of Python and Rust
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	cargo fmt --check --manifest-path proofs/Cargo.toml
	cargo clippy --release --all-targets --locked --quiet --manifest-path proofs/Cargo.toml -- -D warnings

format: $(VENV)/.deps ## format Python and Rust
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	cargo fmt --manifest-path proofs/Cargo.toml

campaign: $(VENV)/.native ## test the promises under crashes, faults and hostile input (ARGS='--only crash --quick')
	@sh scripts/system_packages.sh $(SYSTEM)
	@$(BIN)/python -m tests.campaign $(ARGS)

simulation: $(VENV)/.native ## run the service under virtual time, seed by seed (ARGS='--seeds 0-9999', '--seed 7 --story', '--liar ahead,swallow --nodes 3' or '--fleet --overdue 10000')
	@$(BIN)/python -m tests.simulation $(ARGS)

explorer: $(VENV)/.native ## visit every state that nodes and one liar can cause (ARGS='--heights 3')
	@$(BIN)/python -m tests.explorer $(ARGS)

bench: $(VENV)/.native ## measure performance against its goals; bench/results/ (ARGS='--quick', ARGS='--only accept')
	@sh scripts/system_packages.sh wrk=wrk $(filter %=postgresql,$(DEPLOY))
	@$(BIN)/python -m bench $(ARGS)

ui: $(MODULES) ## lint, test and build the web page into ui_dist/ (needs node 20.19 or newer)
	cd ui && npm run --silent check && npm run --silent test && npm run --silent build

wheel: package ## build dist/ for installation: the wheel, its pinned requirements, deploy/
	rm -rf $(DIST)/deploy
	tar -cf - $(DEPLOY_FILES) | tar -xf - -C $(DIST)
	cp docs/operations.md $(DIST)/

release: $(VENV)/.deps ## build dist/ from the newest commit, with SBOM, provenance, hashes and signature (KEY=FILE)
	$(BIN)/python -m scripts.release --dist $(DIST) $(if $(KEY),--key "$(KEY)")

release-check: $(VENV)/.deps ## build a release twice, in two directories and on two days, and compare (10 minutes)
	@sh scripts/system_packages.sh faketime=faketime
	$(BIN)/python -m scripts.release --check

# Contents of a container image: the wheel and its pinned requirements.
package: $(VENV)/.deps
	$(BIN)/maturin build --release --locked --out $(DIST)
	cp requirements/base.txt $(DIST)/requirements.txt
	cp requirements/postgres.txt $(DIST)/requirements-postgres.txt

docs: $(VENV)/.native ## regenerate the generated documents
	$(BIN)/python -m scripts.conformance
	$(BIN)/python -m scripts.cli_docs
	$(BIN)/python -m scripts.json_schemas
	$(BIN)/python -m scripts.performance_docs

pictures: $(VENV)/.native $(WALLET) ## create the images in docs/images/ from the running product
	@sh scripts/system_packages.sh chromium=chromium pngquant=pngquant
	$(BIN)/python -m tests.browser.screenshots

lock: $(VENV)/.uv ## pin the newest versions that the declared ranges allow
	$(BIN)/uv pip compile -q --upgrade --universal --generate-hashes --no-emit-index-url --no-header \
	  --python-version 3.11 pyproject.toml requirements/dev.in -o requirements/dev.txt
	$(BIN)/uv pip compile -q --upgrade --universal --generate-hashes --no-emit-index-url --no-header --no-annotate \
	  --python-version 3.11 -c requirements/dev.txt pyproject.toml -o requirements/base.txt
	$(BIN)/uv pip compile -q --upgrade --universal --generate-hashes --no-emit-index-url --no-header --no-annotate \
	  --python-version 3.11 --extra postgres -c requirements/dev.txt pyproject.toml -o requirements/postgres.txt
	echo uv | $(BIN)/uv pip compile -q --upgrade --universal --generate-hashes --no-emit-index-url --no-header \
	  --python-version 3.11 - -o requirements/uv.txt

clean: ## remove the environment and all build output
	rm -rf $(VENV) build dist proofs/target proofs/*.so

$(MODULES): ui/package.json ui/package-lock.json
	@command -v npm >/dev/null || { echo "the page and its tests need npm (node 20.19 or newer)" >&2; exit 1; }
	cd ui && npm ci --no-progress --loglevel=error
	@touch $@

$(WALLET): ui/tests/browser/keplr.ts ui/vite.wallet.config.ts ui/src/lib/keplr.ts $(MODULES)
	cd ui && npm run --silent wallet

$(VENV)/.uv: requirements/uv.txt
	@PYTHON=$(PYTHON) sh scripts/preflight.sh >&2
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $< >&2
	@touch $@

$(VENV)/.deps: requirements/dev.txt $(VENV)/.uv
	@echo "installing the pinned requirements" >&2
	@$(BIN)/uv pip install --quiet --require-hashes -r $< >&2
	@touch $@

$(VENV)/.native: $(NATIVE_SOURCES) $(VENV)/.deps
	@echo "building the native prover (a few minutes the first time)" >&2
	@$(BIN)/maturin develop --release --locked --uv >&2
	@touch $@
