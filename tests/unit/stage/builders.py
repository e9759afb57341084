"""An agent under test, and the ballot messages it gets."""

from typing import Any

from config.settings import ElectionSettings
from protocol.ballots import Abort, Activate, Keepalive, Nack, Prepare, Retire, Stage, StageAssignment
from protocol.fencing import PlanEpoch, epoch_to_wire
from protocol.ids import Instance, NodeId, Slot
from stage_agent.stage.agent import StageAgent
from stage_agent.stage.effects import Load, Loaded, Reply, Unload, Unloaded

ME, SLOT = NodeId("me"), Slot("default")
MINE = Instance("1" * 32)
HASH, OTHER_HASH = "a" * 64, "b" * 64
SECOND = 1_000_000


def ballot(term: int, node: str = "chief", instance: str = "c" * 32) -> PlanEpoch:
    return PlanEpoch(term, NodeId(node), Instance(instance))


def agent(memory: int = 1000, **arguments: Any) -> StageAgent:
    settings = {
        "node_id": ME,
        "instance": MINE,
        "restored": {},
        "usable_memory_bytes": memory,
        "now_us": 0,
        "settings": ElectionSettings(),
    }
    made = StageAgent(**{**settings, **arguments})
    made.on_members(frozenset({NodeId("chief"), NodeId("rival")}))
    return made


def assignment(required: int = 100, start: int = 0, end: int = 4, **fields: Any) -> StageAssignment:
    values: dict[str, Any] = {
        "slot": SLOT,
        "stage_index": 0,
        "stage_count": 1,
        "node_id": ME,
        "instance": MINE,
        "model_digest": "d" * 64,
        "model_source": "/m",
        "layer_start": start,
        "layer_end": end,
        "roles": ("driver",),
        "required_bytes": required,
        "parameter_bytes": required,
        "context_length": 512,
        "lanes": 1,
    }
    return StageAssignment(**{**values, **fields})


def prepare(at: PlanEpoch, *, force: bool = False, slot: str = SLOT) -> Prepare:
    return Prepare(ballot=epoch_to_wire(at), slot=slot, participant_set_hash=HASH, force=force)


def stage(at: PlanEpoch, plan_hash: str = HASH, work: StageAssignment | None = None, slot: str = SLOT) -> Stage:
    return Stage(ballot=epoch_to_wire(at), slot=slot, plan_hash=plan_hash, assignment=work or assignment())


def activate(at: PlanEpoch, plan_hash: str = HASH, instance: str = MINE, slot: str = SLOT) -> Activate:
    return Activate(ballot=epoch_to_wire(at), slot=slot, plan_hash=plan_hash, instance=instance)


def abort(at: PlanEpoch) -> Abort:
    return Abort(ballot=epoch_to_wire(at), slot=SLOT)


def retire(at: PlanEpoch, superseded_by: PlanEpoch | None = None) -> Retire:
    newer = None if superseded_by is None else epoch_to_wire(superseded_by)
    return Retire(ballot=epoch_to_wire(at), slot=SLOT, superseded_by=newer)


def keepalive(at: PlanEpoch) -> Keepalive:
    return Keepalive(ballot=epoch_to_wire(at), slot=SLOT)


def tell(made: StageAgent, message: Any, now_us: int = 0, sender: str | None = None) -> list[Any]:
    effects = made.on_message(NodeId(sender or message.ballot.node_id), message, now_us)
    made.validate()
    return effects


def replies(effects: list[Any]) -> list[Any]:
    return [effect.message for effect in effects if isinstance(effect, Reply)]


def refusal(effects: list[Any]) -> Nack:
    (message,) = replies(effects)
    assert isinstance(message, Nack), message
    return message


def finish(made: StageAgent, effects: list[Any]) -> list[Any]:
    """The runtime does at once what it is asked."""
    further: list[Any] = []
    for effect in effects:
        if isinstance(effect, Load):
            further += made.on_runtime(Loaded(effect.slot, effect.ballot), 0)
        elif isinstance(effect, Unload):
            further += made.on_runtime(Unloaded(effect.slot, effect.ballot), 0)
    return further + (finish(made, further) if further else [])


def serve(made: StageAgent, at: PlanEpoch, work: StageAssignment | None = None, plan_hash: str = HASH) -> list[Any]:
    """Prepare, stage, load and activate."""
    work = work or assignment()
    effects = tell(made, prepare(at, slot=work.slot))
    effects += tell(made, stage(at, plan_hash, work, slot=work.slot))
    finish(made, effects)
    done = tell(made, activate(at, plan_hash, slot=work.slot))
    finish(made, done)
    return done
