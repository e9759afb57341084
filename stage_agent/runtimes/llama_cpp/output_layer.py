"""Where the head puts the output layer of the model that it is about to load. Reads the file's header only."""

from pathlib import Path

import psutil

from coordinator.model.gguf_package import read_gguf_model
from coordinator.planner.readout import ReadoutSpeeds, head_reads_out_cheaper, last_holds_copy
from protocol.ballots import StageShare
from stage_agent.model_files import FileSource, GgufFiles, locate
from stage_agent.model_source import open_model

OUTPUT = "output.weight"
LOGIT_BYTES = 4
SPARE = 2
"""An output layer is only moved into a main memory that has so many times its bytes free."""


def output_on_head(model: Path, last: StageShare, speeds: ReadoutSpeeds, *, setting: str) -> str:
    """``tied``, ``untied``, or empty: leave it on the last stage. Raises ``ModelError``.

    Tied to the embedding it is on the head anyway: no memory, and no vocabulary of logits on the last link. It stays there
    unless the plan has charged ``last`` for a copy, whatever this node's own ``setting`` (``llama_output_layer``) is. A matrix
    of its own moves when the setting is ``head``, or, with ``auto``, when a token then costs less and there is plenty of memory.
    """
    package = open_model(model)
    if package.tied_embeddings:
        return "" if last_holds_copy(package, last.layer_start, last.parameter_bytes) else "tied"
    if setting != "auto":
        return "untied" if setting == "head" else ""
    found = _output_layer(model)
    if found is None:
        return ""
    size, vocabulary = found
    cheaper = head_reads_out_cheaper(size, LOGIT_BYTES * vocabulary, speeds)
    return "untied" if cheaper and psutil.virtual_memory().available >= SPARE * size else ""


def _output_layer(model: Path) -> tuple[int, int] | None:
    """Bytes of the output matrix and its rows, one per word of the vocabulary."""
    files = locate(model)
    if not isinstance(files, GgufFiles):
        return None
    read, _ = read_gguf_model([(str(shard), FileSource(shard)) for shard in files.shards])
    for tensor in read.tensors:
        if tensor.entry.name == OUTPUT:
            return tensor.entry.nbytes, tensor.entry.shape[-1]
    return None
