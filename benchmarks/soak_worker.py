"""What a soak asks the server's worker processes, through vLLM's ``/collective_rpc``."""

from vllm.distributed.kv_transfer import get_kv_transfer_group

from connectors.session_aware import SessionAwareConnector
from spm.errors import IntegrityError


class WorkerChecks:
    """Mixed into vLLM's worker by ``--worker-extension-cls``."""

    def spm_check_integrity(self) -> str:
        """What is wrong with the idle worker's books; empty if nothing is."""
        connector = get_kv_transfer_group()
        assert isinstance(connector, SessionAwareConnector)
        try:
            connector.check_integrity(idle=True)
        except IntegrityError as error:
            return str(error)
        return ""
