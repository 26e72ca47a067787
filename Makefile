# HorizonML. `make` or `make help` lists what there is.
# Variables can be overridden: make demo WORKERS=3; make test PYTHON=python3.12; make demo TORCH_INDEX=https://...

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 5
# The cores of each of the demo's devices, which are emulated, and what they train: enough that it is worth connecting
# them. If it is empty, ranks share this machine instead.
DEVICES ?= 0.3
DEMO := --strategies single ddp auto --epochs 12 --set batch_size=256 --set data.image_size=16 \
	--set parallel.exact=false
# Where CPU builds of torch come from, and which (see scripts/setup.py).
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH_VERSION ?= 2.13.0
TORCHVISION_VERSION ?= 0.28.0
export TORCH_INDEX TORCH_VERSION TORCHVISION_VERSION ALLOW_CUDA
# Where it is set, every process that is started would compile the package once more.
unexport PYTHONDONTWRITEBYTECODE

BENCH_DATA ?= cifar10
SOAK ?= 10m
TENSORFLOW := examples/horovod_tensorflow

# Containers.
IMAGE ?= horizonml/worker:dev
DOCKER ?= docker
DOCKER_BUILD ?= $(DOCKER) build
KUBECTL ?= kubectl
KIND ?= kind
KIND_CLUSTER ?= horizonml
KIND_CONFIG ?= k8s/kind/cluster.yaml
# The node's image, which decides the version of Kubernetes; empty: kind's own default.
KIND_NODE_IMAGE ?=
# More images to load into the cluster; empty: the nodes pull them.
KIND_LOAD ?=
MONITORING ?= k8s/kind
IN_KIND = $(KUBECTL) --context kind-$(KIND_CLUSTER) --namespace horizonml

BIN := $(VENV)/bin
# Where `make helm` puts Helm, for those who have none.
export PATH := $(PATH):$(CURDIR)/build/bin

.DEFAULT_GOAL := help
PYTEST = "$(BIN)/python" -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder
PORTABLE = $(addprefix tests/,unit/test_tunnel.py unit/test_tunnel_process.py unit/test_join.py \
	$(addprefix distributed/test_,tunnel.py training.py joining.py up.py)) # what also runs as on other systems

.PHONY: help setup demo test test-slow test-portable unit lint format generate docs token images kind-up kind-down e2e bench bench-long \
	bench-smoke hetero footprint helm horovod horovod-tensorflow test-gpu test-launchers soak clean

help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} \
		/^##@ / {printf "\n\033[1m%s\033[0m\n", substr($$0, 5)} \
		/^[a-zA-Z0-9_-]+:.*## / {printf "  make %-19s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Start here
setup: ## Create .venv and install everything (the targets below do it when needed)
	@$(PYTHON) scripts/setup.py "$(VENV)"

demo: setup ## Plan for unequal devices, and compare five emulated ones with one of them alone (DEVICES=: without)
	@echo "This is a plan for ResNet-18 on a laptop, two mini-PCs and two Raspberry Pis on Wi-Fi, as examples/devices.yaml"
	@echo "describes them. Devices that would slow the others down are left out:"
	@echo
	@"$(BIN)/horizonml" plan jobs/cifar10.yaml --devices examples/devices.yaml --picture runs/demo/plan.png
	@echo
	@test -z "$(DEVICES)" || echo "Now devices of $(DEVICES) cores are emulated here, and train on digits: one alone, then $(WORKERS) together."
	@"$(BIN)/horizonml" bench compare jobs/digits.yaml --workers $(WORKERS) --out runs/demo \
		$(if $(DEVICES),--emulate $(DEVICES) $(DEMO))
	@echo "Pictures in runs/demo: $(if $(DEVICES),worth.png compares the devices with each of them alone; )plan.png shows a step of the plan"
	@echo "for unequal devices; report.html has everything else. Next: make hetero trains on such devices, in Docker."

test: setup ## Test on this machine, with real ranks, in a few minutes
	@$(PYTEST) -m "not slow"

test-slow: setup ## Run the tests that take long: faults, slow links, benches, docs (LONG=1: the longest, too)
	@$(PYTEST) -m "slow $(if $(LONG),,and not longest)"

test-portable: setup ## Test as on systems without Linux's lists of sockets what also runs there
	@HORIZONML_PORTABLE=1 $(PYTEST) -m "" $(PORTABLE)

##@ Develop
unit: setup ## Run the fast tests, without ranks
	@"$(BIN)/python" -m pytest tests/unit

lint: setup ## Check style, types and workflows
	@"$(BIN)/ruff" check .
	@"$(BIN)/ruff" format --check .
	@"$(BIN)/mypy"
	@"$(BIN)/zizmor" --offline --quiet .github

format: setup ## Put the code into the project's style
	@"$(BIN)/ruff" check --fix .
	@"$(BIN)/ruff" format .

generate: setup ## Write what is made from code: dashboards, reference pages of docs/, the operator's rules
	@"$(BIN)/python" scripts/generate.py

helm: setup ## Get Helm, which the tests of the chart need, into build/bin, if you have none
	@command -v helm >/dev/null || "$(BIN)/python" scripts/get_helm.py build/bin

docs: setup ## Build the documentation into build/docs, and check its links (open build/docs/index.html)
	@NO_MKDOCS_2_WARNING=1 "$(BIN)/mkdocs" build --strict --quiet
	@echo "The documentation is in build/docs: open build/docs/index.html"

