# One image for learner and rollout nodes; the manifests of `slipstream launch --kubernetes` start either in it.
#
#   docker build -t slipstream .                                                                  CPU
#   docker build --build-arg BASE=IMAGE --build-arg EXTRAS=sglang -t slipstream:gpu .             GPUs
#
# BASE has bash, Debian's or Ubuntu's apt and, best, torch: scripts/install.sh keeps one that is there. Package indexes
# are pip's own configuration: give its variables as build arguments, or mount /etc/pip.conf.
ARG BASE=debian:bookworm-slim
FROM ${BASE}

ARG EXTRAS=none
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1

RUN if ! python3 -c 'import ensurepip, venv' 2>/dev/null; then \
      apt-get update && apt-get install -y --no-install-recommends python3-venv && rm -rf /var/lib/apt/lists/*; fi

# The programs and, editable, their source: presets and examples are where a clone has them.
COPY . /opt/slipstream
RUN PIP_CONSTRAINT=/opt/slipstream/scripts/constraints.txt \
    bash /opt/slipstream/scripts/install.sh --venv /opt/venv "${EXTRAS}"
ENV PATH=/opt/venv/bin:${PATH} SLIPSTREAM_PYTHON=/opt/venv/bin/python

# No entrypoint: process 1 is what the pod names, and gets its SIGTERM.
WORKDIR /work
CMD ["slipstream", "--help"]
