"""Copies of a model, quickly.

`copy.deepcopy` looks into each of the dozen empty tables of hooks that every module has, which
takes as long as a training step of a small network; a simulation copies one for every message.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any, TypeVar

import torch
from torch import nn

Model = TypeVar("Model", bound=nn.Module)

# They cannot be changed, so that copies may share them.
_FIXED = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_TABLES = (dict, OrderedDict, set, list)


def copy_model(model: Model) -> Model:
    """Return a copy of a model that shares nothing with it that could be changed.

    Parameters
    ----------
    model : torch.nn.Module
        May have any attributes; what is not known to be simple goes through `copy.deepcopy`.
    """
    copied: Model = _copy(model, {})
    return copied


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    if type(value) in _FIXED:
        return value
    if type(value) is tuple and all(type(each) in _FIXED for each in value):
        return value
    if id(value) in memo:
        # A weight or a module that is there twice stays one.
        return memo[id(value)]
    if type(value) in _TABLES and not value:
        copied: Any = type(value)()
    elif type(value) is nn.Parameter and value.grad is None and not value._backward_hooks:
        copied = nn.Parameter(value.detach().clone(), value.requires_grad)
    elif type(value) in (dict, OrderedDict):
        copied = type(value)()
        memo[id(value)] = copied
        for key, each in value.items():
            copied[key] = _copy(each, memo)
    elif isinstance(value, nn.Module) and _is_plain(type(value)):
        copied = value.__class__.__new__(value.__class__)
        memo[id(value)] = copied
        copied.__dict__.update({key: _copy(each, memo) for key, each in value.__dict__.items()})
    else:
        return copy.deepcopy(value, memo)
    memo[id(value)] = copied
    return copied


def _is_plain(kind: type[nn.Module]) -> bool:
    """Return whether modules of a class are copied attribute by attribute, as all but a few are."""
    own = ("__deepcopy__", "__copy__", "__getstate__", "__reduce__", "__reduce_ex__")
    base: dict[str, Any] = {name: getattr(nn.Module, name, None) for name in own}
    return (
        all(getattr(kind, name, None) is method for name, method in base.items())
        and kind.__setstate__ is nn.Module.__setstate__
    )
