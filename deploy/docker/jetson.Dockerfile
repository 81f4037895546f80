# A client on an NVIDIA Jetson (aarch64). What runs on which JetPack: deploy/README.md, "Jetson".
# From the root of the repository, on the device or with --platform linux/arm64,
# with what .venv/bin/python scripts/release has built in dist/:
#   docker build -f deploy/docker/jetson.Dockerfile -t fcil-client:jetson .
#       onnxruntime on the processor: every JetPack, since the image brings its own Python 3.12
#   ... --build-arg ENGINE=torch
#       PyPI's torch for CUDA 13 (SBSA): JetPack 7 on Thor, not on Orin
#   ... --build-arg ENGINE=torch --build-arg INDEX=URL
#       torch from an index that has it for this JetPack, CUDA and Python 3.12
#   ... --build-arg ENGINE=onnx-gpu --build-arg INDEX=URL
#       onnxruntime-gpu likewise: PyPI has none for aarch64
# A GPU needs `docker run --runtime nvidia --group-add video`.
ARG BASE=docker.io/library/ubuntu:24.04

# hadolint ignore=DL3006
FROM ${BASE} AS build
ARG ENGINE=onnx-cpu
ARG INDEX=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# hadolint ignore=DL3008
RUN test "$(uname -m)" = aarch64 \
 && apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv /opt/fcil
ENV PATH=/opt/fcil/bin:$PATH
WORKDIR /src
COPY constraints.txt ./
# What comes from another index has the versions of that index.
RUN if [ -n "$INDEX" ]; then \
      sed -i -E '/^(torch|torchvision|onnxruntime)==/d' constraints.txt; \
      set -- --index-url "$INDEX" --extra-index-url https://pypi.org/simple; \
    fi; \
    case "$ENGINE" in \
      onnx-cpu) pip install --constraint constraints.txt onnxruntime ;; \
      onnx-gpu) pip install --constraint constraints.txt "$@" onnxruntime-gpu ;; \
      torch) pip install --constraint constraints.txt "$@" torch torchvision ;; \
      *) echo "ENGINE is onnx-cpu, onnx-gpu or torch, got $ENGINE" >&2; exit 4 ;; \
    esac
# The wheel for devices of scripts/release: neither server nor dashboard nor laboratory.
COPY dist/SHA256SUMS dist/
COPY dist/client/*.whl dist/client/
RUN case "$ENGINE" in torch) extra=client ;; onnx-gpu) extra=edge-gpu ;; *) extra=edge ;; esac \
 && env --chdir=dist sha256sum --check --ignore-missing SHA256SUMS \
 && pip install --constraint constraints.txt "$(echo dist/client/*.whl)[$extra]"

# hadolint ignore=DL3006
FROM ${BASE}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="fcil client for Jetson" \
      org.opencontainers.image.description="Federated class-incremental learning: client" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
# Ubuntu keeps one version of these in a release.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates python3 tini \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 10001 fcil \
 && useradd --uid 10001 --gid fcil --home-dir /nonexistent --no-create-home --shell /usr/sbin/nologin fcil \
 && install -d -o fcil -g fcil -m 0700 /var/lib/fcil /tickets
COPY --from=build /opt/fcil /opt/fcil
# The cache (a backbone from timm's hub) is next to the state.
# onnxruntime would write down a device id and report to its maker.
ENV PATH=/opt/fcil/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    ORT_DISABLE_TELEMETRY=1 \
    XDG_STATE_HOME=/var/lib/fcil/state \
    XDG_CACHE_HOME=/var/lib/fcil/cache \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /var/lib/fcil
VOLUME ["/var/lib/fcil"]
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=2m --timeout=20s --start-period=5m \
  CMD ["fcil-client", "status", "--alive"]
# tini is process 1: it hands SIGTERM on and buries what workers leave behind.
ENTRYPOINT ["/usr/bin/tini", "--", "fcil-client"]
CMD ["join", "--data", "/images"]
