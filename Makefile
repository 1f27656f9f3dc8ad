# The one list of commands. Each works on a fresh clone: the first to run makes .venv.
PYTHON ?= python3
VENV ?= .venv
GPU_PYTHON ?= $(PYTHON)
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
DEMO_READY := $(VENV)/.ready-demo
OLDEST := .venv-oldest
ADAPTERS ?= torchdata mds dali ffcv ray visualdl
TRAINERS ?= paddlenlp paddleformers_auto paddleformers
PYTHONS ?= $(foreach version,3.10 3.11 3.12 3.13,$(if $(shell python$(version) --version 2>/dev/null),$(version)))
STEPS ?= 100000
SEEDS ?= 1000
TIME ?= 600
# Tests wait more than they compute. The tests of a file share jobs, so they stay together.
JOBS ?= 4
# pytest keeps what it makes of the tests' asserts in __pycache__, which saves each of its processes seconds.
unexport PYTHONDONTWRITEBYTECODE
# A test that hangs shows where all threads are, and fails.
SIDE_BY_SIDE := -n $(JOBS) --dist loadfile --no-loadscope-reorder --timeout 600
RUN := $(PY) launch/local.py

.PHONY: help demo demos test test-long quick simulate test-device test-gpu test-oldest test-pythons test-adapters test-suites test-trainers faults bench bench-device soak lint dist docs clean

help:
	@sed -n 's/^## //p' Makefile

## demo: the main job: train on real digits with 2 processes, dynamic and static
demo: $(DEMO_READY)
	RUN_STATIC=0 $(RUN) --processes 2 demos/digits.py
	RUN_STATIC=1 $(RUN) --processes 2 demos/digits.py

## demos: all demos, on CPU processes; shows what each prints, and checks it
demos: demo $(READY)
	PADDLE_SHARD_DEMOS=1 $(PY) -m pytest -v -rP -n 2 --dist loadfile tests/demos

## test: all tests, on the newest Paddle and numpy; prints the 20 slowest (JOBS=1: one after the other)
test: $(READY)
	$(PY) -m pytest $(SIDE_BY_SIDE) --durations=20

## test-long: as test, laws with four times the examples, and the tests that start many fresh processes; before a release
test-long: $(READY)
	PADDLE_SHARD_LONG=1 $(PY) -m pytest $(SIDE_BY_SIDE) --durations=20

## quick: the tests that start no processes, in a minute or two
quick: $(READY)
	$(PY) -m pytest -q -n 2 --dist loadfile -m "not multiprocess and not processes"

## simulate: ranks that agree, a disk that crashes, lives of a run; each trial replays from its seed (SEEDS=1000 TIME=600)
simulate: $(READY)
	$(PY) -m tests.simulation.ranks --seeds $(SEEDS) --seconds $(TIME)
	$(PY) -m tests.simulation.disk --seeds $(SEEDS) --seconds $(TIME)
	$(PY) -m tests.simulation.life --seeds $(SEEDS) --seconds $(TIME)

## test-device: delivery to a device, on one that stands in for a GPU (tests/device/real); needs g++, else it says so
test-device: $(READY)
	@if command -v $(CXX) >/dev/null; then $(MAKE) --no-print-directory on-device; \
	else echo "tests/device skipped: no C++ compiler ($(CXX)); Debian's g++ is enough"; fi

## test-gpu: ten minutes on a real GPU, docs/gpu.md (GPU_PYTHON=a Python with paddlepaddle-gpu); else it says why it skips
test-gpu:
	@PYTHONPATH=$(CURDIR) $(GPU_PYTHON) tests/device/gpu.py

## test-oldest: all tests on Paddle 3.0.0
test-oldest: $(OLDEST)/.ready
	$(PYTHON) tests/versions.py $(OLDEST) -- $(SIDE_BY_SIDE)

