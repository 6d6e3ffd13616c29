"""For the first person with a GPU: every computation on a device and on the CPU, as a table.

``make gpu-check`` runs it on ``DEVICE`` (cuda by default). It ends with 1 if one of them is
off by more than it may, or fails.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from typing import Any

import numpy as np
import torch
from helpers_device_cases import CASES, Case, difference, start_device


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, mps, xpu, xla, cpu, auto")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    logging.getLogger("flwr.gems").setLevel(logging.ERROR)
    try:
        device = start_device(options.device)
    except ValueError as error:
        print(error)
        return 2
    print(f"{device} ({_described(device)}), PyTorch {torch.__version__}")
    print(
        f"{'what':<46} {'CPU':>12} {'device':>12} {'difference':>10} {'allowed':>8} "
        f"{'CPU s':>7} {'device s':>8}  verdict"
    )
    wrong = 0
    for case in CASES:
        if options.only in case.name:
            wrong += not _row(case, options.device)
    print(f"{wrong} disagree" if wrong else "all agree")
    return int(wrong > 0)


def _row(case: Case, device: str) -> bool:
    began = time.perf_counter()
    expected = case.compute("cpu")
    middle = time.perf_counter()
    try:
        found = case.compute(device)
    except Exception as error:
        print(f"{case.name:<46} {type(error).__name__}: {str(error).splitlines()[0]}  FAILED")
        return False
    ended = time.perf_counter()
    off = difference(expected, found)
    fine = off <= case.tolerance
    print(
        f"{case.name:<46} {_size(expected):>12.6g} {_size(found):>12.6g} {off:>10.1e} "
        f"{case.tolerance:>8.0e} {middle - began:>7.2f} {ended - middle:>8.2f}  "
        f"{'agrees' if fine else 'DISAGREES'}",
        flush=True,
    )
    return fine


def _size(numbers: dict[str, Any]) -> float:
    """Return one number of a result to look at: the root of the sum of its squares."""
    arrays = (np.asarray(array, dtype=np.float64) for array in numbers.values())
    return float(np.sqrt(sum(float((array**2).sum()) for array in arrays)))


def _described(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "no name"


if __name__ == "__main__":
    sys.exit(main())
