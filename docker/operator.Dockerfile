# The operator: no torch, no Ray, no engine. Build it from the repository's root. The stages and the optional secrets
# are those of engine.Dockerfile.
ARG BASE=python:3.11-slim

FROM ${BASE} AS dependencies
ENV PATH=/opt/rayloom/code/bin:/opt/rayloom/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
COPY constraints.txt operator/pyproject.toml tools/pip_or_uv.py /opt/rayloom/build/
# Dependencies have no bytecode: it would double their size, and the operator starts rarely.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca,target=/run/secrets/ca.crt \
    set -e; cd /opt/rayloom/build; \
    useradd --uid 1000 --user-group --no-create-home --home-dir /tmp --shell /bin/bash rayloom; \
    python3 -m venv /opt/rayloom/venv; \
    python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' > requirements.txt; \
    python pip_or_uv.py "$(command -v python)" --quiet -c constraints.txt -r requirements.txt; \
    pip uninstall --quiet --yes pip setuptools; \
    echo /opt/rayloom/code > "$(python -c 'import site; print(site.getsitepackages()[0])')/rayloom.pth"; \
    rm -rf /opt/rayloom/build /opt/rayloom/venv/.lock /tmp/* ~/.cache

FROM dependencies AS builder
COPY constraints.txt /build/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca,target=/run/secrets/ca.crt \
    set -e; python -m ensurepip; \
    python -m pip install --no-cache-dir -c /build/constraints.txt setuptools

FROM builder AS code
COPY operator /build/operator
RUN set -e; python -m pip install --quiet --no-deps --no-compile --no-build-isolation --target /opt/rayloom/code /build/operator; \
    python -m compileall -q --invalidation-mode unchecked-hash /opt/rayloom/code

FROM dependencies AS operator
ENV HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
COPY --from=code /opt/rayloom/code /opt/rayloom/code
WORKDIR /tmp
USER 1000:1000
CMD ["rayloom-operator", "run"]