## test-pythons: all tests on each version of Python that is there, from 3.10 to 3.13 (PYTHONS="3.13": only that)
test-pythons: $(PYTHONS:%=.venv-python%/.ready)
	$(PYTHON) tests/versions.py $(PYTHONS:%=.venv-python%) -- $(SIDE_BY_SIDE)

## test-adapters: other data libraries, readers on Ray, VisualDL, and their demos, each in its own environment (ADAPTERS="mds dali": only these)
test-adapters: $(ADAPTERS:%=.venv-%/.ready)
	$(PYTHON) tests/adapters/run.py $(ADAPTERS)

## test-suites: what Paddle's model suites and its documentation give to a loader, on two CPU ranks
test-suites: $(READY)
	$(PY) -m pytest -v $(SIDE_BY_SIDE) tests/suites

## test-trainers: auto-parallel trainers that nobody edits, each package in its own environment (TRAINERS=paddlenlp: one)
test-trainers:
	@failed=; for trainer in $(TRAINERS); do echo "== $$trainer"; \
	$(MAKE) --no-print-directory .venv-$$trainer/.ready && \
	PADDLE_SHARD_TRAINER=$$trainer .venv-$$trainer/bin/python -m pytest -v tests/trainers || failed="$$failed $$trainer"; \
	done; if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi

## faults: the fault suite 50 times, each with another seed, over an hour (FAULT_ROUNDS=5 FAULT_SEED=100: seeds 100 to 104)
faults: $(READY)
	$(PY) tests/faults/rounds.py

## bench: ratios against peers, ten minutes, or twenty beside all peers; benchmarks/README.md says how to read them
bench: $(READY)
	$(PY) benchmarks/order.py
	$(PY) benchmarks/mixture.py
	$(PY) benchmarks/packing.py
	$(PY) benchmarks/balance.py
	$(PY) benchmarks/replicas.py
	$(PY) benchmarks/agreement.py
	$(PY) benchmarks/hub.py
	$(PY) benchmarks/loader.py
	$(PY) benchmarks/price.py
	$(PY) benchmarks/trainers.py
	$(PY) benchmarks/waits.py
	$(PY) benchmarks/jpeg.py

## bench-device: does delivery overlap what a device computes? On the device of tests/device, beside Paddle's loader
bench-device: $(READY) build/device/libstandin.so
	$(ON_DEVICE) $(PY) benchmarks/device.py

## soak: 100,000 steps on two ranks: memory, files, threads and shared memory must not grow (STEPS=20000: fewer)
soak: $(READY)
	$(PY) benchmarks/soak.py --steps $(STEPS)

## lint: ruff and mypy
lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

## dist: build the sdist and the wheel into dist/, and try each in an empty environment (PADDLE_SHARD_URL=: for the links)
dist: .venv-dist/.ready
	.venv-dist/bin/python tests/dist.py

## docs: build the site into site/, without a warning (PADDLE_SHARD_URL=: where its links to files of the repository lead)
docs: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict --quiet

## clean: remove what the others made
clean:
	rm -rf dist site .venv .venv-dist .venv-docs .venv-oldest .venv-torchdata .venv-mds .venv-dali .venv-ffcv .venv-ray .venv-visualdl .venv-python3.1? $(TRAINERS:%=.venv-%) build .real *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis log

