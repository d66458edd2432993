"""Environment variables of every Ray node of rollart, however it is started. Imports nothing."""

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""One thread per process: workers share the cores, and oversubscription is slower."""
ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Unused features that cost CPU time: metrics, event-loop timings, task events.
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    "RAY_task_events_report_interval_ms": "0",
    # Keeps process titles out of the environment, where the reaper finds its mark. vLLM's would overwrite it.
    "SPT_NOENV": "1",
    # Workers are the main load of this machine; by default Ray lowers their priority.
    "RAY_worker_niceness": "0",
    **dict.fromkeys(THREADS, "1"),
}
HEALTH_CHECK_PERIOD_S = 1.0
HEALTH_CHECK_TIMEOUT_S = 2.5
HEALTH_CHECK_FAILURES = 3
HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": f"{HEALTH_CHECK_PERIOD_S * 1000:.0f}",
    "RAY_health_check_timeout_ms": f"{HEALTH_CHECK_TIMEOUT_S * 1000:.0f}",
    "RAY_health_check_failure_threshold": str(HEALTH_CHECK_FAILURES),
}
"""How Ray's head finds out that a node is gone, if no connection breaks: it asks every second.

    cut of 5 s                  |←———— 5 s ————→|   TCP repeats what was lost after up to 6.4 s
    checks that get no answer   |— 2.5 —|·1·|— 2.5 —|·1·|— 2.5 —|  and the third one, until 9.5 s, is answered
    dead node                                                   ^ 9.5 to 10.5 s after its death: its workers are dead

Ray's defaults (3 s, 10 s, 5 times) take a minute. A node whose processes are killed is noticed at once in either case:
its connections close.
"""
PATIENCE = {"RAY_raylet_start_wait_time_s": "120", "RAY_agent_register_timeout_ms": "120000"}
"""Ray's defaults are half a minute, in which a busy machine may not start a node: its raylet then ends."""
DRAIN_VARIABLE = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
"""Seconds that a node has to become idle after SIGTERM."""
EVERY_NODE = ENVIRONMENT | HEALTH_CHECKS | PATIENCE
