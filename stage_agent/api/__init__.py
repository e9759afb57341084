"""HTTP API and metrics: reads snapshots, submits commands, nothing else."""

from config.absent import absent

# Nobody posts forms here; they bring temporary files and archives.
with absent("starlette.formparsers"):
    import starlette.requests as _requests  # noqa: F401 - first of all that imports it
