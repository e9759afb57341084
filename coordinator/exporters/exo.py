"""exo: the pipeline shards of a manual instance. exo's node ids and model card are its own, so a template is completed."""

import json
from urllib.parse import urlencode

from coordinator.exporters.export import Export, ExportRequest, HostPart
from coordinator.exporters.shell_words import command_line

SHARDS_FILE = "exo-shards.json"


def export_exo(request: ExportRequest) -> Export:
    """One file and the three steps that use it, on stage 0's host; the other hosts only run exo."""
    count, layers = len(request.stages), request.plan.layer_count
    shards = [
        {
            "host": request.host(stage).name,
            "device_rank": stage.stage_index,
            "world_size": count,
            "start_layer": stage.layer_start,
            "end_layer": stage.layer_end,
            "n_layers": layers,
        }
        for stage in request.stages
    ]
    api = f"http://localhost:{request.port}"
    parts = [HostPart(request.host(stage), stage.stage_index, ("uv run exo",)) for stage in request.stages[1:]]
    template = f"{api}/instance/previews?{urlencode({'model_id': request.model})}"
    post = (
        "curl",
        "-s",
        "-X",
        "POST",
        f"{api}/instance",
        "-H",
        "Content-Type: application/json",
        "-d",
        "@instance.json",
    )
    head = (
        "uv run exo &",
        command_line(("curl", "-s", "-o", "previews.json", template)),
        f"# of a pipeline preview with {count} nodes give each runner its host's shard of {SHARDS_FILE} (its model_card stays),",
        '# and write {"instance": <the preview\'s instance>} to instance.json',
        command_line(post),
    )
    files = {SHARDS_FILE: json.dumps(shards, indent=2) + "\n"}
    parts.append(HostPart(request.host(request.stages[0]), 0, head, files))
    cannot = (
        "node ids: exo makes its own at every start, so its preview has to be completed by hand",
        f"context ({request.plan.context_length}) and lanes ({request.plan.parallel_lanes}): not part of an instance",
        "models without an exo model card",
        "the package called exo on PyPI is another program: install exo from its source",
    )
    return Export("exo", tuple(parts), cannot)
