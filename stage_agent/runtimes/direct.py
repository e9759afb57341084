"""The ``direct`` mode: engines of two nodes that talk past the tunnel, over a network that both operators trust."""

from collections.abc import Iterable

from config.settings import RuntimeSettings

DIRECT_ENGINE = "direct_engine"
"""In a node's row, and as the kind of the event at its start."""


def is_direct(settings: RuntimeSettings) -> bool:
    """Whether this node's engine listens on the network when it serves another node's head."""
    return settings.kind == "llama_cpp" and bool(settings.llama_direct_host)


def direct_warning(settings: RuntimeSettings) -> str:
    """For the operator, at every start."""
    return (
        f"runtime.llama_direct_host is {settings.llama_direct_host}: the engine's RPC port is open to everybody on that "
        "network, without encryption or authentication; whoever reaches it can read prompts and run code here"
    )


def plan_warning(nodes: Iterable[tuple[str, tuple[str, ...]]]) -> str:
    """For whoever looks at a plan: ``nodes`` are its stages' names and what their rows call degraded. Empty = nothing."""
    direct = [name for name, degraded in nodes if DIRECT_ENGINE in degraded]
    if not direct:
        return ""
    return (
        f"direct mode on {', '.join(direct)}: engine traffic between such nodes is neither encrypted nor authenticated"
    )
