# The server of a federation, and the relay of a site. From the root of the repository,
# with what .venv/bin/python scripts/release has built in dist/:
#   docker build -f deploy/docker/server.Dockerfile -t fcil-server:cpu .
#   docker build -f deploy/docker/server.Dockerfile -t fcil-server:cuda --build-arg TORCH=cuda .
ARG BASE=docker.io/library/python:3.11-slim-bookworm

# hadolint ignore=DL3006
FROM ${BASE} AS build
# cpu: PyTorch's own index of builds without CUDA. cuda: PyPI's, with CUDA 13 (several GB).
ARG TORCH=cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv /opt/fcil
ENV PATH=/opt/fcil/bin:$PATH
COPY constraints.txt ./
RUN case "$TORCH" in \
      cpu) pip install --constraint constraints.txt --no-deps --index-url "$TORCH_INDEX" torch torchvision ;; \
      cuda) pip install --constraint constraints.txt torch torchvision ;; \
      *) echo "TORCH is cpu or cuda, got $TORCH" >&2; exit 4 ;; \
    esac
# The complete wheel of scripts/release.
COPY dist/SHA256SUMS dist/*.whl dist/
RUN env --chdir=dist sha256sum --check --ignore-missing SHA256SUMS \
 && pip install --constraint constraints.txt "$(echo dist/*.whl)[server]"

# hadolint ignore=DL3006
FROM ${BASE}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="fcil server" \
      org.opencontainers.image.description="Federated class-incremental learning: server and relay" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
# Debian keeps one version of tini in a release.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends tini \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 10001 fcil \
 && useradd --uid 10001 --gid fcil --home-dir /nonexistent --no-create-home --shell /usr/sbin/nologin fcil \
 && install -d -o fcil -g fcil -m 0700 /var/lib/fcil /tickets
COPY --from=build /opt/fcil /opt/fcil
# The cache (a backbone from timm's hub, fonts) is next to the state.
ENV PATH=/opt/fcil/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    XDG_STATE_HOME=/var/lib/fcil/state \
    XDG_CACHE_HOME=/var/lib/fcil/cache \
    MPLCONFIGDIR=/var/lib/fcil/cache/matplotlib
USER 10001:10001
# The federation's directory is ./federation, as everywhere: `docker exec NAME fcil-server status`.
WORKDIR /var/lib/fcil
VOLUME ["/var/lib/fcil"]
EXPOSE 7710
STOPSIGNAL SIGTERM
# Of a relay: --health-cmd 'fcil-server status --alive --dir relay'.
HEALTHCHECK --interval=1m --timeout=20s --start-period=15m \
  CMD ["fcil-server", "status", "--alive"]
# tini is process 1: it hands SIGTERM on and buries what workers leave behind.
ENTRYPOINT ["/usr/bin/tini", "--", "fcil-server"]
CMD ["serve", "-c", "federation.listen=0.0.0.0:7710"]
