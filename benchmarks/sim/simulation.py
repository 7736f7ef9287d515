"""One run: one policy, one workload, one engine, until all tasks are done."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.agents.workload import Trajectory
from benchmarks.sim.agents import Agent, Crowd
from benchmarks.sim.costs import CostModel
from benchmarks.sim.engine import QUANTUM, Served, SimulatedEngine
from benchmarks.sim.measures import Run
from benchmarks.sim.policies.base import Policy


def simulate(
    policy: Policy,
    tasks: Sequence[Trajectory],
    concurrency: int,
    costs: CostModel,
    directory: Path,
    spread_s: float = 5.0,
    quantum: int = QUANTUM,
) -> Run:
    """``directory``: with a model's configuration. The same arguments give the same run."""
    wall_s = time.perf_counter()
    costs = policy.machine(costs)
    engine = SimulatedEngine(
        costs, policy.settings(costs), directory, policy.waiting_policy, quantum
    )
    policy.bind(engine)
    run = Run(policy.name, concurrency)
    started_s = engine.now_s

    def send(agent: Agent) -> None:
        policy.sent(agent)
        engine.send(
            agent.trajectory,
            agent.turn,
            partial(done, agent),
            policy.hint(agent),
            policy.priority(agent),
        )

    def done(agent: Agent, served: Served) -> None:
        if policy.loads_are_local:
            served.gpu_tokens, served.host_tokens = served.gpu_tokens + served.host_tokens, 0
        run.note_turn(agent, served)
        crowd.turn_ended(agent, engine.now_s)
        if agent.now.tool is not None:
            policy.turn_ended(agent, served)
        elif agent.parent is None:
            run.note_finished(agent)

    crowd = Crowd(tasks, concurrency, send, engine.at, policy.started, policy.finished)
    crowd.start(engine.now_s, spread_s)
    engine.run()
    if engine.connector is not None:
        engine.connector.check_integrity(idle=True)
        engine.connector.shutdown()
    run.elapsed_s, run.steps = engine.now_s - started_s, engine.steps
    run.peak_used_share = engine.peak_used_blocks / costs.pool_blocks
    if engine.worker is not None:
        run.moved_bytes = engine.worker.loads.moved_bytes + engine.worker.saves.moved_bytes
    run.wall_s = time.perf_counter() - wall_s
    return run
