"""What the plugin's models share: checked options, fairseq's own modules where an option asks for them, packed rows."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from fairseq_plugin.decoder import LSTransformerDecoder
from fairseq_plugin.model_options import check_values, refuse

logger = logging.getLogger(__name__)

_step_reports = False


def expect_training_step(expected: bool) -> None:
    """Say whether this run will choose a training step; the line about that choice then names the model's causes."""
    global _step_reports
    _step_reports = expected


def as_reference(module: nn.Module, reasons: list[str]) -> nn.Module:
    """Return fairseq's encoder or decoder ``module`` with the options for which it was built."""
    module.reference_reasons = reasons
    return module


def reference_causes(model: nn.Module) -> dict[str, str]:
    """Return, by side, why encoder or decoder of ``model`` are fairseq's own."""
    causes = {}
    for side in ("encoder", "decoder"):
        reasons = getattr(getattr(model, side, None), "reference_reasons", None)
        if reasons:
            causes[side] = f"fairseq's {side} ({', '.join(reasons)})"
    return causes


class FusedModel:
    """Base of the plugin's models, before fairseq's class."""

    @classmethod
    def hub_models(cls) -> dict[str, Any]:
        """Return no models: those of fairseq's hub load under fairseq's own architecture."""
        return {}

    @classmethod
    def build_model(cls, args: Any, task: Any) -> FusedModel:
        """Return a new model; one logged line says which parts are fairseq's own, and why.

        Raises:
            UserError: an option cannot be served.
        """
        refuse(args)
        check_values(args)
        for name in ("encoder_layers_to_keep", "decoder_layers_to_keep"):
            if isinstance(getattr(args, name, None), list):
                # fairseq's parser makes lists of them, of which its models and checkpoints expect the text.
                setattr(args, name, ",".join(map(str, getattr(args, name))))
        model = cls.build_parts(args, task)
        causes = reference_causes(model)
        if causes and not _step_reports:
            logger.info(f"{type(model).__name__}: runs on {', '.join(causes.values())}")
        return model

    @classmethod
    def build_parts(cls, args: Any, task: Any) -> FusedModel:
        """Return a new model; ``args`` are checked."""
        return super().build_model(args, task)

    @property
    def supports_packed_features(self) -> bool:
        """Whether ``packed_features=True`` works: the decoder is fused."""
        return isinstance(self.decoder, LSTransformerDecoder)

    def check_packed_features(self) -> None:
        """Raise an error where the decoder has no packed features.

        Raises:
            ValueError: it is fairseq's own.
        """
        if not self.supports_packed_features:
            raise ValueError(
                "packed_features needs the fused decoder, which the model's options excluded; check "
                "supports_packed_features first"
            )
