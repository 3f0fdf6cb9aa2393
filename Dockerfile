# One image for every service, and for the NATS server that comes with the package.
#   BASE_IMAGE   any image with Python 3.11 or newer and its venv
#   TORCH_INDEX  a wheel index with CPU builds of torch; without it, put a wheel into compose/wheels,
#                or pip takes a CUDA build of several GB
ARG BASE_IMAGE=python:3.11-slim

# What the project needs comes before the project, and is known by its own text alone: neither a change of code nor of a
# linter's settings installs torch again.
FROM ${BASE_IMAGE} AS requirements
WORKDIR /src
COPY compose/requirements.py pyproject.toml ./
RUN mkdir /wanted \
 && python3 requirements.py --only torch > /wanted/torch.txt \
 && python3 requirements.py --build > /wanted/all.txt

FROM ${BASE_IMAGE} AS build
ARG TORCH_INDEX=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python3 -m venv /opt/venv
WORKDIR /src
COPY compose/wheels /wheels
COPY --from=requirements /wanted /wanted
RUN /opt/venv/bin/pip install --find-links /wheels ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} -r /wanted/torch.txt
RUN /opt/venv/bin/pip install --find-links /wheels -r /wanted/all.txt

FROM build AS package
COPY LICENSE README.md pyproject.toml ./
COPY contracts contracts
COPY common common
COPY services services
COPY loadtest loadtest
RUN /opt/venv/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /package .

FROM ${BASE_IMAGE}
# Fixed ids: workers of one host meet over a shared folder, and answer only processes of their own user.
RUN groupadd --gid 10001 pdmesh \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin pdmesh \
 && install -d -o pdmesh -g pdmesh -m 0700 /run/pdmesh /var/lib/nats
COPY --from=build /opt/venv /opt/venv
COPY --from=package /package /package
RUN /opt/venv/bin/pip install --no-deps --no-index --no-cache-dir --root-user-action=ignore /package/*.whl
COPY compose/nats.conf compose/probe.py /etc/pdmesh/
COPY models/tiny /models/tiny
# PYTHONSAFEPATH: nothing in the working directory may shadow a package. One torch thread a rank, which does not spin.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
WORKDIR /tmp
USER 10001:10001
CMD ["pdmesh", "--help"]
