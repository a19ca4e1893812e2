"""What a run says about itself: metrics, timers, progress, samples and trackers."""

from hybrid.monitor.metrics import MetricsLogger, SamplesWriter, check_trackers
from hybrid.monitor.progress import Progress, sample_table
from hybrid.monitor.run import RunRecorder, check_output_dir, find_traces, make_output_dir
from hybrid.monitor.timers import Timers

__all__ = [
    "MetricsLogger",
    "Progress",
    "RunRecorder",
    "SamplesWriter",
    "Timers",
    "check_output_dir",
    "check_trackers",
    "find_traces",
    "make_output_dir",
    "sample_table",
]