# The plug-in of tests/device/real, on a CUDA runtime made of threads, which is stricter than a GPU: device memory cannot
# be touched, freeing waits, and calls in forked children and host functions fail. All host memory counts as pinned, as
# batches are with a GPU: it is read late, so memory that is reused too early is seen. test_real.py has pageable memory.
# Paddle loads the plug-in when it is imported. Without kernels of its own, a device needs the flag.
ON_DEVICE := CUSTOM_DEVICE_ROOT=$(CURDIR)/build/device STANDIN_ALL_PINNED=1 FLAGS_use_stride_kernel=0 GLOG_minloglevel=2
DEVICE_TESTS := tests/device tests/loader/test_laws.py tests/loader/test_verify.py tests/loader/test_skipping.py tests/data/test_streams.py tests/reading/test_passes.py
STANDIN := $(wildcard tests/device/real/*.cc tests/device/real/*.h tests/device/real/fake/*)
build/device/libstandin.so: tests/device/real/build.sh $(STANDIN) $(READY)
	CXX=$(CXX) PYTHON=$(PY) $< fake $(@D)

.PHONY: on-device
on-device: build/device/libstandin.so
	$(ON_DEVICE) $(PY) -m pytest -q -p tests.device.on_standin -n 2 --dist loadfile --timeout 600 $(DEVICE_TESTS)

# The demo needs a fraction of what all tests need.
$(DEMO_READY): setup.py
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[cpu,demo]'
	touch $@

$(READY): setup.py
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[cpu,test,sources]'
	touch $@ $(DEMO_READY)

.venv-dist/.ready:
	test -x .venv-dist/bin/python || $(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check build twine
	touch $@

.venv-docs/.ready: setup.py
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check mkdocs-material==9.* 'mkdocstrings[python]==1.*' jieba ruff
	touch $@

$(OLDEST)/.ready: setup.py
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check paddlepaddle==3.0.0 -e '.[test,sources]'
	touch $@

$(PYTHONS:%=.venv-python%/.ready): .venv-python%/.ready: setup.py
	test -x .venv-python$*/bin/python || python$* -m venv .venv-python$*
	.venv-python$*/bin/python -m pip install --quiet --disable-pip-version-check -e '.[cpu,test,sources]'
	touch $@

# torch first and pinned, or a CUDA build of another version may come with the library.
FIRST_torchdata := torch==2.13.0
FIRST_mds := torch==2.13.0 'numpy<2.2'
FIRST_ffcv := torch==2.13.0 setuptools wheel
# FFCV is compiled: Debian's libopencv-dev, libturbojpeg0-dev, pkg-config and g++; it looks for opencv4 as "opencv".
BEFORE_ffcv := mkdir -p .venv-ffcv/pkgconfig && \
	ln -sf "$$(pkg-config --variable=pcfiledir opencv4)/opencv4.pc" .venv-ffcv/pkgconfig/opencv.pc
WITH_ffcv := PKG_CONFIG_PATH=$(CURDIR)/.venv-ffcv/pkgconfig
PIP_ffcv := --no-build-isolation
NOT_OURS_torchdata := -e . 'torchdata>=0.11'
NOT_OURS_mds := -e . 'mosaicml-streaming==0.13.*' filelock==3.16.1
NOT_OURS_dali := -e . 'nvidia-dali-cuda130>=2.4'
NOT_OURS_ffcv := -e . ffcv==1.0.2
NOT_OURS_visualdl := -e . 'visualdl>=2.5'

$(patsubst %,.venv-%/.ready,torchdata mds dali ffcv ray visualdl): .venv-%/.ready: setup.py
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check paddlepaddle==3.3.1 pytest scikit-learn $(FIRST_$*)
	$(BEFORE_$*)
	$(WITH_$*) .venv-$*/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_$*) $(or $(NOT_OURS_$*),-e '.[$*]') $(FIRST_$*)
	touch $@

# The packages' own requirements do not fit together any more: what is pinned here lets their trainers be imported.
PINS := datasets==3.6.0 pyarrow==19.0.1 protobuf==5.29.5
WITH_paddlenlp := paddlepaddle==3.0.0 paddlenlp==3.0.0b4 aistudio-sdk==0.2.6
WITH_paddleformers_auto := paddlepaddle==3.3.1 paddleformers==0.4.1
WITH_paddleformers := paddlepaddle==3.3.1 paddleformers==1.2.0

$(patsubst %,.venv-%/.ready,paddlenlp paddleformers_auto paddleformers): .venv-%/.ready: setup.py
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check $(WITH_$*) $(PINS) pytest
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@
