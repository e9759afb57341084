# Two stages: a virtual environment is built, then copied into an image without build tools. Runs as uid 10001 on a
# read-only root: only /var/lib/stagemesh (identity and promises) and /var/cache/stagemesh are written.
ARG PYTHON_IMAGE=docker.io/library/python:3.13-slim

FROM ${PYTHON_IMAGE} AS build
ENV PYTHONSAFEPATH=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python3 -m venv /opt/stagemesh
COPY pyproject.toml README.md ./
COPY config config
COPY protocol protocol
COPY coordinator coordinator
COPY stage_agent stage_agent
RUN /opt/stagemesh/bin/pip install .
COPY deploy/check_import_names.py /tmp/check_import_names.py
RUN cd / && /opt/stagemesh/bin/python /tmp/check_import_names.py \
    && /opt/stagemesh/bin/python -m compileall -q /opt/stagemesh/lib

FROM ${PYTHON_IMAGE}
# A new named volume takes owner and mode of the directory that it covers, so /invitations exists here too.
RUN groupadd --gid 10001 stagemesh \
    && useradd --no-create-home --uid 10001 --gid 10001 --home-dir /var/lib/stagemesh --shell /usr/sbin/nologin stagemesh \
    && install -d -o 10001 -g 10001 -m 0700 /var/lib/stagemesh /var/cache/stagemesh /invitations
COPY --from=build /opt/stagemesh /opt/stagemesh
COPY --chmod=0755 deploy/container/entrypoint.sh /usr/local/bin/stagemesh-entrypoint
ENV PATH=/opt/stagemesh/bin:$PATH \
    PYTHONSAFEPATH=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/var/lib/stagemesh \
    STATE_DIRECTORY=/var/lib/stagemesh \
    CACHE_DIRECTORY=/var/cache/stagemesh
USER 10001:10001
WORKDIR /
VOLUME ["/var/lib/stagemesh", "/var/cache/stagemesh"]
EXPOSE 7946/udp 7946/tcp 7947/tcp
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ.get('STAGEMESH_API__PORT', '7947') + '/healthz', timeout=2)"]
ENTRYPOINT ["stagemesh-entrypoint"]
CMD ["run"]
