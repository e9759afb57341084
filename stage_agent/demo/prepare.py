"""The demo's model: the user's own file, or a small real GGUF made once in the cache directory."""

from pathlib import Path

from config.load import cache_dir, load_settings
from coordinator.model.package import ModelPackage
from stage_agent.demo_model import write_demo_model
from stage_agent.model_source import open_model

FILE_NAME = "demo-llama-28x.gguf"


def prepared_model(path: Path | None) -> tuple[Path, ModelPackage]:
    """The file and what the planner needs to know of it. Raises ``ModelError`` for a file that is not a model."""
    if path is None:
        path = cache_dir(load_settings(None)) / "demo" / FILE_NAME
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_demo_model(path)
    return path, open_model(path)
