"""Parameters of which each rank of a data-parallel run updates a part."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ls_train.optim.all_reduce import FlatAllReduce
from ls_train.optim.moments import Moments
from ls_train.params import FlatBuffer


class SharedUpdate:
    """What an optimiser over flat buffers does where each rank updates its own parts of them.

    Every rank keeps tensors for the whole state, of which its own parts are current, and receives the other ranks'
    parameters behind each update.
    """

    buffers: tuple[FlatBuffer, ...]
    _moments: dict[int, Moments]

    def share(self, gradients: FlatAllReduce) -> None:
        """Update only this rank's parts of the parameters from now on, and gather all ranks' behind each update.

        Norm and overflow flag that are measured are those of the parts; the update needs those of all ranks. Before the
        state is read, all ranks call :attr:`consolidate_state_dict`. In every update the same parameters must have a
        gradient on all ranks: a rank leaves its part of any other as it is.

        Args:
            gradients: sums the gradients of all of the optimiser's buffers; ``is_sharded``.
        """
        self._sharing = gradients
        for moments in self._moments.values():
            self._restrict(moments)

    @property
    def consolidate_state_dict(self) -> Callable[[], None]:
        """What brings the state of all ranks' parts together on each; fairseq calls it on all ranks before it saves.

        Raises:
            AttributeError: no rank has a part. So ``hasattr`` is False, by which fairseq knows whether an optimiser
                gathers its state itself or a wrapper around the model has to (FullyShardedDataParallel).
        """
        if self._sharing is None:
            raise AttributeError("the state is not divided among ranks: state_dict() is complete as it is")
        return self._consolidate

    def _reset_sharing(self) -> None:
        self._sharing: FlatAllReduce | None = None
        self._is_partial = False  # whether what is not this rank's part of the state is out of date

    @torch.no_grad()
    def _consolidate(self) -> None:
        if not self._is_partial:
            return
        for moments in self._moments.values():
            for flat in moments.flats():
                for part in range(len(self._sharing.parts(moments.buffer))):
                    self._sharing.gather(moments.buffer, flat, part)
        self._sharing.wait()
        self._is_partial = False

    def _restrict(self, moments: Moments) -> None:
        if self._sharing is not None:
            moments.restrict(self._sharing.parts(moments.buffer))

    def _arrivals(self, buffer: FlatBuffer) -> Iterable[int] | None:
        """Return the numbers of this rank's parts as their gradients arrive, None where it has everything."""
        return None if self._sharing is None else self._sharing.arrivals(buffer)

    def _gather_part(self, buffer: FlatBuffer, part: int) -> None:
        """Start to gather a part that is updated."""
        if self._sharing is not None:
            self._sharing.gather(buffer, buffer.data, part)

    def _gather_parts(self) -> None:
        """Let the device wait for the other ranks' parts."""
        if self._sharing is not None:
            self._sharing.wait()
            self._is_partial = True

    def _forget_parts(self) -> None:
        """Take the state for complete: it is about to be replaced."""
        self._is_partial = False

    def _check_complete(self) -> None:
        if self._is_partial:
            raise RuntimeError(
                "each rank has its own part of the optimiser's state: call consolidate_state_dict() on all ranks first"
            )

    def _check_measured(self, of_all_ranks: object) -> None:
        if self._sharing is not None and of_all_ranks is None:
            raise RuntimeError("each rank measures its own part of the gradients: pass norm and flag of all ranks")

    def _check_alone(self) -> None:
        if self._sharing is not None:
            raise RuntimeError(
                "parameters were added, or moved by .half(), .to() or an assignment to param.data, after the ranks had "
                "divided them: do it before"
            )
