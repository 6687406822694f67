"""The estimate of memory by device."""

from __future__ import annotations

from draftsmith.pipeline.plan import make_plan


def test_decoding_while_training_brings_a_second_target(tiny_run) -> None:
    (without,) = make_plan(tiny_run("without")).memory
    (beside,) = make_plan(tiny_run("beside", decoding={"every": 2})).memory
    assert beside.target == 2 * without.target > 0
    assert beside.drafter - without.drafter == without.drafter // 2, "weights, and no gradients"
    assert (beside.optimizer, beside.activations) == (without.optimizer, without.activations)


def test_drafters_on_one_device_share_the_optimizers_state(tiny_run) -> None:
    """Masters and two moments exist once; sums of gradients for each replica."""
    training = {"rows_per_update": 3}
    (one,) = make_plan(tiny_run("one", training=training)).memory
    (three,) = make_plan(
        tiny_run("three", training=training, pipeline={"targets": ["cpu"], "drafters": ["cpu"] * 3})
    ).memory
    parameters = one.optimizer // 16
    assert three.optimizer == parameters * (12 + 3 * 4)
    assert three.drafter == 3 * one.drafter
