"""Every knob once: unit in the name, default, bound, one line of why.

Sections are frozen pydantic models; a core is given its own section and nothing else. Where a number comes from
measurement, DECISIONS.md or the protocol document says so. Environment: ``STAGEMESH_<SECTION>__<KEY>``.
"""

import ipaddress
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from config.cache_types import DEFAULT_CACHE_TYPE, CacheType

LARGEST_NUMBER = 2**53
"""Above this a number is a typing mistake, and would not survive JSON."""


class Section(BaseModel):
    """Frozen; an unknown key is an error that names it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="after")
    @classmethod
    def _no_absurd_number(cls, value: Any) -> Any:
        """Holds also for the knobs without an upper bound of their own."""
        if isinstance(value, int) and value > LARGEST_NUMBER:
            raise ValueError(f"it must be at most {LARGEST_NUMBER}")
        return value


class NodeSettings(Section):
    """This machine."""

    name: str = Field(default="", max_length=64, description="shown to people; empty = the host name")
    state_dir: str = Field(default="", description="identity and promises; empty = /var/lib/stagemesh or XDG state")
    cache_dir: str = Field(default="", description="what may be deleted; empty = XDG cache")
    memory_cap_bytes: int | None = Field(default=None, ge=0, le=2**53, description="never plan more than this")
    runtime_headroom_bytes: int | None = Field(default=None, ge=0, le=2**53, description="unset = 10 % of detected")
    layers_on: Literal["auto", "cpu", "accelerators"] = Field(
        default="auto",
        description="whose memory holds layers; auto = graphics cards when the engine uses them, else main memory",
    )
    can_coordinate: bool = True
    can_host_stage: bool = True


class ListenSettings(Section):
    """One port number: UDP for the control plane (QUIC), TCP for bulk (TLS 1.3)."""

    host: str = "0.0.0.0"  # noqa: S104 - peers are on other machines; nothing is served before mutual authentication
    port: int = Field(default=7946, ge=0, le=65535)
    advertise: tuple[str, ...] = Field(default=(), max_length=16, description="host:port that peers should dial")


class MembershipSettings(Section):
    """Failure detector and gossip (PROTOCOL §3)."""

    probe_interval_us: int = Field(default=1_000_000, ge=10_000)
    probe_timeout_us: int = Field(default=500_000, ge=10_000)
    probe_timeout_max_us: int = Field(default=2_000_000, ge=10_000)
    probe_everyone_up_to: int = Field(default=4, ge=1)
    probes_per_second_max: int = Field(default=2, ge=1, description="of one node, up to 64 nodes")
    max_connections: int = Field(default=64, ge=1)
    indirect_probes: int = Field(default=3, ge=0)
    suspicion_us: int = Field(default=4_000_000, ge=100_000)
    suspicion_small_mesh_us: int = Field(default=4_800_000, ge=100_000)
    suspicion_max_factor: int = Field(default=6, ge=1)
    local_health_max: int = Field(default=7, ge=0)
    piggyback_items: int = Field(default=8, ge=1)
    push_interval_us: int = Field(default=200_000, ge=10_000)
    push_fanout: int = Field(default=3, ge=0)
    anti_entropy_interval_us: int = Field(default=10_000_000, ge=100_000)
    row_refresh_us: int = Field(default=60_000_000, ge=1_000_000)
    tombstone_dead_us: int = Field(default=24 * 3_600_000_000, ge=1_000_000)
    tombstone_left_us: int = Field(default=3_600_000_000, ge=1_000_000)
    max_members: int = Field(default=4_096, ge=2)
    rejoin_first_max_us: int = Field(default=5_000_000, ge=0)
    rejoin_min_us: int = Field(default=1_000_000, ge=10_000)
    rejoin_max_us: int = Field(default=60_000_000, ge=10_000)


class LinkSettings(Section):
    """When a measured link is trusted (DESIGN §7)."""

    settle_samples: int = Field(default=2, ge=1)
    settle_span_us: int = Field(default=5_000_000, ge=0)
    settle_max_age_us: int = Field(default=30_000_000, ge=1)
    bandwidth_min_frame_bytes: int = Field(default=524_288, ge=1)
    bandwidth_min_duration_us: int = Field(default=100_000, ge=1)
    bandwidth_expiry_us: int = Field(default=1_800_000_000, ge=1)
    degraded_factor: int = Field(
        default=5, ge=2, description="present minimum over best ever that raises link_degraded"
    )
    active_probe_bytes_per_hour: int = Field(
        default=0,
        ge=0,
        le=1_099_511_627_776,
        description="bytes this node may send and receive in an hour only to measure idle links; 0 = never",
    )
    active_probe_spacing_us: int = Field(
        default=10_000_000, ge=1_000, description="mean pause between two such probes, and after other traffic"
    )


class QuicSettings(Section):
    """Transport limits (TRANSPORT §1)."""

    connect_timeout_us: int = Field(default=3_000_000, ge=10_000)
    idle_timeout_us: int = Field(default=45_000_000, ge=1_000_000)
    keepalive_us: int = Field(default=25_000_000, ge=100_000)
    outstanding_bytes_per_peer: int = Field(default=4_194_304, ge=65_536)
    handshakes_per_second: int = Field(default=50, ge=1)
    max_unadmitted_connections: int = Field(default=32, ge=1)
    messages_per_second_per_peer: int = Field(default=500, ge=1, description="twice as many at once; more are dropped")
    read_timeout_us: int = Field(default=10_000_000, ge=10_000, description="a frame begun must end within this")
    udp_retry_us: int = Field(
        default=60_000_000, ge=100_000, description="how often a TLS fallback looks for UDP again"
    )
    conditioner_file: str = Field(default="", description="TOML of shaped links, reread when it changes")


class DiscoverySettings(Section):
    """Finding peers on the local network by multicast DNS; it never lets anybody in."""

    lan: bool = Field(default=False, description="announce this node and dial admitted ones; needs the extra `lan`")
    interfaces: tuple[str, ...] = Field(
        default=(), max_length=16, description="IP addresses of the interfaces to use; empty = all"
    )

    @field_validator("interfaces")
    @classmethod
    def _addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for each in value:
            try:
                ipaddress.ip_address(each)
            except ValueError:
                raise ValueError(f"{each!r} is not an IP address of this machine, as in 192.168.1.10") from None
        return value


class ElectionSettings(Section):
    """Settle barrier and campaign back-off (PROTOCOL §3–4, DESIGN §10)."""

    minimum_nodes: int = Field(default=1, ge=1)
    settle_us: int = Field(default=8_000_000, ge=0)
    settle_max_us: int = Field(default=600_000_000, ge=0)
    flap_forgiven_us: int = Field(default=1_800_000_000, ge=1)
    pin_coordinator: str = ""
    sticky_us: int = Field(default=10_000_000, ge=0)
    keepalive_us: int = Field(default=5_000_000, ge=100_000)
    orphan_us: int = Field(default=600_000_000, ge=1_000_000)
    backoff_max_us: int = Field(default=60_000_000, ge=100_000)


class AssignmentSettings(Section):
    """Pushing a plan to agents (PROTOCOL §5)."""

    load_deadline_min_us: int = Field(default=60_000_000, ge=1_000_000)
    load_bytes_per_s_floor: int = Field(default=20_000_000, ge=1)
    reply_timeout_us: int = Field(default=3_000_000, ge=10_000)
    replan_spacing_us: int = Field(default=30_000_000, ge=0)
    loss_replan_delay_us: int = Field(default=2_000_000, ge=0)
    withdraw_grace_us: int = Field(default=75_000_000, ge=0)
    culprit_backoff_us: int = Field(default=60_000_000, ge=0, description="left out after a refusal; doubles each time")
    culprit_backoff_max_us: int = Field(default=600_000_000, ge=0)


class ReplanSettings(Section):
    """Keep or replace (DESIGN §10)."""

    min_improvement_milli: int = Field(default=100, ge=0)
    min_dwell_us: int = Field(default=300_000_000, ge=0)
    amortisation_window_us: int = Field(default=3_600_000_000, ge=0)
    rollback_loss_milli: int = Field(default=100, ge=0)


class PlannerSettings(Section):
    """Defaults of a planning request (DESIGN §4–6)."""

    objective: Literal["interactive", "throughput", "capacity"] = "interactive"
    policy: Literal["must_meet_target", "best_effort"] = "best_effort"
    target_decode_tpot_ms: float = Field(default=33.0, gt=0, le=1e9)
    concurrency: int = Field(default=1, ge=1, le=65_536)
    context_length: int | None = Field(default=None, ge=1)
    parallel_lanes: int | None = Field(default=None, ge=1)
    performance_aware: bool = True
    calibration: str = Field(
        default="",
        max_length=4_096,
        description="a shipped profile, or a file of `stagemesh calibrate --out`: ….toml; empty = the engine's own",
    )
    search_budget_ms: int = Field(default=250, ge=1, le=600_000)
    exclude_nodes: tuple[str, ...] = ()
    pin_stage0: str = ""


class ModelSettings(Section):
    """What this node asks the mesh to serve."""

    path: str = Field(default="", description="GGUF, layer package or safetensors directory; empty = nothing")
    slot: str = Field(default="default", max_length=64)
    cache_type: CacheType = Field(
        default=DEFAULT_CACHE_TYPE,
        description="element type of the attention cache of models read here: sizes the plan's memory, and llama_cpp keeps "
        "its cache in it (quantised: with flash attention); set it alike where coordinators read the model",
    )


class RuntimeSettings(Section):
    """The engine that runs a stage."""

    kind: Literal["mapped", "process", "reference", "llama_cpp"] = "mapped"
    resident_cap_bytes: int | None = Field(
        default=None, ge=0, le=2**53, description="mapped: touch no more than this; unset = everything assigned"
    )
    command: tuple[str, ...] = Field(
        default=(),
        max_length=256,
        description="process: argument list; {layer_start} {layer_end} {model} {port} {next} … are replaced",
    )
    environment: dict[str, str] = Field(default={}, max_length=64, description="process: added to the agent's own")
    port_first: int = Field(default=21_060, ge=1_024, le=65_535, description="process: {port} is the first free one")
    port_last: int = Field(default=21_159, ge=1_024, le=65_535, description="below Linux' ephemeral range (32768)")
    ready: Literal["port", "log", "http"] = Field(default="port", description="process: what proves that it serves")
    ready_log_pattern: str = Field(default="", max_length=512, description="regular expression for ready = log")
    ready_http_path: str = Field(default="/health", max_length=512, description="answers 200 when ready = http")
    stop_grace_us: int = Field(default=10_000_000, ge=0, le=600_000_000, description="from SIGTERM to SIGKILL")
    restart_limit: int = Field(default=5, ge=0, le=100, description="failed starts and crashes per window, then refuse")
    restart_window_us: int = Field(default=300_000_000, ge=1_000_000)
    token_timeout_us: int = Field(
        default=60_000_000, ge=100_000, description="reference: a token that takes longer is a lost stage"
    )
    llama_server: str = Field(
        default="llama-server", min_length=1, max_length=4_096, description="llama_cpp: the head's program"
    )
    llama_rpc_server: str = Field(
        default="ggml-rpc-server", min_length=1, max_length=4_096, description="llama_cpp: every stage's program"
    )
    llama_threads: int | None = Field(default=None, ge=1, le=1_024, description="llama_cpp: unset = the engine's own")
    llama_devices: str = Field(
        default="", max_length=256, description="llama_cpp: devices of the stage, like CUDA0 or CPU; empty = all"
    )
    llama_head_stage: Literal["rpc", "cpu"] = Field(
        default="rpc",
        description="llama_cpp: stage 0 in its own rpc-server (any device), or in llama-server on the CPU",
    )
    llama_output_layer: Literal["auto", "head", "last"] = Field(
        default="auto",
        description="llama_cpp: where logits are made; auto = on the head when a token then costs less; "
        "an embedding used for both: on the head, unless the coordinator's setting is last",
    )
    llama_direct_host: str = Field(
        default="",
        max_length=64,
        description="llama_cpp, trusted LAN only: this machine's LAN address; where both nodes set it, their engines "
        "talk past the tunnel, WITHOUT encryption or authentication, and loading shows no progress; empty = tunnel",
    )
    llama_cache: bool = Field(
        default=False, description="llama_cpp: keep received weights on disk, so that a stage need not be sent again"
    )
    llama_cache_bytes_max: int = Field(
        default=107_374_182_400,
        ge=0,
        le=2**53,
        description="llama_cpp: the longest unused are deleted before a load would exceed it",
    )
    llama_arguments: tuple[str, ...] = Field(
        default=(), max_length=64, description="llama_cpp: more arguments for llama-server"
    )

    @field_validator("llama_arguments")
    @classmethod
    def _cache_as_planned(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for each in value:
            if each.partition("=")[0] in {"-ctk", "-ctv", "--cache-type-k", "--cache-type-v"}:
                raise ValueError(f"{each}: set model.cache_type instead, by which the plan counts memory")
        return value

    @field_validator("llama_direct_host")
    @classmethod
    def _private(cls, value: str) -> str:
        try:
            known = not value or ipaddress.ip_address(value)
        except ValueError:
            raise ValueError(f"{value!r} is not an IP address of this machine, as in 192.168.1.10") from None
        if value and (not isinstance(known, bool)) and (known.is_unspecified or not known.is_private):
            raise ValueError(
                f"{value} would offer the engine's unprotected port to strangers: use a private LAN address"
            )
        return value


class ArtifactSettings(Section):
    """Model files between peers, and the store under the cache directory that keeps what was fetched."""

    mode: Literal["off", "trusted", "open"] = Field(
        default="off",
        description="off: no transfers; trusted: serve a peer what its assignment names; open: serve every admitted peer",
    )
    bandwidth_limit_bytes_per_s: int | None = Field(
        default=None, ge=65_536, le=2**53, description="of all transfers together, each direction; unset = none"
    )
    store_bytes_max: int = Field(
        default=107_374_182_400, ge=0, le=2**53, description="above it the least recently used is deleted"
    )
    free_bytes_min: int = Field(default=1_073_741_824, ge=0, le=2**53, description="always left free on the disk")
    uploads_max: int = Field(default=8, ge=1, le=256, description="served at the same time; more are told to wait")
    downloads_max: int = Field(default=2, ge=1, le=16, description="fetched at the same time by one load")
    reply_timeout_us: int = Field(default=10_000_000, ge=10_000, le=600_000_000)
    stall_timeout_us: int = Field(
        default=30_000_000, ge=10_000, le=600_000_000, description="512 KiB must come within this, or the peer is left"
    )
    give_up_us: int = Field(
        default=60_000_000, ge=0, le=3_600_000_000, description="no peer gave a byte for this long: the load fails"
    )
    partial_max_age_us: int = Field(
        default=604_800_000_000, ge=0, description="an unfinished file untouched for longer is deleted at start"
    )


class ProbeSettings(Section):
    """Measuring this machine (DESIGN §7)."""

    benchmark: bool = Field(default=True, description="measure memory bandwidth and compute at start")
    budget_us: int = Field(default=1_500_000, ge=100_000, le=600_000_000, description="longest wait at start")
    max_age_us: int = Field(
        default=86_400_000_000, ge=0, description="a cached result older than this is measured again"
    )
    busy_load_milli: int = Field(
        default=500, ge=0, le=1_000_000, description="share of the cores others may use during a run; above: retried"
    )
    engine_bench: str = Field(
        default="llama-bench", min_length=1, max_length=4_096, description="the engine's own benchmark program"
    )
    engine_bench_model: str = Field(
        default="", max_length=4_096, description="a small GGUF; set = `bench` also asks the engine, whose figures win"
    )


class ShapeSettings(Section):
    """Pretended hardware, for demos and what-if runs; every shaped value is marked as such everywhere it is shown."""

    memory_bytes: int | None = Field(default=None, ge=1, le=2**53)
    memory_bandwidth_bytes_per_s: int | None = Field(default=None, ge=1, le=2**53)
    compute_flops_per_s: int | None = Field(default=None, ge=1, le=2**53)


class ApiSettings(Section):
    """HTTP for people, Prometheus and the command line."""

    host: str = "127.0.0.1"
    port: int = Field(default=7947, ge=0, le=65535)
    token_file: str = ""


class LogSettings(Section):
    """structlog."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"


class Settings(Section):
    """The whole configuration."""

    node: NodeSettings = NodeSettings()
    listen: ListenSettings = ListenSettings()
    membership: MembershipSettings = MembershipSettings()
    links: LinkSettings = LinkSettings()
    quic: QuicSettings = QuicSettings()
    discovery: DiscoverySettings = DiscoverySettings()
    election: ElectionSettings = ElectionSettings()
    assignment: AssignmentSettings = AssignmentSettings()
    replan: ReplanSettings = ReplanSettings()
    planner: PlannerSettings = PlannerSettings()
    model: ModelSettings = ModelSettings()
    runtime: RuntimeSettings = RuntimeSettings()
    artifacts: ArtifactSettings = ArtifactSettings()
    probe: ProbeSettings = ProbeSettings()
    shape: ShapeSettings = ShapeSettings()
    api: ApiSettings = ApiSettings()
    log: LogSettings = LogSettings()
