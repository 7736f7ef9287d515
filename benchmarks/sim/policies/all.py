"""Every policy by its name, in the order of the tables."""

from collections.abc import Callable

from benchmarks.sim.policies.base import HostPolicy, Policy
from benchmarks.sim.policies.offload_on_tool import OffloadOnTool
from benchmarks.sim.policies.oracle import Oracle
from benchmarks.sim.policies.page_hints import PageHints
from benchmarks.sim.policies.session_aware import SessionAware, SessionAwareGpuOnly
from benchmarks.sim.policies.steps_to_execution import StepsToExecution
from benchmarks.sim.policies.ttl_pin import TtlPin

POLICIES: tuple[Callable[[], Policy], ...] = (
    Policy,
    HostPolicy,
    PageHints,
    TtlPin,
    OffloadOnTool,
    StepsToExecution,
    SessionAwareGpuOnly,
    SessionAware,
    Oracle,
)
BY_NAME = {one().name: one for one in POLICIES}
