# One image for router, prefill and decode: `docker build -t pdserve .`
#   --build-arg PYTHON_IMAGE=...   another base image with Python 3.11 to 3.13
#   --build-arg EXTRAS=            without NIXL; KV blocks then move over TCP
#   --build-arg TORCH_INDEX=URL    the only index that is asked for torch, and for torch only: that of processor builds,
#                                  https://download.pytorch.org/whl/cpu, makes a smaller image
# Everything is installed from locks/, whose hashes pip demands (deploy/install.py).
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG EXTRAS=nixl
ARG TORCH_INDEX=
ENV PYTHONSAFEPATH=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python -m venv /opt/pdserve
ENV PATH=/opt/pdserve/bin:$PATH
WORKDIR /src
# What pdserve depends on changes seldom: a layer of its own.
COPY locks locks
COPY deploy/install.py deploy/
RUN python deploy/install.py --dependencies-only ${TORCH_INDEX:+--torch-index ${TORCH_INDEX}} ${EXTRAS}
COPY . .
RUN python deploy/install.py --project-only

FROM ${PYTHON_IMAGE}
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin pdserve
COPY --from=build /opt/pdserve /opt/pdserve
ENV PATH=/opt/pdserve/bin:$PATH PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
# mount points of docker-compose.yml: a new volume takes their owner and mode
RUN install -d -o 10001 -m 0700 /tls /tls/authority /tls/router /tls/prefill /tls/decode
USER 10001
ENTRYPOINT ["pdserve"]
CMD ["--help"]
