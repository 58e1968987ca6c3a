# asyncrl in a container: docs/cluster.md. CPU by default; for GPUs
#   docker build -t asyncrl:gpu --build-arg BASE=nvidia/cuda:12.8.1-base-ubuntu24.04 --build-arg TORCH_INDEX=https://pypi.org/simple .
ARG BASE=python:3.11.13-slim-bookworm
FROM ${BASE}
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

# g++ for --imagination.compile, the others to draw simulators without a screen; Python where the image has none.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends ca-certificates g++ libegl1 libosmesa6 \
    && { command -v python3 || apt-get install --yes --no-install-recommends python3-dev python3-venv; } \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv \
    && install -d -o 1000 -g 1000 /home/asyncrl /runs
ENV PATH=/opt/venv/bin:$PATH HOME=/home/asyncrl USER=asyncrl PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1
WORKDIR /opt/asyncrl

COPY constraints.txt ./
RUN pip install -c constraints.txt --index-url "${TORCH_INDEX}" torch
COPY pyproject.toml README.md LICENSE ./
COPY asyncrl asyncrl
COPY configs configs
COPY torchrun_scripts torchrun_scripts
# Copied files keep their modes, and a checkout may be its owner's alone.
RUN chmod -R a+rX . && pip install -c constraints.txt -e '.[lerobot,video]'

USER 1000:1000
WORKDIR /home/asyncrl
ENTRYPOINT ["asyncrl"]
CMD ["--help"]
