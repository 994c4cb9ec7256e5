# `make help` says what there is. Needs Python 3.10 or later, pip and make; no GPU.
PYTHON       ?= python3
JOBS         ?= 2
ARGS         ?=
TAG          ?=
VENV_FLAGS   ?=
TESTED       := $(shell sed -n 's/^transformers==//p' constraints.txt)
TRANSFORMERS ?= $(TESTED)
TORCH        ?=
TRITON       ?=
# a set of its own has an environment of its own, as in .venv-torch2.15.0-triton3.9.0-py3.13-5.23.0
PAIR         := $(if $(TORCH)$(TRITON),$(if $(TORCH),-torch$(TORCH))$(if $(TRITON),-triton$(TRITON))-py$(shell \
                $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'))
VENV         ?= .venv$(PAIR)$(if $(filter-out $(TESTED),$(TRANSFORMERS)),-$(TRANSFORMERS))
RUN          := $(VENV)/bin/python
# what such a set changes in constraints.txt: torch brings its Triton, or Triton its torch; the
# interpreter takes the newest numpy from Triton 3.9 on
CONSTRAIN    := -e 's/^transformers==.*/transformers==$(TRANSFORMERS)/' $(if $(PAIR), \
                -e 's/^torch>=.*/torch$(if $(TORCH),==$(TORCH),>=2.11)/' \
                -e 's/^triton==.*/triton$(if $(TRITON),==$(TRITON),>=3.6)/' \
                $(if $(filter-out 3.6.% 3.7.% 3.8.%,$(TRITON)),-e '/^numpy==/d'))
# what builds and checks a release
RELEASE      := build==1.6.1 setuptools==84.2.1 twine==7.0.0
# where mypy finds models/ as it is installed, inside the package
TYPED        := build/typed

# tests start many processes: the first one that imports a module writes its bytecode, beside no source
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(abspath $(VENV))/bytecode

# the newest Triton that is tested; `make test-next` puts it before the environment's own
NEXT         ?= 3.9.0
SAMPLE       := tests/kernels tests/formats tests/ops/test_any_shape.py tests/ops/test_routing.py

.PHONY: help parity test test-next bench lint format venv dist hub release-check clean

help:
	@echo 'make parity   prove on small Qwen3-MoE and Llama4 models that patched equals unpatched'
	@echo 'make test     the test suite; without a GPU the kernels run in Triton'\''s interpreter'
	@echo 'make test-next   the kernels'\'' tests with Triton $(NEXT) and the newest numpy in $(VENV)'
	@echo 'make bench    speed against Hugging Face'\''s own implementations (needs a GPU)'
	@echo 'make lint     ruff, check and format, and mypy;   make format   apply ruff'
	@echo 'make venv     only make $(VENV) and install into it; the others do so when they need to'
	@echo 'make dist     the sdist and the wheel of HEAD, checked;   make hub   the kernel for the hub'
	@echo 'make release-check TAG=v1.2.3   what is missing before that release (docs/releasing.md)'
	@echo 'make clean    remove every .venv*, build output and cache'
	@echo
	@echo 'Options, as in  make test ARGS="-k sort_tokens -x" JOBS=8'
	@echo '  ARGS=...              passed on to pytest, parity or bench (ARGS="--help" lists theirs)'
	@echo '  JOBS=$(JOBS)                test processes'
	@echo '  TRANSFORMERS=$(TRANSFORMERS)   the version to install, in an environment of its own'
	@echo '  TORCH=2.15.0 TRITON=3.9.0   other versions of these, in an environment of their own'
	@echo '  PYTHON=$(PYTHON)        the Python that makes the environment'
	@echo '  VENV_FLAGS=--system-site-packages   use the torch that PYTHON already has'

parity: $(VENV)/installed
	$(RUN) -m moe_patch parity $(ARGS)

test: $(VENV)/installed
	$(RUN) -m pytest -n $(JOBS) $(ARGS)

test-next: $(VENV)/installed $(VENV)/next-$(NEXT)
	PYTHONPATH=$(abspath $(VENV)/next-$(NEXT)) TRITON_INTERPRET=1 \
	  $(RUN) -m pytest -n $(JOBS) $(SAMPLE) --deselect tests/kernels/test_aot.py \
	  --deselect tests/kernels/test_packed_on_cpu.py \
	  --deselect tests/kernels/test_hopper_on_cpu.py \
	  --deselect tests/ops/test_any_shape.py::test_as_on_a_card $(ARGS)

bench: $(VENV)/installed
	$(RUN) -m moe_patch bench $(ARGS)

lint: $(VENV)/installed
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	rm -rf $(TYPED) && mkdir -p $(TYPED)/moe_patch
	ln -s $(CURDIR)/moe_patch/* $(CURDIR)/models $(TYPED)/moe_patch/
	cd $(TYPED) && $(abspath $(RUN)) -m mypy --config-file $(CURDIR)/pyproject.toml -p moe_patch

format: $(VENV)/installed
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

venv: $(VENV)/installed

dist: .venv-release/installed
	PYTHON=$(abspath .venv-release/bin/python) .ci/dist

hub:
	$(PYTHON) .ci/hub/build.py

release-check:
	.ci/release-check "$(TAG)"

# Debian's python3 has venv but not ensurepip; there, PYTHON's own pip brings the first one.
define make_venv
	$(PYTHON) -m venv $(VENV_FLAGS) $(1) || { \
	  $(PYTHON) -m venv $(VENV_FLAGS) --without-pip $(1) && \
	  $(PYTHON) -m pip --python $(1)/bin/python install --quiet pip; }
endef

$(VENV)/installed: setup.py pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("moe_patch needs Python 3.10 or later, found %d.%d: make PYTHON=python3.12 ..." % sys.version_info[:2] if sys.version_info < (3, 10) else 0)'
	$(call make_venv,$(VENV))
	$(RUN) -m pip install --quiet --upgrade pip
	sed $(CONSTRAIN) constraints.txt > $(VENV)/constraints.txt
	$(RUN) -m pip install --quiet --no-compile --constraint $(VENV)/constraints.txt --editable '.[dev]'
	@touch $@

# of its own: torch has its say about setuptools, on which the bytes of a wheel depend
.venv-release/installed: Makefile
	$(call make_venv,.venv-release)
	.venv-release/bin/python -m pip install --quiet $(RELEASE)
	@touch $@

# without what they depend on: the torch there may ask for another Triton, and runs with this one
$(VENV)/next-$(NEXT): $(VENV)/installed
	rm -rf $@ $@.part
	$(RUN) -m pip install --quiet --no-compile --no-deps --target $@.part triton==$(NEXT) numpy
	mv $@.part $@

clean:
	rm -rf .venv* build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
