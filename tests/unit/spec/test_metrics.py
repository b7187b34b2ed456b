"""The direction of metrics: known of a few plain names, or asked for, never guessed."""

from __future__ import annotations

import pytest

from clusterctl.spec.metrics import Goal, goal_of

LOWER = """
    loss eval_loss val/loss train_loss Loss rank0/loss test.error error_rate perplexity val_ppl RMSE wer FID
    time seconds step_ms p99_latency_ms cost
"""
HIGHER = """
    accuracy Val_Acc eval_accuracy f1 val/auc R2 reward throughput mfu gflops psnr
    samples_per_s train_tokens_per_s updates_per_s
"""
UNKNOWN = """
    x toxicity_score risk_score clash_score docking_score hallucination_score anomaly_score z_score score
    uptime_hours endurance_hours battery_life_hours T1_us T2_us watch_time session_length_s sim_time
    errors_per_s retries_per_s dropped_samples_per_s joules_per_s loss_per_s improvement_ms speedup_ms
    loss_scale loss_std accuracy_drop valLoss mlm_loss total_loss log_likelihood neg_log_loss 1-accuracy
    mlups ns/day it/s bits_per_byte grad_norm learning_rate epoch step rank0/ val_ per_s ms
"""


@pytest.mark.parametrize(
    ("name", "goal"),
    [
        *((name, Goal.MIN) for name in LOWER.split()),
        *((name, Goal.MAX) for name in HIGHER.split()),
        *((name, None) for name in UNKNOWN.split()),
        ("", None),
    ],
)
def test_goal_of_name_is_known_or_none(name: str, goal: Goal | None) -> None:
    assert goal_of(name) is goal
