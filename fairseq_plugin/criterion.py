"""Criteria ``ls_label_smoothed_cross_entropy`` and ``ls_cross_entropy``: fairseq's losses in one pass over the logits.

With a model that offers packed features, the output projection and the loss are one operation and the logits are never
stored whole; padding is not computed. With any other model whose probabilities are the softmax of its logits, the loss
and its gradient are computed from the logits. Models that normalise in their own way (adaptive softmax) go through
fairseq's own criterion, which one logged line says.

Interface of a model with packed features: its attribute ``supports_packed_features`` is true, and called with
``packed_features=True`` it returns the decoder's features (N, C), one row a target token, the
:class:`~ls_train.packing.Packing` of the target, and the weight (V, C) of the output projection.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from fairseq.models import BaseFairseqModel, FairseqDecoder
from fairseq.models.transformer import TransformerModelBase
from torch import Tensor

from fairseq_plugin.fused_model import reference_causes
from ls_train.ops.cross_entropy import cross_entropy
from ls_train.ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_gradients

logger = logging.getLogger(__name__)

_PLAIN_MODELS = (BaseFairseqModel.get_normalized_probs, TransformerModelBase.get_normalized_probs)


class _Losses(NamedTuple):
    """Sums over the tokens, or one value a token (B, T) for ``loss`` and ``nll``; device scalars for the counts."""

    loss: Tensor
    nll: Tensor
    correct: Tensor | None
    total: Tensor | None


class LossOptions(NamedTuple):
    """What a criterion's options mean for the loss."""

    label_smoothing: float = 0.0
    prefix: int = 0
    count_correct: bool = False


