"""The direction of metrics: known by their names, or asked for, never guessed."""

from __future__ import annotations

import pytest

from clusterctl.spec.metrics import Goal, goal_of, is_time_of_all_work

LOWER = """
    eval_loss loss/train Loss/val valLoss mlm_loss loss[nats] train_loss_epoch train_loss_step loss_gpu0
    val_acc_loss reward_loss log_loss nll neg_log_likelihood perplexity val/ppl bits_per_byte bits/byte
    bits_per_dim RMSE mean_absolute_error max_error test_wer brier_score error_rate err_top5 fpr miss_rate
    miss_ratio errors_per_s residual_norm residual_l2 error_norm FID
    time_s time/s wall_time total_time_(s) epoch_s epoch_seconds step_ms seconds_per_step s/it s/sample
    ms_per_token sec/iter us/call ns_per_op p99_latency_ms latency_p99 time_to_accuracy runtime idle_share
    usd_per_epoch cost_usd cost_per_million_tokens usd_per_1k_tokens kwh_per_epoch joules_per_sample
    negative_reward 1-accuracy hours/ns load_imbalance co2 eval_runtime elapsed_time_per_iteration_(ms)
    mean_ttft_ms hausdorff95 ExecutionTime cache_misses
    val_ter TER crps crps_score fvd fvd_score
"""
HIGHER = """
    Val_Acc evalAccuracy best_val_acc1 top5_acc acc@1 f1 f1_macro f1-score R2 mAP metrics/mAP50-95(B) mIoU
    precision recall@10 hits@10 ndcg@10 ROC_AUC PR-AUC rougeL rouge1 sacrebleu psnr score reward
    rollout/ep_rew_mean mean_return hit_rate success_rate win_rate log_likelihood elbo
    neg_mean_squared_error 1-loss inverse_perplexity
    images_per_second train_samples_per_sec tokens_per_sec_per_device tokens/s/GPU it/s img/sec
    steps_per_hour words_per_sec updates_per_s iterations_per_second lattice_updates_per_s
    mlups MLUPS GLUPS MLUP/s GUPS gteps gflops tflops GFLOPs TFLOP/s gflops_per_watt samples_per_joule
    tokens_per_usd Mcells/s Matoms/s ns_per_day ns/day sypd fps time/fps qps iops GB/s gb_s Gbit/s mbps
    algbw bus_gb_per_s read_bandwidth token_throughput speed speed_(GB/s) frame_rate update_rate
    perf/mfu efficiency energy_efficiency eval_exact_match pass@1 auc_roc tokens_per_gpu_per_second
    request_throughput Matom-step/s bw(MiB/s) mean_TEPS Triad_MB/s cache_hit_rate TFLOPS/GPU
"""
UNKNOWN = """
    x speedometer loss_scale loss_std loss_weight accuracy_drop accuracy_std grad_norm learning_rate lr
    best_epoch epoch step time_step timestep time/total_timesteps time/iterations sim_time survival_time
    time_remaining time_between_failures up_time coherence_time rate ratio updates iterations count
    images_s tokens_s u_s foo/s foo_per_s ms_per_s steps_per_epoch iterations_per_solve samples_per_s_std
    seconds_per_step_std lost_packets_per_s dropped_requests_per_s false_positive_rate sample_rate
    dropout_rate no_loss entropy approx_kl temperature energy power gpu_util memory_gib distance
    return_code kappa price bits total_flos ep_len_mean clip_fraction explained_variance elo chi2 day/step
"""


@pytest.mark.parametrize(
    ("name", "goal"),
    [
        *((name, Goal.MIN) for name in LOWER.split()),
        *((name, Goal.MAX) for name in HIGHER.split()),
        *((name, None) for name in UNKNOWN.split()),
    ],
)
def test_goal_of_name_is_known_or_none(name: str, goal: Goal | None) -> None:
    assert goal_of(name) is goal


@pytest.mark.parametrize(
    "name", ["", "/", "_", "per", "s", "per_s", "x_per", "1-", "()", "a//b", "é", "/s"]
)
def test_goal_of_odd_name_does_not_fail(name: str) -> None:
    assert goal_of(name) in {None, Goal.MIN}


def test_time_of_sample_does_not_grow_with_the_work() -> None:
    grows = {
        name: is_time_of_all_work(name)
        for name in "time_s epoch_s s/it ms_per_step ms_per_token".split()
    }
    assert grows == {
        "time_s": True,
        "epoch_s": True,
        "s/it": True,
        "ms_per_step": True,
        "ms_per_token": False,
    }
