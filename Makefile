# The one list of commands. Each works on a fresh clone: the first to run makes .venv.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: demo demos test test-oldest lint bench clean

$(READY): setup.py
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[cpu,test]'
	touch $@

## demo: the main job. Train on real digits with 2 processes, dynamic and static.
demo: $(READY)
	RUN_STATIC=0 $(PY) launch/local.py --processes 2 demos/digits.py
	RUN_STATIC=1 $(PY) launch/local.py --processes 2 demos/digits.py

test: $(READY)
	$(PY) -m pytest

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache log
