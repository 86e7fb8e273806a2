# One image for router, prefill and decode: `docker build -t pdserve .`; for workers with a GPU: `docker build --target gpu -t pdserve:gpu .`
#   --build-arg PYTHON_IMAGE=...   another base image with Python 3.11 to 3.13
#   --build-arg EXTRAS=            without NIXL; KV blocks then move over TCP. `triton` adds what torch's CUDA build brings by itself,
#                                  `mooncake` a store of KV blocks that workers share
#   --build-arg TORCH_INDEX=URL    the only index that is asked for torch, and for torch only: that of CPU builds,
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
# compiles decode attention for CPUs; without it the wheel is pure Python, and slower there
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
# What pdserve depends on changes seldom: a layer of its own.
COPY locks locks
COPY deploy/install.py deploy/
RUN python deploy/install.py --dependencies-only ${TORCH_INDEX:+--torch-index ${TORCH_INDEX}} ${EXTRAS}
COPY . .
RUN python deploy/install.py --project-only

FROM ${PYTHON_IMAGE} AS processor
ARG EXTRAS=nixl
RUN case " ${EXTRAS} " in *" mooncake "*) apt-get update \
  && apt-get install --yes --no-install-recommends libibverbs1 librdmacm1 && rm -rf /var/lib/apt/lists/* ;; esac
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin pdserve
COPY --from=build /opt/pdserve /opt/pdserve
ENV PATH=/opt/pdserve/bin:$PATH PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
# mount points of docker-compose.yml: a new volume takes their owner and mode
RUN install -d -o 10001 -m 0700 /tls /tls/authority /tls/router /tls/prefill /tls/decode
USER 10001
ENTRYPOINT ["pdserve"]
CMD ["--help"]

# Triton compiles kernels at their first use: to machine code by itself, and a launcher in C with this compiler. What it compiled is
# loaded from TRITON_CACHE_DIR, which must allow execution: Docker's temporary file systems do not. On a volume it outlasts the container.
FROM processor AS gpu
USER 0
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev \
  && if ! test -f "$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h"; then \
    apt-get install --yes --no-install-recommends python3-dev; fi \
  && rm -rf /var/lib/apt/lists/*
RUN install -d -o 10001 -m 0700 /var/cache/pdserve
ENV CC=gcc TRITON_CACHE_DIR=/var/cache/pdserve/triton
USER 10001

# what `docker build` makes without --target
FROM processor
