# The agent side: a training image with hangwatch added. There is no agent container: the first rank of a container starts the node
# agent beside itself, where it may look into the ranks without any privilege. Build it from the root of the repository:
#   docker build -f deploy/training.Dockerfile --build-arg BASE=YOUR/IMAGE -t train .
ARG BASE=pytorch/pytorch:2.7.0-cuda12.8-cudnn9-runtime
FROM python:3.13-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY hangwatch hangwatch
COPY agent agent
COPY server server
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# hadolint ignore=DL3006
FROM ${BASE}
# Without extras: httpx and py-spy, no torch and no web server. Inert without HANGWATCH_URL.
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels pip install --no-cache-dir /wheels/*.whl
# With a name and a home of its own: torch.compile asks for both.
RUN useradd --uid 10001 --user-group --create-home --shell /usr/sbin/nologin train
USER 10001:10001
# Healthy: nobody asked for watching, or the server hears us. A hang (exit 4) is the job's state, not the container's: a runtime that
# restarts what is unhealthy would destroy the evidence.
# hadolint ignore=DL3025
HEALTHCHECK --interval=60s --timeout=15s --start-period=60s \
    CMD [ -z "$HANGWATCH_URL" ] || { hangwatch status >/dev/null; case $? in 0 | 4) ;; *) exit 1 ;; esac; }