##@ Containers
token: ## Write a token and Grafana's password to .env, for Compose (again: keeps them; ROTATE=1: another token)
	@$(PYTHON) scripts/new_token.py env .env $(if $(ROTATE),--rotate)

images: ## Build the worker's image (IMAGE=NAME:TAG; TORCH_INDEX=https://... and TORCH_BUILD=+cu126 for GPUs)
	$(DOCKER_BUILD) --tag $(IMAGE) --file images/worker/Dockerfile \
		--build-arg TORCH_VERSION=$(TORCH_VERSION) --build-arg TORCHVISION_VERSION=$(TORCHVISION_VERSION) \
		$(if $(filter command% environment%,$(origin TORCH_INDEX)),--build-arg TORCH_INDEX=$(TORCH_INDEX)) \
		$(if $(TORCH_BUILD),--build-arg TORCH_BUILD=$(TORCH_BUILD)) \
		--build-arg VERSION=$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' horizonml/__init__.py) \
		--build-arg REVISION=$$(git rev-parse --short HEAD 2>/dev/null || echo unknown) \
		--build-arg CREATED=$$(git show --no-patch --format=%cI HEAD 2>/dev/null || date -u +%FT%TZ) \
		$(if $(SOURCE),--build-arg SOURCE=$(SOURCE)) .

kind-up: images ## Make a Kubernetes cluster on this machine, with the image and monitoring in it
	@$(KIND) get clusters 2>/dev/null | grep -qx $(KIND_CLUSTER) || \
		$(KIND) create cluster --name $(KIND_CLUSTER) --config $(KIND_CONFIG) \
			$(if $(KIND_NODE_IMAGE),--image $(KIND_NODE_IMAGE))
	$(KIND) load docker-image --name $(KIND_CLUSTER) $(IMAGE) $(KIND_LOAD)
	$(KUBECTL) --context kind-$(KIND_CLUSTER) apply -f k8s/namespace.yaml
	$(KUBECTL) --context kind-$(KIND_CLUSTER) apply -k $(MONITORING)
	@$(IN_KIND) get secret digits-token >/dev/null 2>&1 || \
		$(PYTHON) scripts/new_token.py secret digits | $(IN_KIND) create -f -
	@echo
	@echo "The cluster is ready. Next: kubectl apply -k k8s/dp        (or k8s/mp, k8s/hybrid)"
	@echo "Then watch: kubectl -n horizonml logs -f digits-worker-0"
	@echo "Dashboards: kubectl -n horizonml-monitoring port-forward svc/grafana 3000   -> http://localhost:3000"

kind-down: ## Delete that cluster
	$(KIND) delete cluster --name $(KIND_CLUSTER)

e2e: setup ## Test in real containers and real Kubernetes (needs Docker; LONG=1: the longest, too)
	@"$(BIN)/python" -m pytest tests/e2e -m "$(if $(LONG),,not longest)"

##@ Measure
bench: setup ## Measure everything in short, under 12 minutes, and write runs/bench/report.html
	@scripts/horovod "$(VENV)" torch || echo "Horovod is left out, see above"
	@"$(BIN)/python" -m benchmarks.suite short

bench-long: setup ## The same at full length, with CIFAR-10 (BENCH_DATA=synthetic needs no network)
	@"$(BIN)/python" -m benchmarks.suite long --data $(BENCH_DATA)

bench-smoke: setup ## See that all of it runs, in a minute
	@"$(BIN)/python" -m benchmarks.suite smoke --out runs/bench-smoke

hetero: setup images ## Train on five emulated unequal devices with slow links (needs Docker, and sudo for links)
	@"$(BIN)/python" -m benchmarks.hetero compare $(HETERO)

soak: setup ## Train on five devices while faults of all kinds happen to them (SOAK=2h; needs root and iptables)
	@"$(BIN)/python" -m benchmarks.faults soak --for $(SOAK) --out runs/soak

footprint: setup ## Measure start-up, memory, bubbles and what recording costs
	@"$(BIN)/python" -m benchmarks.bubble
	@"$(BIN)/python" -m benchmarks.footprint

##@ Other launchers and libraries
horovod: setup ## Build Horovod into .venv, for parallel.strategy horovod (needs g++, cmake, make)
	@scripts/horovod "$(VENV)" torch

horovod-tensorflow: ## Train with Horovod and TensorFlow, in an environment of its own (see examples/)
	@test -x $(TENSORFLOW)/.venv/bin/python || $(PYTHON) -m venv $(TENSORFLOW)/.venv
	@$(TENSORFLOW)/.venv/bin/pip install --quiet --disable-pip-version-check -r $(TENSORFLOW)/requirements.txt
	@scripts/horovod $(TENSORFLOW)/.venv tensorflow
	@$(TENSORFLOW)/run.sh

test-gpu: ## Test ranks on the GPUs of this machine, and write the numbers to runs/gpu/numbers.json (PYTHON=... has torch)
	@PYTHONPATH=. $(PYTHON) scripts/gpu_check.py

test-launchers: setup ## Test torchrun, Open MPI, MPICH, horovodrun and Slurm for real (needs them; make horovod)
	@"$(BIN)/python" -m pytest tests/launchers

##@ Tidy up
clean: ## Delete the environment and all caches (runs/ stays)
	rm -rf "$(VENV)" build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
