# The server. Build it from the root of the repository:
#   docker build -f deploy/server.Dockerfile -t hangwatch-server .
FROM python:3.13-slim AS build
WORKDIR /src
# Listed one by one, so that no other file of a checkout gets into the image.
COPY pyproject.toml README.md LICENSE ./
COPY hangwatch hangwatch
COPY agent agent
COPY server server
# The server, the driver for HANGWATCH_DATABASE=postgresql://..., and /mcp for coding agents.
RUN python -m venv /opt/hangwatch && /opt/hangwatch/bin/pip install --no-cache-dir '.[postgres,mcp]'

FROM python:3.13-slim
COPY --from=build /opt/hangwatch /opt/hangwatch
# A new named volume inherits this folder's owner; a host folder must be owned by 10001 (chown).
RUN install -d -m 0700 -o 10001 -g 10001 /data
ENV PATH=/opt/hangwatch/bin:$PATH HANGWATCH_HOST=0.0.0.0 HANGWATCH_DATA_DIR=/data
# As a number: from a name, Kubernetes cannot verify that the user is not root.
USER 10001:10001
VOLUME /data
EXPOSE 8642
# Checks that the process responds; /readyz checks that it can work. The image has no curl.
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8642/healthz', timeout=2)"]
# Without a shell, so that SIGTERM reaches the server, which then writes its state and exits within seconds.
ENTRYPOINT ["hangwatch-server"]
