# The server. Build it from the root of the repository:
#   docker build -f deploy/server.Dockerfile -t hangwatch-server .
FROM python:3.13-slim AS build
WORKDIR /src
# Named one by one, so that nothing else of a checkout can end up in the image.
COPY pyproject.toml README.md LICENSE ./
COPY hangwatch hangwatch
COPY agent agent
COPY server server
# The server, and the driver for HANGWATCH_DATABASE=postgresql://...
RUN python -m venv /opt/hangwatch && /opt/hangwatch/bin/pip install --no-cache-dir '.[postgres]'

FROM python:3.13-slim
COPY --from=build /opt/hangwatch /opt/hangwatch
# A new named volume takes over this folder's owner; a folder of the host's must be given to 10001 by hand.
RUN install -d -m 0700 -o 10001 -g 10001 /data
ENV PATH=/opt/hangwatch/bin:$PATH HANGWATCH_HOST=0.0.0.0 HANGWATCH_DATA_DIR=/data
# By number: Kubernetes cannot tell from a name that it is not root's.
USER 10001:10001
VOLUME /data
EXPOSE 8642
# The process answers; whether it can do its work is /readyz. The image has no curl.
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8642/healthz', timeout=2)"]
# No shell in between: SIGTERM reaches the server, which then writes what it knows and ends within seconds.
ENTRYPOINT ["hangwatch-server"]
