# One image for router, prefill and decode: `docker build -t pdserve .`
#   --build-arg PYTHON_IMAGE=...   another base image with Python 3.11 to 3.13
#   --build-arg EXTRAS=            without NIXL; KV blocks then move over TCP
#   --build-arg TORCH_INDEX=URL    where torch comes from, say the index of processor builds: a smaller image
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG EXTRAS=nixl
ARG TORCH_INDEX=
ENV PYTHONSAFEPATH=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python -m venv /opt/pdserve
ENV PATH=/opt/pdserve/bin:$PATH
WORKDIR /src
# What pdserve depends on changes seldom: a layer of its own.
COPY pyproject.toml constraints.txt ./
COPY deploy/dependencies.py deploy/
RUN python deploy/dependencies.py ${EXTRAS} > /tmp/dependencies.txt \
 && pip install -c constraints.txt ${TORCH_INDEX:+--extra-index-url ${TORCH_INDEX}} -r /tmp/dependencies.txt hatchling
# xgrammar asks for triton, which only a GPU uses: 1 GB less for a torch without CUDA.
RUN if python -c 'import torch; raise SystemExit(torch.version.cuda is not None)'; then pip uninstall --yes triton; fi
COPY . .
RUN pip install --no-deps --no-build-isolation . && pip uninstall --yes hatchling

FROM ${PYTHON_IMAGE}
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin pdserve
COPY --from=build /opt/pdserve /opt/pdserve
ENV PATH=/opt/pdserve/bin:$PATH PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
USER 10001
ENTRYPOINT ["pdserve"]
CMD ["--help"]
