"""Optimiser and loss scaling that stay on the device."""

from ls_train.optim.adam import FusedAdam
from ls_train.optim.loss_scale import DynamicLossScale
from ls_train.optim.moments import AdamForm

__all__ = ["AdamForm", "DynamicLossScale", "FusedAdam"]
