"""Signs in the episodes are reported once, though nothing fails."""

from __future__ import annotations

from agentrl.health.monitor import STEPS, HealthMonitor
from agentrl.types import CallRecord, Fault, Group, Message, Stop, Trajectory


def group(*rewards: float, calls: int = 1, says: str = "", fault: Fault | None = None, called: bool = False) -> Group:
    message: Message = {"role": "assistant", "content": says}
    records = (CallRecord(0, "search", "ok", 0.0),) * calls
    made = [Trajectory(0, (), (message,), Stop.TERMINATED, {"r": r}, calls=records, fault=fault) for r in rewards]
    return Group(0, tuple(made))


def test_tools_that_are_never_called() -> None:
    monitor = HealthMonitor(tools=True)
    assert [monitor.check_episodes([group(0.0, 1.0, calls=0)]) for _ in range(STEPS + 1)] == [
        *[[]] * (STEPS - 1),
        [f"tools are offered, and no call was made in {STEPS} steps (2 episodes each)"],
        [],
    ]
    assert not any(HealthMonitor(tools=False).check_episodes([group(0.0, 1.0, calls=0)]) for _ in range(STEPS))
    mixed = HealthMonitor(tools=True)
    assert not any(mixed.check_episodes([group(0.0, 1.0, calls=n % 2)]) for n in range(3 * STEPS))


def test_a_constant_reward() -> None:
    monitor = HealthMonitor(tools=False)
    told = [monitor.check_episodes([group(0.5, 0.5), group(0.5)]) for _ in range(STEPS)]
    assert told[:-1] == [[]] * (STEPS - 1)
    assert told[-1][0].startswith(f"every episode of {STEPS} steps was worth 0.5: nothing is learned. Try harder tasks")
    varying = HealthMonitor(tools=False)
    assert not any(varying.check_episodes([group(float(n), float(n))]) for n in range(3 * STEPS))
    assert not any(HealthMonitor(tools=False).check_episodes([group(0.0, 1.0)]) for _ in range(STEPS))
    assert not any(HealthMonitor(tools=False).check_episodes([group(0.0, fault=Fault("x", ""))]) for _ in range(STEPS))


def test_calls_that_were_not_read() -> None:
    for text in ('[TOOL_CALLS] [{"name": "a"}]', "<function=search>", '```json\n{"name": "a", "arguments": {}}```'):
        (told,) = HealthMonitor(tools=True).check_episodes([group(*[0.0, 1.0] * 8, says=f"Now: {text}")])
        assert told.startswith("16 of 16 turns look like calls that were not read: 'Now: ")
    assert not HealthMonitor(tools=True).check_episodes([group(*[0.0, 1.0] * 8, says="The name is Bond.")])
