"""HTTP API and metrics: reads snapshots, submits commands, nothing else."""
