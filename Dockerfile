# The daemon and its command line, without torch and without a GPU's libraries. Build: docker build -t terracekv:0.1.0 .
FROM python:3.11-slim AS build
WORKDIR /src
RUN python -m venv /opt/terracekv
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY connector ./connector
COPY daemon ./daemon
COPY kernels ./kernels
COPY tiers ./tiers
RUN /opt/terracekv/bin/pip install --no-cache-dir --constraint constraints.txt ".[s3,encryption]"

FROM python:3.11-slim
# Engines open the sockets and the arena as this user: give their containers the same number.
RUN useradd --uid 1000 --user-group --home-dir /var/lib/terracekv --no-create-home terracekv \
    && install --directory --mode 0700 --owner 1000 --group 1000 /cache /var/lib/terracekv
COPY --from=build /opt/terracekv /opt/terracekv
ENV PATH=/opt/terracekv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    TERRACEKV_DAEMON_RUNTIME_DIR=/cache/terracekv \
    TERRACEKV_DAEMON_STATE_DIR=/var/lib/terracekv
USER 1000:1000
EXPOSE 7411
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 CMD ["terracekv", "health"]
ENTRYPOINT ["terracekv"]
CMD ["serve"]
