"""Which GPU takes the place of which."""

from __future__ import annotations

import pytest

from engines.api import GpuNeed
from engines.cuda.devices import Gpu, Node, Unfit, assign, given, swap
from tests.support.containers import make_spec

DRIVER = "580.65.06"


def gpu(index: int, model: str = "H100", *, mig: bool = False, gib: int = 80) -> Gpu:
    return Gpu(
        index=index,
        uuid=f"GPU-{index}",
        model=model,
        total_bytes=gib << 30,
        minor=index,
        mig=mig,
        used={},
        mps=frozenset(),
    )


def need(uuid: str, model: str = "H100", *, gib: int = 1, driver: str = DRIVER) -> GpuNeed:
    return GpuNeed(uuid=uuid, model=model, memory_bytes=gib << 30, driver=driver)


def test_who_is_there_stays() -> None:
    assert assign([need("GPU-1"), need("GPU-0")], [gpu(0), gpu(1)], DRIVER) == {}, "no map is needed"


def test_others_go_in_order_to_those_of_their_model() -> None:
    here = [gpu(0, "A100"), gpu(1), gpu(2)]
    assert assign([need("old-a"), need("GPU-2"), need("old-b", "A100")], here, DRIVER) == {
        "old-a": "GPU-1",
        "GPU-2": "GPU-2",
        "old-b": "GPU-0",
    }


@pytest.mark.parametrize(
    ("needs", "here", "driver", "words"),
    [
        ([need("x", "A100")], [gpu(0)], DRIVER, "no GPU of the same model"),
        ([need("x"), need("y")], [gpu(0)], DRIVER, "it had 2 GPUs"),
        ([need("x", gib=81)], [gpu(0)], DRIVER, "82944 MiB"),
        ([need("x")], [], DRIVER, "is given: none"),
        ([need("GPU-0")], [gpu(0, mig=True)], DRIVER, "MIG"),
        ([need("GPU-0")], [gpu(0)], "575.1", "older 575.1"),
        ([need("x", driver="575.1")], [gpu(0)], "575.1", "only driver 580"),
    ],
)
def test_what_does_not_fit(needs: list[GpuNeed], here: list[Gpu], driver: str, words: str) -> None:
    with pytest.raises(Unfit, match=words):
        assign(needs, here, driver)


def test_a_swap_is_a_whole_map() -> None:
    node = Node(driver=DRIVER, gpus=(gpu(0), gpu(1), gpu(2)))
    needs = [need("GPU-0"), need("GPU-1")]
    assert swap(needs, {"GPU-0": "GPU-1"}, node) == {"GPU-0": "GPU-1", "GPU-1": "GPU-0"}
    assert swap(needs, {"GPU-0": "GPU-2"}, node) == {"GPU-0": "GPU-2", "GPU-1": "GPU-1"}
    assert swap(needs, {}, Node(driver="570.1", gpus=node.gpus)) == {}


@pytest.mark.parametrize(
    ("pairs", "driver", "words"),
    [
        ({"x": "GPU-0"}, DRIVER, "had no GPU x"),
        ({"GPU-0": "x"}, DRIVER, "this node has no GPU x"),
        ({"GPU-0": "GPU-1"}, DRIVER, "cannot take the place"),
        ({"GPU-0": "GPU-2"}, "570.1", "only driver 580"),
    ],
)
def test_a_swap_that_cannot_be(pairs: dict[str, str], driver: str, words: str) -> None:
    node = Node(driver=driver, gpus=(gpu(0), gpu(1, "A100"), gpu(2)))
    with pytest.raises(Unfit, match=words):
        swap([need("GPU-0")], pairs, node)


def test_what_a_spec_gives() -> None:
    node = Node(driver=DRIVER, gpus=(gpu(0), gpu(1)))
    spec = make_spec(["true"])
    assert given(spec, node) == node.gpus
    spec["linux"]["devices"] = [{"path": "/dev/nvidia1"}]
    assert [each.index for each in given(spec, node)] == [1]
    spec["process"]["env"].append("NVIDIA_VISIBLE_DEVICES=GPU-0")
    assert [each.index for each in given(spec, node)] == [0]
    spec["process"]["env"][-1] = "NVIDIA_VISIBLE_DEVICES=none"
    assert given(spec, node) == ()