class FusedLoss(FairseqCriterion):
    """What the two criteria share."""

    loss_options = LossOptions()
    logs_nll_loss = False

    def packed_backward(
        self, features: Tensor, weight: Tensor, target: Tensor, gradient: Tensor, rows: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Run the backward of ``gradient * loss`` of a batch without padding.

        Args:
            features: (N, C), of the decoder.
            weight: (V, C), of the output projection, a parameter.
            target: int64 (N,).
            gradient: float32 (1,) on the device.
            rows: int32 (1,) on the device, number of used rows; None: all.

        Returns:
            The sums that :meth:`forward` logs, under its names, ``loss`` first.
        """
        label_smoothing, _, count_correct = self.loss_options
        outputs, dfeatures, dweight = linear_cross_entropy_gradients(
            features, weight, target, gradient, label_smoothing, self.padding_idx, rows, count_correct
        )
        if dweight is not None:
            weight.grad = dweight if weight.grad is None else weight.grad + dweight
        if features.requires_grad:
            features.backward(dfeatures)
        sums = {"loss": outputs.loss}
        if self.logs_nll_loss:
            sums["nll_loss"] = outputs.nll
        if count_correct:
            sums["n_correct"] = outputs.correct
        return sums

    def host_counts(self, sample: dict[str, Any], counted: int) -> dict[str, int]:
        """Return the rest of what :meth:`forward` logs, which the host knows. counted: number of targets that count."""
        counts = {"ntokens": sample["ntokens"], "nsentences": sample["target"].size(0)}
        counts["sample_size"] = counts["nsentences" if self.sentence_avg else "ntokens"]
        if self.loss_options.count_correct:
            counts["total"] = counted
        return counts

    def fused_losses(
        self,
        model: torch.nn.Module,
        sample: dict[str, Any],
        reduce: bool,
        label_smoothing: float = 0.0,
        prefix: int = 0,
        count_correct: bool = False,
    ) -> _Losses | None:
        """Run ``model`` and return its losses, or None, before running it, where only fairseq can compute them.

        Args:
            model: the model, possibly wrapped for distributed training.
            sample: batch as fairseq's tasks collate it.
            reduce: sum over the tokens.
            label_smoothing: eps of fairseq's formula.
            prefix: this many target tokens of each sentence do not count.
            count_correct: also count the tokens whose largest logit is the target's, and those that count.
        """
        is_packed = getattr(model, "supports_packed_features", False)
        if not is_packed and not _is_softmax_of_logits(model):
            self._explain_fallback(model)
            return None
        if is_packed:
            features, packing, weight = model(**sample["net_input"], packed_features=True)
            target = packing.pack(self._targets(model.get_targets(sample, None), prefix))
            if reduce:
                outputs = linear_cross_entropy(
                    features, weight, target, label_smoothing, self.padding_idx, packing.rows, count_correct
                )
                return _Losses(outputs.loss, outputs.nll, outputs.correct, self._count(target, count_correct))
            logits = torch.nn.functional.linear(features, weight)
        else:
            net_output = model(**sample["net_input"])
            packing, logits = None, net_output[0]
            target = self._targets(model.get_targets(sample, net_output), prefix)
        shape, target = target.shape, target.reshape(-1)
        outputs = cross_entropy(
            logits.reshape(-1, logits.shape[-1]).contiguous(),
            target,
            label_smoothing,
            self.padding_idx,
            None if packing is None else packing.rows,
            count_correct,
        )
        correct = outputs.correct.sum() if count_correct else None
        total = self._count(target, count_correct)
        if reduce:
            return _Losses(outputs.loss.sum(), outputs.nll.sum(), correct, total)
        loss, nll = (x.view(shape) if packing is None else packing.unpack(x) for x in (outputs.loss, outputs.nll))
        return _Losses(loss[:, prefix:], nll[:, prefix:], correct, total)

    def _targets(self, target: Tensor, prefix: int) -> Tensor:
        if prefix > 0:
            target = target.clone()
            target[:, :prefix] = self.padding_idx
        return target

    def _count(self, target: Tensor, wanted: bool) -> Tensor | None:
        return target.ne(self.padding_idx).sum() if wanted else None

    def _explain_fallback(self, model: torch.nn.Module) -> None:
        inner = _inner(model)
        if not getattr(self, "_explained", False) and not reference_causes(inner):
            self._explained = True
            logger.warning(
                f"{type(self).__name__}: the probabilities of {type(inner).__name__} are not the plain softmax "
                "of its logits (adaptive softmax or a method of its own); fairseq's criterion computes the loss"
            )

    def logging_output(self, sample: dict[str, Any], sample_size: Any, **sums: Tensor) -> dict[str, Any]:
        """Return what fairseq's criteria log: sums stay on the device."""
        return {
            **{name: value.detach() for name, value in sums.items()},
            "ntokens": sample["ntokens"],
            "nsentences": sample["target"].size(0),
            "sample_size": sample_size,
        }


@register_criterion("ls_label_smoothed_cross_entropy", dataclass=LabelSmoothedCrossEntropyCriterionConfig)
class LSLabelSmoothedCrossEntropyCriterion(FusedLoss, LabelSmoothedCrossEntropyCriterion):
    """fairseq's ``label_smoothed_cross_entropy`` with the same options, sums and metrics."""

    logs_nll_loss = True

    @property
    def loss_options(self) -> LossOptions:
        """Smoothing, ignored prefix and accuracy."""
        return LossOptions(self.eps, self.ignore_prefix_size, self.report_accuracy)

    def forward(
        self, model: torch.nn.Module, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, Any, dict[str, Any]]:
        """Return (loss, sample size, logging output); the loss is a sum, or one value a token if not ``reduce``."""
        losses = self.fused_losses(model, sample, reduce, *self.loss_options)
        if losses is None:
            return super().forward(model, sample, reduce=reduce)
        loss, nll = (x if reduce else x.reshape(-1, 1) for x in (losses.loss, losses.nll))
        sample_size = sample["target"].size(0) if self.sentence_avg else sample["ntokens"]
        logging_output = self.logging_output(sample, sample_size, loss=loss, nll_loss=nll)
        if self.report_accuracy:
            logging_output.update(n_correct=losses.correct, total=losses.total)
        return loss, sample_size, logging_output


@register_criterion("ls_cross_entropy", dataclass=CrossEntropyCriterionConfig)
class LSCrossEntropyCriterion(FusedLoss, CrossEntropyCriterion):
    """fairseq's ``cross_entropy`` with the same options, sums and metrics."""

    def forward(
        self, model: torch.nn.Module, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, Any, dict[str, Any]]:
        """Return (loss, sample size, logging output); the loss is a sum, or one value a token if not ``reduce``."""
        losses = self.fused_losses(model, sample, reduce)
        if losses is None:
            return super().forward(model, sample, reduce=reduce)
        loss = losses.loss if reduce else losses.loss.reshape(-1)
        sample_size = sample["target"].size(0) if self.sentence_avg else sample["ntokens"]
        return loss, sample_size, self.logging_output(sample, sample_size, loss=loss)


def _inner(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside wrappers for distributed training."""
    while isinstance(getattr(model, "module", None), torch.nn.Module):
        model = model.module
    return model


def _is_softmax_of_logits(model: torch.nn.Module) -> bool:
    """Return whether the model's log probabilities are fairseq's log softmax of what its decoder returns first."""
    model = _inner(model)
    decoder = getattr(model, "decoder", None)
    return (
        isinstance(model, BaseFairseqModel)
        and isinstance(decoder, FairseqDecoder)
        and getattr(decoder, "adaptive_softmax", None) is None
        and type(model).get_normalized_probs in _PLAIN_MODELS
        and type(model).get_normalized_probs_scriptable is BaseFairseqModel.get_normalized_probs_scriptable
        and type(decoder).get_normalized_probs is FairseqDecoder.get_normalized_probs
        and type(decoder).get_normalized_probs_scriptable is FairseqDecoder.get_normalized_probs_scriptable
    )
