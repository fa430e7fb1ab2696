"""A pod of gVisor under a caller made for runc is refused: it would hang."""

from __future__ import annotations

import grpc
import pytest

from tests.support.cri import Cri
from tests.support.torpor import Torpor

pytestmark = pytest.mark.engine


def test_a_pod_is_refused_with_the_reason(cri: Cri, torpor: Torpor) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        cri.pod("guest", handler="torpor-runsc")
    assert "only under gVisor's own containerd shim" in str(refused.value)
    assert torpor.audit()[-1]["event"] == "refused"
