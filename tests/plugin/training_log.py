"""What training prints, read back with all digits."""

import json
import re
from collections.abc import Callable


def precise(main: Callable[[], object]) -> Callable[[], object]:
    """Return ``main`` with progress lines of full precision instead of three digits."""

    def run() -> object:
        from fairseq.logging import metrics

        rounded = metrics.log_scalar
        metrics.log_scalar = lambda key, value, weight=1, priority=10, round=None: rounded(key, value, weight, priority)
        return main()

    return run


def losses(log: str, tag: str = "train_inner") -> list[float]:
    """Return the losses of a log in ``--log-format json --log-interval 1``: of every update, or those of ``tag``."""
    lines = re.findall(rf"\| {tag} \| (\{{.*\}})", log)
    return [float(json.loads(line)["loss" if tag == "train_inner" else f"{tag}_loss"]) for line in lines]
