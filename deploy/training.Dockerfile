# The agent side: a training image with hangwatch added. There is no agent container: the first rank of a container starts the node
# agent in the same container, where it may read the ranks' stacks without any privilege. Build it from the root of the repository:
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
# A user with a name and a home folder: torch.compile needs both.
RUN useradd --uid 10001 --user-group --create-home --shell /usr/sbin/nologin train
USER 10001:10001
# Healthy if the job is not watched, or a server can be reached, which takes no token. A hang is the job's state, not the container's: a
# runtime that restarts unhealthy containers would destroy the evidence.
HEALTHCHECK --interval=60s --timeout=15s --start-period=60s \
    CMD ["python", "-Ic", "import os; from hangwatch.agent.cli.client import parse_address; from hangwatch.agent.transport.client import SignedClient; env = os.environ; exit(bool(env.get('HANGWATCH_URL')) and SignedClient(parse_address(None, None, env), 5.0).send_request('GET', '/healthz').status != 200)"]
