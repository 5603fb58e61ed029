"""Operators: schema, CPU reference and functional wrapper, one module an operator."""

from ls_train.ops.adam import adam, adam_prepare
from ls_train.ops.attention import attention
from ls_train.ops.bias_activation_dropout import bias_activation_dropout
from ls_train.ops.bias_dropout_add import bias_dropout_add
from ls_train.ops.bias_dropout_add_layer_norm import bias_dropout_add_layer_norm
from ls_train.ops.column_sum import column_sum
from ls_train.ops.cross_entropy import cross_entropy
from ls_train.ops.dropout import dropout
from ls_train.ops.embedding import embedding
from ls_train.ops.grad_norm import grad_norm
from ls_train.ops.layer_norm import layer_norm, layer_norm_residual
from ls_train.ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_gradients
from ls_train.ops.loss_scale_update import loss_scale_update
from ls_train.ops.scale_cast import scale_cast
from ls_train.ops.softmax_dropout import softmax_dropout

__all__ = [
    "adam",
    "adam_prepare",
    "attention",
    "bias_activation_dropout",
    "bias_dropout_add",
    "bias_dropout_add_layer_norm",
    "column_sum",
    "cross_entropy",
    "dropout",
    "embedding",
    "grad_norm",
    "layer_norm",
    "layer_norm_residual",
    "linear_cross_entropy",
    "linear_cross_entropy_gradients",
    "loss_scale_update",
    "scale_cast",
    "softmax_dropout",
]
