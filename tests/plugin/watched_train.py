"""``python -m tests.plugin.watched_train``: ``lightseq-train`` that prints a line of JSON for every call of a step.

Works under torchrun and where fairseq spawns its ranks: each imports this module and so watches itself. With
``OVERFLOW=<rank>:<call>`` in the environment the loss of that rank's call is infinite in the backward, and the ranks in
``UNCAPTURED=<rank>,...`` run eagerly what others replay. A rank that is still there after two minutes says where it is.
"""

import faulthandler
import hashlib
import json
import os

import torch
import torch.distributed as dist

from fairseq_plugin import cli
from fairseq_plugin.trainer import LSTrainer
from ls_train.graph import CudaGraphs
from tests.plugin.training_log import precise

UPDATE = "watched update: "
OVERFLOW = tuple(int(number) for number in os.environ.get("OVERFLOW", "-1:0").split(":"))
UNCAPTURED = [int(number) for number in os.environ.get("UNCAPTURED", "").split(",") if number]


def _bits(trainer: LSTrainer) -> str:
    digest = hashlib.sha256()
    for parameter in trainer.model.parameters():
        digest.update(parameter.detach().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _watch() -> None:
    step, backward, capture = LSTrainer.train_step, torch.Tensor.backward, CudaGraphs.capture
    calls = 0

    def rank() -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    def train_step(self, samples, *args, **kwargs):
        nonlocal calls
        calls += 1
        output = step(self, samples, *args, **kwargs)
        shapes = [list(sample["target"].shape) if sample else None for sample in samples]
        scaler = getattr(self.optimizer, "scaler", None)
        line = {
            "rank": rank(),
            "call": calls,
            "device": str(self.device),
            "current": torch.cuda.current_device() if torch.cuda.is_available() else None,
            "way": "wrapped" if self.model is not self._model else "bare",
            "updates": self.get_num_updates(),
            "scale": scaler and scaler.loss_scale,
            "shapes": shapes,
            "bits": _bits(self),
            "replays": self._device_step.graphs.replays if self._device_step and self._device_step.graphs else 0,
        }
        print(f"{UPDATE}{json.dumps(line)}\n", end="", flush=True)
        return output

    def overflowing(self, *args, **kwargs):
        is_chosen = (rank(), calls) == OVERFLOW
        return backward(self * float("inf") if is_chosen else self, *args, **kwargs)

    def captured(self, function):
        if rank() in UNCAPTURED:
            raise RuntimeError("not to be captured")
        return capture(self, function)

    LSTrainer.train_step, torch.Tensor.backward, CudaGraphs.capture = train_step, overflowing, captured
    precise(lambda: None)()


if __name__ in ("__main__", "__mp_main__"):
    faulthandler.dump_traceback_later(120, repeat=True)
    _watch()
if __name__ == "__main__":
    cli.train()
