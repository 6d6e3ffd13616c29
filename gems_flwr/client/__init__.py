"""What runs on a node: the task interface, the ready ClientApp, and wrapping for handlers."""

from gems_flwr.client.app import task_client_app
from gems_flwr.client.dynamic_averaging import dynamic_averaging_mod
from gems_flwr.client.good_enough import good_enough_mod
from gems_flwr.client.guard import fault_reply_mod
from gems_flwr.client.limits import UNLIMITED, NodeLimits, RefusedError
from gems_flwr.client.multi_model import multi_model_mod
from gems_flwr.client.statistics import statistics_mod
from gems_flwr.client.task import Report, Task, TaskSet

__all__ = [
    "UNLIMITED",
    "NodeLimits",
    "RefusedError",
    "Report",
    "Task",
    "TaskSet",
    "dynamic_averaging_mod",
    "fault_reply_mod",
    "good_enough_mod",
    "multi_model_mod",
    "statistics_mod",
    "task_client_app",
]
