# Two commands do everything on a machine with Python ≥ 3.11 and nothing else: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
BASE   := $(VENV)/.installed
STAMP  := $(VENV)/.installed-for-work
DOCS   := $(VENV)/.installed-for-docs
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
MODELS := .cache/models
VLLM   := .cache/vllm/venv
CLIENTS := .cache/clients
# More than cores: many tests wait for sockets and processes. With worksteal, neighbours share what they have computed.
WORKERS ?= 4

# Container images often set it. Each process would then compile the package again, and pytest all tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check format lint types test-kernels test-gguf test-real test-network test-chaos test-chaos-long test-soak mutate fuzz test-vllm test-browser test-clients docs cli-reference pictures dist proto bench clean

demo: $(BASE)
	$(BIN)/outrider demo

test: $(STAMP)
	$(BIN)/pytest -n $(WORKERS) --dist worksteal

check: $(STAMP) format-check lint types test

format: $(STAMP)
	$(BIN)/ruff format src tests training benchmarks tools
	$(BIN)/ruff check --fix src tests training benchmarks tools

.PHONY: format-check
format-check: $(STAMP)
	$(BIN)/ruff format --check src tests training benchmarks tools

lint: $(STAMP)
	$(BIN)/ruff check src tests training benchmarks tools

types: $(STAMP)
	$(BIN)/mypy

# The GPU path without a GPU, in Triton's interpreter. CI runs it.
test-kernels: $(STAMP)
	$(BIN)/pytest -m kernels -n auto

# The engine for GGUF files. It needs llama-cpp-python, which is built from source: minutes. CI runs it.
test-gguf: $(STAMP)
	$(PIP) --editable '.[gguf]'
	$(BIN)/pytest tests/engines/test_gguf.py -n 2 -rs

# A real pair, put into $(MODELS) beforehand; see docs/structure.md.
test-real: $(STAMP)
	$(BIN)/pytest -m real

# Edge and cloud in two processes: cut, killed, stalled, counted to the byte. CI runs it after `make check`.
test-network: $(STAMP)
	$(BIN)/pytest -m network -n auto

# Real vLLM servers on the CPU, in an environment of their own (3.5 GB). Where that cannot be installed (75), it says so.
test-vllm: $(STAMP)
	$(BIN)/python tests/vllm/environment.py $(VLLM) || test $$? = 75
	$(BIN)/pytest -m vllm -rs

# The report and the gateway's page in headless Chromium, which Debian's package brings where there is none yet.
test-browser: $(STAMP)
	command -v chromium >/dev/null || apt-get install --yes --quiet chromium || true
	$(BIN)/pytest -m browser -rs

# Unmodified clients of OpenAI's API, in environments of their own. Those that cannot be installed are named and skipped.
test-clients: $(STAMP)
	$(BIN)/python tests/clients/environment.py $(CLIENTS)
	$(BIN)/pytest -m clients -n 2 --dist loadgroup -rs

# 40 generations while the server is killed and the link cut, stalled and slowed down. CI runs it.
test-chaos: $(STAMP)
	CHAOS_GENERATIONS=40 $(BIN)/pytest -m chaos -n auto

# The same with 200.
test-chaos-long: $(STAMP)
	$(BIN)/pytest -m chaos -n auto

# The share of 200 single faults in sampling/ and decoding/ that the tests detect: about two hours of one core.
mutate: $(STAMP)
	$(BIN)/python tools/mutate.py

# 64 sessions at once, then 2,000 one after another, on one server; 32 clients of a gateway for five minutes.
test-soak: $(STAMP)
	$(BIN)/pytest -m soak -s

# Damaged and lying recordings for so many seconds; those that are read wrongly are kept in .cache/fuzz.
fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz.recordings --seconds $(or $(SECONDS),60) --seed $(or $(SEED),0) --keep .cache/fuzz

# Compiles the protocol; the results are committed, and a test compares them with the .proto.
proto: $(STAMP)
	cd src && ../$(BIN)/python -m grpc_tools.protoc -I . --pyi_out=. \
	  --descriptor_set_out=outrider/protocol/outrider.binpb outrider/protocol/outrider.proto
	sed -i -E 's/ _Mapping([],])/ _Mapping[str, object]\1/g' src/outrider/protocol/outrider_pb2.pyi

# The documentation site, in .cache/site. A warning is an error. CI runs it.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir .cache/site

# docs/cli.md, from the help texts of the commands; a test compares the two.
cli-reference: $(STAMP)
	$(BIN)/python tools/cli_reference.py > docs/cli.md

# The pictures of the README: a recording of the demo on a terminal, and the gateway's page in Chromium.
pictures: $(STAMP)
	$(BIN)/python tools/record_demo.py docs/images/demo.svg
	$(BIN)/python -m tools.page_picture docs/images/page.png

# Source distribution and wheel, in dist/, checked as a package index would check them. CI runs it.
dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*

bench: $(STAMP)
	$(BIN)/python benchmarks/loop_overhead.py

$(BASE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "outrider needs Python 3.11 or newer: make PYTHON=…")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[cloud]'
	touch $@

$(STAMP): $(BASE)
	$(PIP) --editable '.[dev,training]' 'gguf>=0.10,<1' 'accelerate>=1.0,<2'
	touch $@

$(DOCS): $(STAMP)
	$(PIP) --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) .cache/site dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
