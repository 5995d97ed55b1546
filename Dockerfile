# Two targets, with the recipes, studies and examples in the working directory:
#   docker build --target cpu --tag regretless:cpu .      the environment of `make quickstart`
#   docker build --target cuda --tag regretless:cuda .    vLLM, Ray and S3 on NVIDIA GPUs

FROM python:3.11-slim AS cpu
RUN apt-get update \
    && apt-get install --yes --no-install-recommends make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/regretless
COPY Makefile pyproject.toml README.md LICENSE ./
COPY constraints constraints
COPY src src
# The Makefile's own rule, and so the versions of constraints/cpu.txt.
RUN PIP_NO_CACHE_DIR=1 make /opt/venv/.runtime VENV=/opt/venv PYTHON=python3
ENV PATH=/opt/venv/bin:$PATH
COPY recipes recipes
COPY studies studies
COPY examples examples
CMD ["regretless", "--help"]

# vLLM's own image has torch, CUDA and the compilers that its kernels need, in versions that fit each other. Its release
# is the one that the extra `vllm` asks for.
FROM vllm/vllm-openai:v0.32.0 AS cuda
WORKDIR /opt/regretless
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN python3 -m pip install --no-cache-dir --editable ".[vllm,cluster,s3]"
COPY recipes recipes
COPY studies studies
COPY examples examples
# The image's own entry point is a server.
ENTRYPOINT []
CMD ["regretless", "--help"]
