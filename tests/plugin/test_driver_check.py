"""A page that the CUDA driver refuses is taken away before anything is committed to it."""

from __future__ import annotations

import pytest
import torch

import repage
from repage.errors import RepagingRefusedError
from repage.tensor_map import TensorMapProbe
from repage.vllm import compat
from repage.vllm.driver_check import driver_refusal
from repage.vllm.policy import PageContext, choose_page
from repage.vllm.refusals import page_refusal

CPU = torch.device("cpu")
LAYERS = ("model.layers.0.attn", "model.layers.1.attn")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[repage.PagePlan]:
    """Plans that a refusing driver was asked about."""
    plans: list[repage.PagePlan] = []

    def refuse(plan, rule, **_):
        plans.append(plan)
        return TensorMapProbe(rule.name, "refused", "CUDA_ERROR_INVALID_VALUE", ())

    monkeypatch.setattr("repage.vllm.driver_check.probe_tensor_map", refuse)
    return plans


@pytest.fixture
def tma_world(make_world, repaged, monkeypatch: pytest.MonkeyPatch):
    backend = repaged(32)
    monkeypatch.setattr(
        type(backend.repage_policy), "tensor_map", lambda _self, _context: "trtllm-gen"
    )
    world = make_world(impl=backend.get_impl_cls())
    return backend, world, world.add_layers(*LAYERS)


def test_builders_refuse_before_memory_is_allocated(tma_world, asked):
    backend, world, names = tma_world
    with pytest.raises(RepagingRefusedError, match=r"driver refuses the tensor map of trtllm-gen"):
        backend.get_builder_cls()(world.spec(), names, world.config, CPU)
    assert len(asked) == 1


def test_the_driver_is_asked_about_the_strides_of_the_real_view(tma_world, asked):
    backend, world, names = tma_world
    context = PageContext(
        world.spec(), compat.layout_by_name(world.layout), world.config, tuple(names)
    )
    choice = choose_page(backend.repage_policy, context)
    assert "CUDA_ERROR_INVALID_VALUE" in page_refusal(backend.repage_policy, context, choice)
    world.bind()
    cache = world.config.compilation_config.static_forward_context[names[0]].kv_cache
    real = repage.PagePlan(repage.BlockGeometry.from_tensor(cache), choice.page_tokens)
    (plan,) = asked
    assert plan.page_stride == real.page_stride
    assert plan.geometry.token_stride == real.geometry.token_stride
    assert plan.geometry.head_stride == real.geometry.head_stride
    assert plan.geometry.element_size == real.geometry.element_size


def test_without_a_driver_nothing_is_refused(tma_world):
    backend, world, names = tma_world
    if torch.cuda.is_available():
        pytest.skip("there is a driver")
    context = PageContext(
        world.spec(), compat.layout_by_name(world.layout), world.config, tuple(names)
    )
    choice = choose_page(backend.repage_policy, context)
    assert driver_refusal(backend.repage_policy, context, choice) is None
